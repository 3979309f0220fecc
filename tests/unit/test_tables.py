"""Tables at the widths of terminals: whatever has to give way, no figure is cut."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

import benchmarks
import twostroke
from twostroke.config.engine import EngineConfig
from twostroke.planner.options import PlanOptions
from twostroke.planner.plan import Plan, make_plan
from twostroke.planner.show import print_plan
from twostroke.tables import print_table

WIDTHS = (60, 80, 120)


def printed(table: Table, width: int) -> list[str]:
    console = Console(record=True, width=width, file=io.StringIO())
    print_table(table, console)
    return console.export_text().splitlines()


def table_of(*columns: str, **kwargs: Any) -> Table:
    table = Table(**kwargs)
    for name in columns:
        table.add_column(name)
    return table


def test_a_note_wraps_at_its_words_and_a_figure_stays_whole() -> None:
    table = table_of("bytes", "time at best", "note", box=None, pad_edge=False)
    note = "what a card has in all, and how much of it may be in use"
    table.add_row("20,796,461,696", "1.10 ms", note)
    lines = printed(table, 40)
    assert max(map(len, lines)) <= 40
    row = next(line for line in lines if "20,796,461,696" in line)
    assert "1.10 ms" in row
    assert set(note.split()) <= set(" ".join(lines).split())
    assert "time at best" not in "\n".join(lines)  # the header was wrapped, and its words are there
    assert {"time", "at", "best"} <= set(" ".join(lines).split())


def test_where_wrapping_does_not_suffice_lines_are_longer_than_the_terminal() -> None:
    names = [f"column{i}" for i in range(8)]
    for kwargs in ({}, {"box": None, "pad_edge": False}):
        table = table_of(*names, **kwargs)
        table.add_row(*(f"[bold]{10**12 + i:,}[/]" for i in range(8)))
        text = "\n".join(printed(table, 60))
        assert all(f"{10**12 + i:,}" in text for i in range(8))
        assert all(name in text for name in names)


@pytest.fixture(scope="module")
def plan_with_windows(random_models: dict[str, Path]) -> Plan:
    config = EngineConfig.from_keywords(model=str(random_models["gemma3"]), dtype="bfloat16")
    return make_plan(config, PlanOptions(device_name="L4", price_per_hour=3.0))


@pytest.mark.parametrize("width", WIDTHS)
def test_a_plan_of_a_model_with_windows_is_whole_at_every_width(plan_with_windows: Plan, width: int) -> None:
    console = Console(record=True, width=width, file=io.StringIO())
    print_plan(plan_with_windows, console)
    text, memory = console.export_text(), plan_with_windows.memory
    assert "…" not in text
    for number in (memory.memory_bytes, memory.weight_bytes, memory.step_bytes, memory.kv_bytes):
        assert f" {number:,} " in text
    assert len(memory.kinds) > 1
    for kind in memory.kinds:  # the figures of each kind are in the note, whose words may be on several lines
        assert str(kind.num_layers) in text
    of_changes = [change for change in plan_with_windows.changes if change.outcome is not None]
    for change in of_changes:
        line = next(line for line in text.splitlines() if line.startswith(change.name))
        assert change.outcome is not None
        assert f" {change.outcome.num_blocks:,} " in line


def test_whoever_makes_a_table_prints_it_whole() -> None:
    """Rich itself cuts what does not fit: its own print would do so, of a table that somebody adds."""
    sources, benches = Path(twostroke.__file__).parent, Path(benchmarks.__file__).parent
    makers = {
        path
        for path in [*sources.rglob("*.py"), *benches.rglob("*.py")]
        if "plain_table(" in path.read_text() or ("Table(" in path.read_text() and "rich.table" in path.read_text())
    }
    makers -= {sources / "tables.py"}
    assert len(makers) > 15
    for path in makers:
        text = path.read_text()
        assert "print_table(" in text or ".print(" not in text, path
        assert not re.search(r"\.print\(\s*_?(table|rows)\b", text), path

"""The tables of `python -m benchmarks spec`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.goals import GATE
from twostroke.tables import print_table


def print_spec(found: Mapping[str, Any], console: Console | None = None) -> None:
    """The tables of what was measured, and from which batch size on each method drafts hardly anything."""
    console = console or Console()
    if found["fixed"]:
        console.print(f"one request, {found['model']}: k drafts in every step", highlight=False)
        columns = ("drafts", "k", "set a", "a", "E", "verify", "draft", "predicted", "speed-up", "95 %")
        table = _table(columns)
        for row in found["fixed"]:
            table.add_row(
                row["method"],
                str(row["num_drafts"]),
                _optional(row["set_acceptance"]),
                f"{row['acceptance']:.2f}",
                f"{row['tokens_per_pass']:.2f}",
                f"{row['verify_over_plain']:.2f}",
                f"{row['draft_over_plain']:.2f}",
                f"{row['predicted']:.2f}",
                f"{row['speedup']:.2f}",
                f"{row['low']:.2f}-{row['high']:.2f}",
            )
        print_table(table, console)
    if found["gate"]:
        console.print("the gate: num_speculative_tokens auto", highlight=False)
        table = _table(("drafts", "requests", "set a", "drafts a pass", "speed-up", "95 %", ""))
        for row in found["gate"]:
            table.add_row(
                row["method"],
                str(row["batch"]),
                _optional(row["set_acceptance"]),
                f"{row['drafts_per_pass']:.2f}",
                f"{row['speedup']:.2f}",
                f"{row['low']:.2f}-{row['high']:.2f}",
                "" if row["speedup"] >= GATE else f"below {GATE}",
            )
        print_table(table, console)
        for line in off_from(found["gate"]):
            console.print(line, highlight=False)
    if found["alpha"]:
        console.print("a draft that stands is the token itself; classical acceptance is min(1, p/q)", highlight=False)
        table = _table(("drafts", "temperature", "looked at", "a", "expected", "at least", "classical"))
        for row in found["alpha"]:
            table.add_row(
                row["method"],
                f"{row['temperature']:g}",
                str(row["num_drafts"]),
                *(f"{row[name]:.3f}" for name in ("alpha", "expected", "at_least", "classical")),
            )
        print_table(table, console)


def off_from(rows: list[Mapping[str, Any]]) -> list[str]:
    """Per method and acceptance, the smallest number of requests with less than a tenth of a draft a pass."""
    lines: list[str] = []
    drafting = [row for row in rows if row["method"] != "none"]
    for method, acceptance in dict.fromkeys((row["method"], row["set_acceptance"]) for row in drafting):
        mine = [row for row in rows if (row["method"], row["set_acceptance"]) == (method, acceptance)]
        off = [row["batch"] for row in mine if row["drafts_per_pass"] < 0.1]
        who = method if acceptance is None else f"{method} at {acceptance:g}"
        lines.append(f"{who}: {f'off from {min(off)} requests on' if off else 'on at every size'}")
    return lines


def _table(columns: tuple[str, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == 0 else "right")
    return table


def _optional(value: float | None) -> str:
    return "" if value is None else f"{value:g}"

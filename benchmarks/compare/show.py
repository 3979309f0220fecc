"""A comparison for people: a table, and one small plot for each figure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from twostroke.measure.figure import MEASURED, PREDICTED
from twostroke.measure.limits import words_of_limits
from twostroke.tables import print_table

_OURS = "twostroke"


def figure_names(results: Mapping[str, Any]) -> list[str]:
    """Of every engine, in the order they were measured."""
    return list(dict.fromkeys(name for engine in results["engines"].values() for name in engine["figures"]))


def print_compared(results: Mapping[str, Any], console: Console | None = None) -> None:
    """Medians, in brackets how many times faster ours is; and why somebody has none."""
    console = console or Console()
    rows = Table(box=None, pad_edge=False, header_style="bold")
    rows.add_column("tokens per second")
    names = figure_names(results)
    for name in names:
        rows.add_column(name, justify="right")
    rows.add_column("ready after", justify="right")
    for engine, found in results["engines"].items():
        ready_s = found["ready_after_s"]
        cells = [_cell(engine, found["figures"].get(name)) for name in names]
        rows.add_row(engine, *cells, "-" if ready_s is None else f"{ready_s:.1f} s")
    print_table(rows, console)
    for engine, found in results["engines"].items():
        if found["failure"] is not None:
            console.print(f"[bold red]{engine}[/]: {found['failure']}", highlight=False)
    console.print(words_of_limits(results["limits"]))
    if results["works_left_out_of_a_round"]:
        console.print(f"[yellow]{results['works_left_out_of_a_round']} works were left out of a round for time[/]")


def _cell(engine: str, figure: Mapping[str, Any] | None) -> str:
    if figure is None:
        return "-"
    value = f"{figure['median_tok_s']:,.1f}"
    ratio = figure["twostroke_to_this"]
    return value if engine == _OURS or ratio is None else f"{value} ({ratio:.2f}x)"


def draw(figure: Any, results: Mapping[str, Any]) -> None:
    """One plot for each figure: their scales have nothing in common."""
    names = figure_names(results)
    columns = max(1, -(-len(names) // 2))
    for i, name in enumerate(names):
        axes = figure.add_subplot(2, columns, i + 1)
        shown = {
            engine: found["figures"][name]["median_tok_s"]
            for engine, found in results["engines"].items()
            if name in found["figures"]
        }
        colours = [MEASURED if engine == _OURS else PREDICTED for engine in shown]
        drawn = axes.bar(list(shown), list(shown.values()), color=colours)
        axes.bar_label(drawn, fmt="%.3g", fontsize=7)
        axes.set_title(f"{name} (tok/s)", fontsize=9)
        axes.tick_params(axis="x", labelrotation=20, labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)

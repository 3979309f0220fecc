"""What `twostroke plan --measured` prints below the plan."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from twostroke.planner.after_run import AfterRun
from twostroke.planner.back_test import errors
from twostroke.planner.show_replay import cells, table_of
from twostroke.planner.words import milliseconds, significant
from twostroke.tables import print_table


def print_after_run(after: AfterRun, console: Console | None = None) -> None:
    """Sizes, then times, as planned and as measured."""
    console = console or Console()
    console.print("\nafter the run: sizes, as planned and as the engine had them")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("")
    for heading in ("planned", "measured", "off by"):
        table.add_column(heading, justify="right")
    for one in after.sizes:
        off = "exact" if one.planned == one.measured else f"{one.error:+.1%}"
        table.add_row(one.figure.replace("_", " "), f"{one.planned:,}", f"{one.measured:,}", off)
    print_table(table, console)
    if after.why_not:
        console.print(f"times are not compared: {after.why_not}", highlight=False)
        return
    if after.planned:
        console.print("times of its requests: predictions by calibrated steps, and as measured", highlight=False)
        off_by = {name: f"{error:+.1%}" for name, error in errors(after.planned, after.measured).items()}
        columns = {"planned": cells(after.planned), "measured": cells(after.measured), "off by": off_by}
        print_table(table_of(columns), console)
        return
    console.print("its steps beside their floors; no step is faster than its floor", highlight=False)
    print_table(_floors(after), console)


def _floors(after: AfterRun) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("")
    for heading in ("steps", "median", "median floor", "floor of time", "nearest"):
        table.add_column(heading, justify="right")
    for kind in after.beside_floors:
        times = milliseconds(kind.median_s), milliseconds(kind.median_floor_s)
        shares = (f"{significant(100 * share)}%" for share in (kind.share, kind.nearest))
        table.add_row(kind.kind, f"{kind.num_steps:,}", *times, *shares)
    return table

"""What `twostroke plan --measured` prints below the plan."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from twostroke.planner.after_run import AfterRun
from twostroke.planner.back_test import errors
from twostroke.planner.show_replay import cells, table_of


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
    console.print(table)
    what = "floors, which nothing beats" if after.are_floors else "predictions by calibrated steps"
    console.print(f"times of its requests: {what}, and as measured", highlight=False)
    off_by = {name: f"{error:+.1%}" for name, error in errors(after.planned, after.measured).items()}
    columns = {"planned": cells(after.planned), "measured": cells(after.measured), "off by": off_by}
    console.print(table_of(columns))

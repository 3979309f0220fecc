"""The table of `python -m benchmarks handover`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from twostroke.tables import print_table


def print_handover(found: Mapping[str, Any], console: Console | None = None) -> None:
    """What was measured."""
    table = Table("transport", box=None, pad_edge=False, header_style="bold")
    for name in ("bytes", "exact", "first ms", "ms", "GB/s", "of one copy", "of link", "layer-wise"):
        table.add_column(name, justify="right")
    for row in found["handovers"]:
        share, layerwise = row.get("share_of_link"), row["layerwise"]
        table.add_row(
            row["transport"],
            f"{row['bytes']:,}",
            "yes" if row["is_exact"] else f"no: {row['formula_bytes']:,}",
            f"{row['first_ms']:.1f}",
            f"{row['ms']:.1f}",
            f"{row['gb_per_s']:.3g}",
            f"{row['share_of_one_copy']:.0%}",
            "" if share is None else f"{share:.1%}",
            f"{layerwise['ratio']:.2f}",
        )
    console = console or Console()
    print_table(table, console)
    console.print("of one copy: of the rate at which one thread copies as much inside a process", highlight=False)
    console.print("layer-wise: from the prefill's begin, over the longer of prefill and transfer", highlight=False)

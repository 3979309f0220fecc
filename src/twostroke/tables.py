"""Tables and lines in a terminal, with every figure complete at any width: notes wrap between words."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

_MAX_UNWRAPPED = 26
"""Widest cell that stays on one line; columns with wider cells are notes, and wrap between words."""


def plain_table(words: Sequence[str], figures: Sequence[str], title: str | None = None, *, gap: int = 2) -> Table:
    """Return a table without lines: columns of words, then columns of figures to the right, `gap` cells apart."""
    table = Table(*words, title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    table.padding = (0, gap, 0, 0)
    for name in figures:
        table.add_column(name, justify="right")
    return table


def print_line(line: str, console: Console, *, markup: bool = False) -> None:
    """Print a line unwrapped in a terminal of any width; rich's tags only count with `markup`."""
    console.print(line, highlight=False, soft_wrap=True, markup=markup)


def print_table(table: Table, console: Console) -> None:
    """Print a table without cutting figures or words.

    Headers and notes wrap in a narrow terminal. If that is not enough, lines are longer than the terminal is wide.
    """
    _, right, _, left = table.padding
    rules = 0 if table.box is None else len(table.columns) + 1
    gaps = (len(table.columns) - (not table.pad_edge)) * (left + right) + rules
    least = [_least_width(column) for column in table.columns]
    widths = [_width(column) for column in table.columns]
    while sum(widths) + gaps > console.width and widths != least:
        widest = max((i for i in range(len(widths)) if widths[i] > least[i]), key=widths.__getitem__)
        widths[widest] -= 1
    for column, width in zip(table.columns, widths, strict=True):
        column.width, column.no_wrap, column.overflow = width, False, "fold"
    table.width = sum(widths) + gaps
    console.print(table, soft_wrap=True)


def _width(column: Column) -> int:
    """Return the characters of the widest cell."""
    return max(map(cell_len, [_shown(column.header), *map(_shown, column.cells)]), default=0)


def _least_width(column: Column) -> int:
    """Return the characters that a column needs so that no figure and no word is cut."""
    cells = [_shown(cell) for cell in column.cells]
    if max(map(cell_len, cells), default=0) > _MAX_UNWRAPPED:
        cells = [word for cell in cells for word in cell.split()]
    return max(map(cell_len, [*cells, *_shown(column.header).split()]), default=0)


def _shown(cell: object) -> str:
    """Return a cell's characters, without colours."""
    return cell.plain if isinstance(cell, Text) else Text.from_markup(str(cell)).plain

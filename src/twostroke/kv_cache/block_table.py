"""The blocks of one request, one row per KV group."""

from __future__ import annotations

NO_BLOCK = 0
"""Stands in entries that left the window. It is a valid id, so a kernel that gathers before it masks stays in bounds;
no query sees what it finds there."""


class BlockTable:
    """Which block holds which tokens of a request.

    ```
    entry            0      1      2      3      4            all rows have the same length
    full group     [ 17 ] [  4 ] [ 30 ] [  8 ] [ 11 ]         first_held 0
    window group   [  · ] [  · ] [  9 ] [ 22 ] [  6 ]         first_held 2: entries 0 and 1 were given back
                   0 ............................... num_slots tokens have room
                   0 .................... num_tokens have been given a place
    ```
    """

    __slots__ = ("first_held", "num_named", "num_promised", "num_reported", "num_slots", "num_tokens", "rows")

    def __init__(self, rows: list[list[int]], first_held: list[int], block_size: int) -> None:
        self.rows = rows
        self.first_held = first_held
        self.num_slots = len(rows[0]) * block_size
        self.num_tokens = 0
        self.num_reported = 0
        """Entries that the runner has been told of."""
        self.num_named = 0
        """Blocks, in each row, that went into the prefix cache or came from it."""
        self.num_promised = 0
        """Blocks that admission set aside for computing everything known then."""

    @property
    def num_held(self) -> int:
        """Blocks that the request refers to, over all groups."""
        return sum(len(row) - first for row, first in zip(self.rows, self.first_held, strict=True))

    def tail_first(self, from_entry: int = 0) -> list[int]:
        """Held blocks of the entries from `from_entry` on, last entry first, all groups side by side."""
        last = len(self.rows[0]) - 1
        return [
            row[entry]
            for entry in range(last, from_entry - 1, -1)
            for row, first in zip(self.rows, self.first_held, strict=True)
            if entry >= first
        ]

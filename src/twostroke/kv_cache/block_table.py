"""The blocks of one request, one row per KV group."""

from __future__ import annotations

from collections.abc import Sequence

NO_BLOCK = 0
"""Stands in entries that left the window. It is a valid id, so a kernel that gathers before it masks stays in bounds;
no query sees what it finds there."""


class BlockTable:
    """Which block holds which tokens of a request.

    ```
    full group     [ 17            ] [  4            ] [ 30            ]   first_held 0
    window group   [  · ] [  · ] [  9 ] [ 22 ] [  6 ] [ 13 ]               first_held 2: entries 0 and 1 were given back
                   0 .................................... num_slots tokens have room in all rows
                   0 ........................... num_tokens have been given a place
    ```
    """

    __slots__ = ("block_tokens", "first_held", "num_named", "num_promised", "num_reported", "num_tokens", "rows")

    def __init__(self, rows: list[list[int]], first_held: list[int], block_tokens: Sequence[int]) -> None:
        self.rows = rows
        self.first_held = first_held
        self.block_tokens = block_tokens
        """Per row, tokens of a block."""
        self.num_tokens = 0
        self.num_reported = [0] * len(rows)
        """Per row, entries that the runner has been told of."""
        self.num_named = 0
        """Tokens of whole pages whose blocks, as far as they are full, went into the prefix cache or came from it."""
        self.num_promised = 0
        """Blocks that admission set aside for computing everything known then."""

    @property
    def num_slots(self) -> int:
        """Tokens that have room in all rows."""
        return min(len(row) * size for row, size in zip(self.rows, self.block_tokens, strict=True))

    @property
    def num_held(self) -> int:
        """Blocks that the request refers to, over all groups."""
        return sum(len(row) - first for row, first in zip(self.rows, self.first_held, strict=True))

    def tail_first(self, num_tokens: int = 0) -> list[int]:
        """Held blocks that begin at token `num_tokens` or later, the last one first, all groups side by side."""
        if len(self.rows) == 1:
            first = max(self.first_held[0], -(-num_tokens // self.block_tokens[0]))
            return self.rows[0][first:][::-1]
        held = [
            (-entry * size, group_id, row[entry])
            for group_id, (row, first, size) in enumerate(
                zip(self.rows, self.first_held, self.block_tokens, strict=True)
            )
            for entry in range(max(first, -(-num_tokens // size)), len(row))
        ]
        return [block_id for _, _, block_id in sorted(held)]

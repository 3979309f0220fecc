"""How what a lender has ready gets into a borrower's blocks: read or received, and as it is or taken apart.

```
                       blocks alike                          blocks of another size
memory is shared       copied                                taken apart where they lie
bytes are sent         received where they belong            received beside, some at once, and taken apart
```
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Protocol

from twostroke.kv_cache.holds import KVImport
from twostroke.kv_cache.layout import KVLayout
from twostroke.kv_transfer.conversion import Conversion, OrderOf
from twostroke.kv_transfer.frames import Ready, TransferBroken, receive_pieces
from twostroke.kv_transfer.memory import KVMemory

_STAGED_BYTES = 4 << 20
"""Of sent blocks that are taken apart, so many bytes at once."""


class Intake(Protocol):
    """Takes some layers of some entries to where they belong."""

    def take(self, ready: Ready) -> int:
        """Returns how many bytes came.

        Raises:
            TransferBroken: the lender says what cannot be.
            OSError: the connection has broken, or nothing came in time.
        """
        ...


def intake(
    ours: KVMemory,
    their_layout: KVLayout,
    into: KVImport,
    first_entries: Sequence[int],
    order: OrderOf,
    connection: socket.socket,
    theirs: KVMemory | None,
) -> Intake:
    """For one prefix.

    Args:
        ours: the borrower's blocks.
        their_layout: of the lender's.
        into: those that are to be filled.
        first_entries: per KV group, the lender's first entry that was asked for.
        order: where tokens are in a block of either.
        connection: where bytes come from.
        theirs: the lender's blocks, where its memory is shared.
    """
    if theirs is not None:
        return _Copied(ours, theirs, into) if their_layout == ours.layout else _TakenApart(ours, theirs, into, order)
    if their_layout == ours.layout:
        return _Received(ours, into, connection)
    return _ReceivedBeside(ours, their_layout, into, first_entries, order, connection)


class _Copied:
    def __init__(self, ours: KVMemory, theirs: KVMemory, into: KVImport) -> None:
        self._ours, self._theirs, self._into = ours, theirs, into

    def take(self, ready: Ready) -> int:
        their_rows = _rows_of(ready, self._theirs)
        rows, starts = _wanted(ready, self._into)
        return self._ours.copy_from(self._theirs, their_rows, rows, range(ready.first_layer, ready.end_layer), starts)


class _Received:
    def __init__(self, ours: KVMemory, into: KVImport, connection: socket.socket) -> None:
        self._ours, self._into, self._connection = ours, into, connection

    def take(self, ready: Ready) -> int:
        rows, starts = _wanted(ready, self._into)
        places = self._ours.pieces(rows, range(ready.first_layer, ready.end_layer), starts)
        receive_pieces(self._connection, places)
        return sum(map(len, places))


class _TakenApart:
    def __init__(self, ours: KVMemory, theirs: KVMemory, into: KVImport, order: OrderOf) -> None:
        self._theirs, self._into = theirs, into
        self._conversion = Conversion(ours, theirs, order)

    def take(self, ready: Ready) -> int:
        layers = range(ready.first_layer, ready.end_layer)
        their_rows = _rows_of(ready, self._theirs)
        return self._conversion.copy(ready.first, their_rows, self._into.rows, self._into.first_missing, layers)


class _ReceivedBeside:
    def __init__(
        self,
        ours: KVMemory,
        their_layout: KVLayout,
        into: KVImport,
        first_entries: Sequence[int],
        order: OrderOf,
        connection: socket.socket,
    ) -> None:
        self._into, self._first_entries, self._connection = into, first_entries, connection
        self._num_staged = max(1, _STAGED_BYTES // their_layout.bytes_per_block)
        self._staged = KVMemory(their_layout, memoryview(bytearray(self._num_staged * their_layout.bytes_per_block)))
        self._conversion = Conversion(ours, self._staged, order)

    def take(self, ready: Ready) -> int:
        """Whole blocks of the lender's come, also where only some tokens of the first are missing here."""
        layers, num_bytes = range(ready.first_layer, ready.end_layer), 0
        num_groups = len(self._first_entries)
        for group_id, first in enumerate(self._first_entries):
            for begin in range(max(first, ready.first), ready.end, self._num_staged):
                num_blocks = min(self._num_staged, ready.end - begin)
                staged = [range(num_blocks if group_id == other else 0) for other in range(num_groups)]
                places = self._staged.pieces(staged, layers, [0] * num_groups)
                receive_pieces(self._connection, places)
                self._conversion.copy(begin, staged, self._into.rows, self._into.first_missing, layers)
                num_bytes += sum(map(len, places))
        return num_bytes


def _wanted(ready: Ready, into: KVImport) -> tuple[list[tuple[int, ...]], list[int]]:
    """Per KV group our blocks of the entries that are ready, and which of them is the first that is missing."""
    rows = [row[ready.first : ready.end] for row in into.rows]
    return rows, [max(0, first - ready.first) for first in into.first_missing]


def _rows_of(ready: Ready, theirs: KVMemory) -> tuple[tuple[int, ...], ...]:
    """The lender's blocks, which are there."""
    num_entries, num_groups = ready.end - ready.first, len(theirs.layout.groups)
    if [len(row) for row in ready.rows] != [num_entries] * num_groups:
        raise TransferBroken(f"{num_entries} entries, but not as many of its blocks in each KV group.")
    if any(not 0 <= block_id < theirs.num_blocks for row in ready.rows for block_id in row):
        raise TransferBroken(f"blocks that it does not have: it has {theirs.num_blocks}.")
    return ready.rows

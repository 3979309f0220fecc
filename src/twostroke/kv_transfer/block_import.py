"""Paths of a lender's blocks into a borrower's: shared or transferred, and copied or converted.

```
                       same layout                           another size, format or number of ranks
memory is shared       copied                                converted where they lie
bytes are transferred  received in place                     received into a staging area, then converted
```

Transferred: sent by the lender over the connection, or read by NIXL out of its memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from twostroke.kernels.head_order import HeadOrder
from twostroke.kv_cache.holds import KVImport
from twostroke.kv_cache.layout import KVLayout
from twostroke.kv_transfer.connection import Connection
from twostroke.kv_transfer.conversion import Conversion, OrderOf
from twostroke.kv_transfer.frames import EntriesReady, TransferBroken, receive_pieces
from twostroke.kv_transfer.memory import KVMemory, pages_of
from twostroke.kv_transfer.recoding import KeyMeans, Recode, RecodedConversion

_STAGED_BYTES = 4 << 20
"""Bytes of the staging area for received blocks that are converted."""


@dataclass(frozen=True, slots=True)
class LentBlocks:
    """The lender's blocks, as described to the borrower."""

    layout: KVLayout
    """Layout on each of the lender's ranks."""
    num_ranks: int
    memory: KVMemory | None
    """The lender's memory if it is shared; None: the bytes are transferred."""
    orders: tuple[HeadOrder, ...] = ()
    """Places of tokens in a head of the lender's pages, per KV group; empty: same as the borrower's."""


class BlockTransfer(contextlib.AbstractContextManager["BlockTransfer"], Protocol):
    """A transfer of the bytes of one prefix, where the lender's memory is not shared."""

    def staging(self, memory: KVMemory) -> KVMemory:
        """Prepare memory outside the pool to receive bytes, and return it."""
        ...

    def receive_pages(
        self, memory: KVMemory, rows: Sequence[Sequence[int]], ready: EntriesReady, entries: Sequence[range]
    ) -> int:
        """Fill the ready layers of some pages.

        Args:
            memory: blocks to fill, of the lender's shape.
            rows: per KV group, ids of pages in it.
            ready: entries and layers that the lender has ready.
            entries: per KV group, range of these entries that is wanted; the first is 0.

        Returns:
            Number of bytes received.

        Raises:
            TransferBroken: the lender sent an invalid description.
            OSError: the connection broke, or nothing came in time.
        """
        ...


class SocketTransfer:
    """A transfer in which the lender sends the bytes: per group from the first entry requested, in order."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def staging(self, memory: KVMemory) -> KVMemory:
        return memory

    def receive_pages(
        self, memory: KVMemory, rows: Sequence[Sequence[int]], ready: EntriesReady, entries: Sequence[range]
    ) -> int:
        del entries
        places = memory.pieces(rows, range(ready.first_layer, ready.end_layer), [0] * len(rows))
        receive_pieces(self._connection, places)
        return sum(map(len, places))

    def __enter__(self) -> SocketTransfer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        """Leave the connection open; its creator closes it."""


class BlockImport(Protocol):
    """A path of a lender's layers and entries into the borrower's blocks."""

    def import_entries(self, ready: EntriesReady) -> int:
        """Store the ready entries; return the number of bytes received.

        Raises:
            TransferBroken: the lender sent an invalid description.
            OSError: the connection broke, or nothing came in time.
        """
        ...


@dataclass(frozen=True, slots=True)
class BlockReading:
    """Description of how a borrower reads blocks of another layout than its own."""

    order: OrderOf
    """Places of tokens in a head of the borrower's own pages."""
    recode: Recode | None = None
    """Converter between KV formats; None: only blocks of the borrower's own format are accepted."""
    key_means: KeyMeans | None = None
    """Means of the keys, which quantized keys are stored without; None: keys are stored whole in every format."""

    def conversion(self, ours: KVMemory, theirs: KVMemory, lent: LentBlocks) -> Conversion | RecodedConversion:
        """Return the conversion of the lender's blocks into the borrower's; `theirs` is where the bytes are now."""
        if not lent.orders:
            return Conversion(ours, theirs, self.order)
        assert self.recode is not None, "a format that this side cannot read was refused"
        return RecodedConversion(ours, theirs, self.order, lent.orders, self.recode, self.key_means)


def make_block_import(
    ours: KVMemory,
    lent: LentBlocks,
    into: KVImport,
    first_entries: Sequence[int],
    reading: BlockReading,
    transfer: BlockTransfer,
) -> BlockImport:
    """Return the path of one prefix into the borrower's blocks.

    Args:
        ours: the borrower's blocks.
        lent: the lender's blocks.
        into: the pages to fill.
        first_entries: per KV group, the lender's first entry that is requested.
        reading: how blocks of another layout are read.
        transfer: transfer of the lender's bytes, where its memory is not shared.
    """
    is_alike = not lent.orders and (lent.layout, lent.num_ranks) == (ours.layout, ours.num_ranks)
    if lent.memory is not None:
        if is_alike:
            return _CopyShared(ours, lent.memory, into)
        return _ConvertShared(reading.conversion(ours, lent.memory, lent), lent.memory, into)
    if is_alike:
        return _ReceiveInPlace(ours, into, transfer)
    bytes_per_block = lent.layout.bytes_per_block
    num_staged = max(1, _STAGED_BYTES // (lent.num_ranks * bytes_per_block))
    staged = (memoryview(bytearray(num_staged * bytes_per_block)) for _ in range(lent.num_ranks))
    beside = transfer.staging(KVMemory(lent.layout, *staged))
    return _ReceiveAndConvert(reading.conversion(ours, beside, lent), beside, into, first_entries, transfer)


class _CopyShared:
    def __init__(self, ours: KVMemory, theirs: KVMemory, into: KVImport) -> None:
        self._ours, self._theirs, self._into = ours, theirs, into

    def import_entries(self, ready: EntriesReady) -> int:
        their_rows = _rows_of(ready, self._theirs)
        rows, starts = _wanted(ready, self._into)
        return self._ours.copy_from(self._theirs, their_rows, rows, range(ready.first_layer, ready.end_layer), starts)


class _ReceiveInPlace:
    def __init__(self, ours: KVMemory, into: KVImport, transfer: BlockTransfer) -> None:
        self._ours, self._into, self._bringing = ours, into, transfer

    def import_entries(self, ready: EntriesReady) -> int:
        rows, starts = _wanted(ready, self._into)
        missing = [row[start:] for row, start in zip(rows, starts, strict=True)]
        entries = [range(min(start, ready.end - ready.first), ready.end - ready.first) for start in starts]
        return self._bringing.receive_pages(self._ours, missing, ready, entries)


class _ConvertShared:
    def __init__(self, conversion: Conversion | RecodedConversion, theirs: KVMemory, into: KVImport) -> None:
        self._conversion, self._theirs, self._into = conversion, theirs, into

    def import_entries(self, ready: EntriesReady) -> int:
        layers = range(ready.first_layer, ready.end_layer)
        their_rows = _rows_of(ready, self._theirs)
        return self._conversion.copy(ready.first, their_rows, self._into.rows, self._into.first_missing, layers)


class _ReceiveAndConvert:
    def __init__(
        self,
        conversion: Conversion | RecodedConversion,
        staged: KVMemory,
        into: KVImport,
        first_entries: Sequence[int],
        transfer: BlockTransfer,
    ) -> None:
        self._conversion, self._staged = conversion, staged
        self._into, self._first_entries, self._bringing = into, first_entries, transfer

    def import_entries(self, ready: EntriesReady) -> int:
        """Receive whole pages of the lender, even where only some tokens of the first are missing here."""
        layers, num_bytes = range(ready.first_layer, ready.end_layer), 0
        num_groups = len(self._first_entries)
        for group_id, first in enumerate(self._first_entries):
            room = pages_of(self._staged, group_id)
            for begin in range(max(first, ready.first), ready.end, len(room)):
                num_pages = min(len(room), ready.end - begin)
                at = begin - ready.first
                entries = [range(at, at + num_pages if group_id == other else at) for other in range(num_groups)]
                staged = [room[: len(wanted)] for wanted in entries]
                num_bytes += self._bringing.receive_pages(self._staged, staged, ready, entries)
                self._conversion.copy(begin, staged, self._into.rows, self._into.first_missing, layers)
        return num_bytes


def _wanted(ready: EntriesReady, into: KVImport) -> tuple[list[tuple[int, ...]], list[int]]:
    """Return, per KV group, our pages of the ready entries, and the index of the first missing one among them."""
    rows = [row[ready.first : ready.end] for row in into.rows]
    return rows, [max(0, first - ready.first) for first in into.first_missing]


def _rows_of(ready: EntriesReady, theirs: KVMemory) -> tuple[tuple[int, ...], ...]:
    """Return the lender's pages after checking that they exist."""
    num_entries, num_groups = ready.end - ready.first, len(theirs.layout.groups)
    if [len(row) for row in ready.rows] != [num_entries] * num_groups:
        raise TransferBroken(f"{num_entries} entries, but not as many of its pages in each KV group.")
    if any(not theirs.has_page(group_id, page_id) for group_id, row in enumerate(ready.rows) for page_id in row):
        raise TransferBroken(f"pages that it does not have: it has {theirs.num_blocks} blocks.")
    return ready.rows

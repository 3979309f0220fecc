"""KV memory as bytes: finds the K and V of a layer of a page.

Transfers between pools are described in pages (kv_cache/layout.py): rows hold page ids, and an entry is a page.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from twostroke.kv_cache.layout import KVGroup, KVLayout

SHARED_FROM_BYTES = 4 << 20
"""Bytes from which a copy uses a second thread, which takes a tenth of a millisecond to start."""
Piece = tuple[NDArray[np.uint8], NDArray[np.uint8]]
"""Destination and source of a copy."""


class KVMemory:
    """The blocks of a pool in memory of this or another process.

    ```
    page 0: | layer 0: K V | layer 1: K V | …    page 1: | …      a piece is the K and V of some layers of one page
    ```

    With several ranks, each has all blocks, with its share of the KV heads (KVSpec.heads_of_rank).

    Args:
        layout: of the pool, as each rank has it.
        of_ranks: per rank, the bytes of all blocks.

    Raises:
        ValueError: the size is not a multiple of a block.
    """

    def __init__(self, layout: KVLayout, *of_ranks: memoryview) -> None:
        self.layout = layout
        self._of_ranks = tuple(data.cast("B") for data in of_ranks)
        self._bytes: tuple[NDArray[np.uint8], ...] = tuple(np.frombuffer(data, np.uint8) for data in self._of_ranks)
        if any(len(data) % layout.bytes_per_block for data in self._of_ranks):
            raise ValueError(f"no whole blocks of {layout.bytes_per_block:,} bytes")
        self._id_bytes = [layout.page_ids(group).bytes_per_id for group in layout.groups]

    @property
    def num_ranks(self) -> int:
        """Number of ranks that share the KV heads."""
        return len(self._of_ranks)

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks on each rank."""
        return len(self._of_ranks[0])

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return self.num_bytes // self.layout.bytes_per_block

    def address(self, rank: int) -> int:
        """Return the address of a rank's memory in this process."""
        return int(self._bytes[rank].ctypes.data)

    def pages(self, rank: int, group_id: int) -> NDArray[np.uint8]:
        """Return a rank's pages of one group, [ids, its layers, K and V, the rank's KV heads, bytes of a head].

        The result is a view. Consecutive ids may be closer than a page is long, and not every id is a page of the
        group.
        """
        layout, group = self.layout, self.layout.groups[group_id]
        num_heads, head_bytes, id_bytes = (
            group.spec.num_kv_heads,
            layout.bytes_per_head(group),
            self._id_bytes[group_id],
        )
        num_ids = max(0, self.num_bytes - layout.bytes_per_page(group) + id_bytes) // id_bytes
        shape = (num_ids, len(group.layer_ids), 2, num_heads, head_bytes)
        strides = (id_bytes, layout.bytes_per_layer(group), num_heads * head_bytes, head_bytes, 1)
        return np.lib.stride_tricks.as_strided(self._bytes[rank], shape, strides)

    def first_byte(self, group_id: int, page_id: int) -> int:
        """Return the offset of a page."""
        return page_id * self._id_bytes[group_id]

    def has_page(self, group_id: int, page_id: int) -> bool:
        """Return whether the whole page lies in this memory."""
        size = self.layout.bytes_per_page(self.layout.groups[group_id])
        return 0 <= self.first_byte(group_id, page_id) <= self.num_bytes - size

    @property
    def num_layers(self) -> int:
        """Number of the model's layers that keep KV."""
        return sum(len(group.layer_ids) for group in self.layout.groups)

    def pieces(self, rows: Sequence[Sequence[int]], layers: range, starts: Sequence[int]) -> list[memoryview]:
        """Return the bytes of some layers of pages, ordered by group, page, rank, layer.

        Neighbouring layers of a page form one piece, which saves the overhead of several.

        Args:
            rows: per KV group, ids of existing pages.
            layers: range of layer ids.
            starts: per KV group, index of the first page that is wanted.
        """
        found: list[memoryview] = []
        for group_id, (group, row, start) in enumerate(zip(self.layout.groups, rows, starts, strict=True)):
            first, end = self._bytes_of_layers(group, layers)
            if first < end:
                begins = (self.first_byte(group_id, page_id) for page_id in row[start:])
                found += [data[at + first : at + end] for at in begins for data in self._of_ranks]
        return found

    def copy_from(
        self,
        theirs: KVMemory,
        their_rows: Sequence[Sequence[int]],
        rows: Sequence[Sequence[int]],
        layers: range,
        starts: Sequence[int],
    ) -> int:
        """Copy the same pieces from another pool's pages, with as many ranks, into this one's.

        Returns:
            Number of bytes copied.
        """
        pieces: list[Piece] = []
        for group_id, (group, their_row, row, start) in enumerate(
            zip(self.layout.groups, their_rows, rows, starts, strict=True)
        ):
            first, end = self._bytes_of_layers(group, layers)
            if first < end:
                places = [
                    (self.first_byte(group_id, page_id), theirs.first_byte(group_id, their_id))
                    for page_id, their_id in zip(row[start:], their_row[start:], strict=True)
                ]
                pieces += [
                    (ours[here + first : here + end], others[there + first : there + end])
                    for ours, others in zip(self._bytes, theirs._bytes, strict=True)
                    for here, there in places
                ]
        return copy_pieces(pieces)

    def _bytes_of_layers(self, group: KVGroup, layers: range) -> tuple[int, int]:
        """Return the offsets in a page of the group at which these layers begin and end."""
        first, end = layers_of_group(group, layers)
        layer_bytes = self.layout.bytes_per_layer(group)
        return first * layer_bytes, end * layer_bytes


def copy_pieces(pieces: Sequence[Piece]) -> int:
    """Copy all pieces; other threads run meanwhile.

    Large copies use two threads: one alone does not saturate the memory (python -m benchmarks handover).

    Returns:
        Number of bytes copied.
    """
    num_bytes = sum(ours.nbytes for ours, _ in pieces)
    if num_bytes < SHARED_FROM_BYTES:
        _copy(pieces)
        return num_bytes
    middle = len(pieces) // 2
    helper = threading.Thread(target=_copy, args=(pieces[:middle],), name="twostroke-copy")
    helper.start()
    _copy(pieces[middle:])
    helper.join()
    return num_bytes


def _copy(pieces: Sequence[Piece]) -> None:
    for ours, others in pieces:
        ours[:] = others


def layers_of_group(group: KVGroup, layers: range) -> tuple[int, int]:
    """Return the indices in the group at which these layers begin and end; its ids ascend, so they are neighbours."""
    return bisect_left(group.layer_ids, layers.start), bisect_left(group.layer_ids, layers.stop)


def pages_of(memory: KVMemory, group_id: int) -> list[int]:
    """Return the ids of all pages of a group that fit in the memory, if no other group uses it."""
    return memory.layout.page_ids(memory.layout.groups[group_id]).of_blocks(range(memory.num_blocks))


class SharedMapping:
    """Another process's KV memory, mapped for reading."""

    def __init__(self, descriptors: Sequence[int], num_bytes: int) -> None:
        """Map the memory; it stays mapped while a KVMemory of it exists.

        Args:
            descriptors: of each rank's memory; they are closed.
            num_bytes: bytes of each.

        Raises:
            OSError: it cannot be mapped.
            ValueError: it is smaller.
        """
        try:
            self._maps = [mmap.mmap(one, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ) for one in descriptors]
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def memory(self, layout: KVLayout) -> KVMemory:
        """Return the mapping as blocks."""
        return KVMemory(layout, *map(memoryview, self._maps))


class SharedMemory:
    """Memory that other processes can map: anonymous files, closed when this object is collected."""

    def __init__(self, num_files: int, num_bytes: int) -> None:
        """Create the files.

        Args:
            num_files: one for each rank.
            num_bytes: bytes of each.

        Raises:
            OSError: the system has no such memory.
        """
        made: list[int] = []
        weakref.finalize(self, _close_all, made)
        for _ in range(num_files):
            made.append(os.memfd_create("twostroke-kv", os.MFD_CLOEXEC))
            os.ftruncate(made[-1], num_bytes)
        self.descriptors = tuple(made)


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)

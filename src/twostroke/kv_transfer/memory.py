"""KV memory as bytes: which of them are the K and V of one layer of one page.

All that goes from pool to pool is told in pages (kv_cache/layout.py): rows hold page ids, and an entry is a page.
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
"""From here on a copy is worth a second thread, which takes a tenth of a millisecond to start."""
Piece = tuple[NDArray[np.uint8], NDArray[np.uint8]]
"""Where it goes, and where it is."""


class KVMemory:
    """The blocks of a pool, wherever they lie.

    ```
    page 0: | layer 0: K V | layer 1: K V | …    page 1: | …      a piece is the K and V of some layers of one page
    ```

    Where several ranks compute, each has all blocks, with its share of the KV heads (KVSpec.heads_of_rank).

    Args:
        layout: of the pool, as each rank has it.
        of_ranks: for each, all blocks, in a row.

    Raises:
        ValueError: bytes that are no whole blocks.
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
        """That have a share of it."""
        return len(self._of_ranks)

    @property
    def num_bytes(self) -> int:
        """Of all blocks, of each rank."""
        return len(self._of_ranks[0])

    @property
    def num_blocks(self) -> int:
        """That are there."""
        return self.num_bytes // self.layout.bytes_per_block

    def address(self, rank: int) -> int:
        """Where a rank's memory begins in this process."""
        return int(self._bytes[rank].ctypes.data)

    def pages(self, rank: int, group_id: int) -> NDArray[np.uint8]:
        """A rank's bytes as the pages of one group, [ids, its layers, K and V, the rank's KV heads, bytes of a head].

        A view, in which ids may be nearer to each other than a page is long; not all of them are a page's.
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
        """Where a page begins."""
        return page_id * self._id_bytes[group_id]

    def has_page(self, group_id: int, page_id: int) -> bool:
        """Whether all of such a page lies in this memory."""
        size = self.layout.bytes_per_page(self.layout.groups[group_id])
        return 0 <= self.first_byte(group_id, page_id) <= self.num_bytes - size

    @property
    def num_layers(self) -> int:
        """Of the model, that keep KV."""
        return sum(len(group.layer_ids) for group in self.layout.groups)

    def pieces(self, rows: Sequence[Sequence[int]], layers: range, starts: Sequence[int]) -> list[memoryview]:
        """The bytes of some layers of pages: group after group, page after page, in it rank
        after rank, layer after layer.

        Layers that are neighbours in a page are one piece: what a piece costs is paid once for them.

        Args:
            rows: per KV group, ids of pages that are there.
            layers: ids in a row.
            starts: per KV group, which of its pages is the first that is wanted.
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
        """The same pieces of another pool's pages, of as many ranks, into those of this one.

        Returns:
            Bytes that were copied.
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
        """Where in a page of the group these layers begin and end."""
        first, end = layers_of_group(group, layers)
        layer_bytes = self.layout.bytes_per_layer(group)
        return first * layer_bytes, end * layer_bytes


def copy_pieces(pieces: Sequence[Piece]) -> int:
    """All of them; other threads run meanwhile.

    Two threads share what is large: one alone does not keep the memory busy (python -m benchmarks handover).

    Returns:
        Bytes that were copied.
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
    """Where in a page of the group these layers begin and end: its ids ascend, so they are neighbours."""
    return bisect_left(group.layer_ids, layers.start), bisect_left(group.layer_ids, layers.stop)


def pages_of(memory: KVMemory, group_id: int) -> list[int]:
    """Return the ids of all pages of a group for which there is room, when no other group takes any."""
    return memory.layout.page_ids(memory.layout.groups[group_id]).of_blocks(range(memory.num_blocks))


class SharedMapping:
    """Another process's KV memory, to be read."""

    def __init__(self, descriptors: Sequence[int], num_bytes: int) -> None:
        """Maps it for as long as somebody holds its memory.

        Args:
            descriptors: of its ranks' memory; they are closed.
            num_bytes: of each.

        Raises:
            OSError: it cannot be mapped.
            ValueError: there is less of it.
        """
        try:
            self._maps = [mmap.mmap(one, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ) for one in descriptors]
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def memory(self, layout: KVLayout) -> KVMemory:
        """As blocks."""
        return KVMemory(layout, *map(memoryview, self._maps))


class SharedMemory:
    """Memory that other processes can map: files without names, closed when nobody refers to this object any more."""

    def __init__(self, num_files: int, num_bytes: int) -> None:
        """Make the files.

        Args:
            num_files: one for each rank.
            num_bytes: of each.

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

"""KV memory as bytes: which of them are the K and V of one layer of one page.

All that goes from pool to pool is told in pages (kv_cache/layout.py): rows hold page ids, and an entry is a page.
"""

from __future__ import annotations

import mmap
import os
import threading
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
    """

    def __init__(self, layout: KVLayout, *of_ranks: memoryview) -> None:
        self.layout = layout
        self._of_ranks = tuple(data.cast("B") for data in of_ranks)
        self._layers: tuple[NDArray[np.uint8], ...] = tuple(
            np.frombuffer(data, np.uint8).reshape(-1, layout.bytes_per_layer) for data in self._of_ranks
        )
        self._layers_per_id = [layout.page_ids(group).layers_per_id for group in layout.groups]

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
        return len(self._layers[0]) // self.layout.layers_per_block

    def address(self, rank: int) -> int:
        """Where a rank's memory begins in this process."""
        return int(self._layers[rank].ctypes.data)

    def heads(self, rank: int) -> NDArray[np.uint8]:
        """A rank's bytes, [layers of pages, K and V, its KV heads, bytes of a head]."""
        layout = self.layout
        return self._layers[rank].reshape(-1, 2, layout.num_kv_heads, layout.bytes_per_head)

    def first_layer(self, group_id: int, page_id: int) -> int:
        """Where among `heads` the layers of a page begin."""
        return page_id * self._layers_per_id[group_id]

    def has_page(self, group_id: int, page_id: int) -> bool:
        """Whether all layers of such a page lie in this memory."""
        first, num_layers = self.first_layer(group_id, page_id), len(self.layout.groups[group_id].layer_ids)
        return 0 <= first <= len(self._layers[0]) - num_layers

    @property
    def num_layers(self) -> int:
        """Of the model."""
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
        layer_bytes = self.layout.bytes_per_layer
        for group_id, (group, row, start) in enumerate(zip(self.layout.groups, rows, starts, strict=True)):
            first, end = layers_of_group(group, layers)
            if first < end:
                size = (end - first) * layer_bytes
                begins = ((self.first_layer(group_id, page_id) + first) * layer_bytes for page_id in row[start:])
                found += [data[at : at + size] for at in begins for data in self._of_ranks]
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
            first, end = layers_of_group(group, layers)
            if first < end:
                places = [
                    (self.first_layer(group_id, page_id), theirs.first_layer(group_id, their_id))
                    for page_id, their_id in zip(row[start:], their_row[start:], strict=True)
                ]
                pieces += [
                    (ours[here + first : here + end], others[there + first : there + end])
                    for ours, others in zip(self._layers, theirs._layers, strict=True)
                    for here, there in places
                ]
        return copy_pieces(pieces)


def copy_pieces(pieces: Sequence[Piece]) -> int:
    """All of them; other threads run meanwhile.

    Two threads share what is large: one alone does not keep the memory busy (twostroke bench handover).

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


def shared_descriptor(num_bytes: int) -> int:
    """Memory that can be handed to another process: a file without a name.

    Raises:
        OSError: the system has none of it.
    """
    descriptor = os.memfd_create("twostroke-kv", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, num_bytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor

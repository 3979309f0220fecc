"""KV memory as bytes: which of them are the K and V of one layer of one block."""

from __future__ import annotations

import mmap
import os
from bisect import bisect_left
from collections.abc import Sequence

from twostroke.kv_cache.layout import KVLayout


class KVMemory:
    """The blocks of a pool, wherever they lie.

    ```
    block 0: | layer 0: K V | layer 1: K V | …   block 1: | …     a piece is the K and V of some layers of one block
    ```

    Args:
        layout: of the pool.
        data: all blocks, in a row.
    """

    def __init__(self, layout: KVLayout, data: memoryview) -> None:
        self.layout = layout
        self._data = data.cast("B")
        self._layer_bytes = layout.block_size * layout.bytes_per_token_and_layer

    @property
    def num_bytes(self) -> int:
        """Of all blocks."""
        return len(self._data)

    @property
    def num_blocks(self) -> int:
        """That are there."""
        return len(self._data) // self.layout.bytes_per_block

    @property
    def num_layers(self) -> int:
        """Of the model."""
        return sum(len(group.layer_ids) for group in self.layout.groups)

    def pieces(self, rows: Sequence[Sequence[int]], layers: range, starts: Sequence[int]) -> list[memoryview]:
        """The bytes of some layers of blocks: group after group, block after block, in it layer after layer.

        Layers that are neighbours in a block are one piece: what a piece costs is paid once for them.

        Args:
            rows: per KV group, ids of blocks that are there.
            layers: ids in a row.
            starts: per KV group, which of its blocks is the first that is wanted.
        """
        found: list[memoryview] = []
        block_bytes, layer_bytes = self.layout.bytes_per_block, self._layer_bytes
        for group, row, start in zip(self.layout.groups, rows, starts, strict=True):
            # ids in a group ascend, so those among `layers` are neighbours
            first, end = (bisect_left(group.layer_ids, layer_id) for layer_id in (layers.start, layers.stop))
            if first == end:
                continue
            for block_id in row[start:]:
                begin = block_id * block_bytes
                found.append(self._data[begin + first * layer_bytes : begin + end * layer_bytes])
        return found

    def release(self) -> None:
        """Lets go of the memory."""
        self._data.release()


class SharedMapping:
    """Another process's KV memory, to be read."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        """Maps it; the descriptor is closed."""
        try:
            self._map = mmap.mmap(descriptor, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        finally:
            os.close(descriptor)

    def memory(self, layout: KVLayout) -> KVMemory:
        """As blocks."""
        return KVMemory(layout, memoryview(self._map))

    def close(self) -> None:
        """Unmaps it; nobody may look at its blocks any more."""
        self._map.close()


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

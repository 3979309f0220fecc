"""What no transport by shared memory can be faster than: one thread that copies the same blocks inside one process."""

from __future__ import annotations

import mmap
import time

from twostroke.bench.handover.orders import LAYOUT
from twostroke.kv_transfer.memory import KVMemory


class Copying:
    """Two pools of one process, all of whose pages are there.

    Args:
        num_blocks: to copy each time; those of the one end up in the other in reverse.
    """

    def __init__(self, num_blocks: int) -> None:
        self._from, self._to = _pool(num_blocks), _pool(num_blocks)
        self._rows = [range(num_blocks)], [range(num_blocks - 1, -1, -1)]
        self.seconds()  # the first finds no page

    def seconds(self) -> float:
        """Of one time."""
        began_s = time.perf_counter()
        self._to.copy_from(self._from, *self._rows, range(LAYOUT.layers_per_block), [0])
        return time.perf_counter() - began_s


def _pool(num_blocks: int) -> KVMemory:
    pages = mmap.mmap(-1, num_blocks * LAYOUT.bytes_per_block, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    for at in range(0, len(pages), mmap.PAGESIZE):
        pages[at] = 1
    return KVMemory(LAYOUT, memoryview(pages))

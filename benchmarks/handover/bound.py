"""What no transport by shared memory can be faster than: one thread that copies the same blocks inside one process."""

from __future__ import annotations

import mmap
import time

import numpy as np
from numpy.typing import NDArray

from benchmarks.handover.orders import LAYOUT


class Copying:
    """Two pools of one process, all of whose pages are there.

    Args:
        num_blocks: to copy each time; those of the one end up in the other in reverse.
    """

    def __init__(self, num_blocks: int) -> None:
        self._pairs = list(zip(_pool(num_blocks)[::-1], _pool(num_blocks), strict=True))
        self.seconds()  # the first finds no page

    def seconds(self) -> float:
        """Of one time."""
        began_s = time.perf_counter()
        for ours, theirs in self._pairs:
            ours[:] = theirs
        return time.perf_counter() - began_s


def _pool(num_blocks: int) -> NDArray[np.uint8]:
    pages = mmap.mmap(-1, num_blocks * LAYOUT.bytes_per_block, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    for at in range(0, len(pages), mmap.PAGESIZE):
        pages[at] = 1
    return np.frombuffer(pages, np.uint8).reshape(num_blocks, -1)

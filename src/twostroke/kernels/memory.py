"""Memory of tensors: on large pages for what is large, and pinned on its way to a GPU.

Large are weights and KV, which are read all the time, and the logits of a step.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import sys
import threading
import weakref
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_LARGE_PAGE = 2 << 20
_REGION_BYTES = 64 << 20
_ALIGNMENT = 4096
_SHORT_LIVED_BYTES = 2 << 20
"""One large page. A product reads rows that lie pages apart, and on small pages the processor translates the address of
each row anew. From 16 MiB on, the C library also returns what is freed to the system, and pages are new each step."""


def large_pages(num_bytes: int) -> Tensor:
    """Zeroed bytes that take memory only when they are written for the first time. uint8 [num_bytes]

    They lie on large pages. The first touch of a page costs a fault, and every address has to be translated; where the
    system offers large pages, there are 512 times fewer of both (docs/negative-results.md, "a prefix cache that
    made prompts slower"). A large page is there as a whole, so small pieces lie one behind the other: on pages of its
    own, a matrix of 1.1 MiB would take 2.
    """
    if num_bytes > _REGION_BYTES // 2:
        return _bytes_of(_map(num_bytes), num_bytes, 0)
    return _pieces.take(num_bytes)


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return an uninitialized tensor of this shape, on the CPU, for use within one step.

    From 2 MiB on its memory lies on large pages, and the process keeps it for later tensors.

    32 rows of 262,144 logits become float32 in 2 ms there, and in 14 ms in memory that comes new from the system.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _SHORT_LIVED_BYTES:
        return torch.empty(*shape, dtype=dtype)
    return _kept.take(num_bytes).view(dtype).view(*shape)


def wide(values: Tensor) -> Tensor:
    """The values in float32; see `empty`."""
    if values.device.type != "cpu" or values.dtype is torch.float32:
        return values.float()
    return empty(values.shape, torch.float32).copy_(values)


class _Kept:
    """Mappings that are taken again when their last tensor is gone; those that are too small by then are dropped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._maps: list[mmap.mmap] = []

    def take(self, num_bytes: int) -> Tensor:
        """Bytes that nobody has now; what they hold is whatever was there."""
        with self._lock:
            free = [i for i in range(len(self._maps)) if sys.getrefcount(self._maps[i]) == _ONLY_KEPT]
            large = [i for i in free if len(self._maps[i]) >= num_bytes + _LARGE_PAGE]
            if large:
                pages = self._maps[min(large, key=lambda i: len(self._maps[i]))]
            else:
                for i in reversed(free):
                    del self._maps[i]
                self._maps.append(pages := _map(num_bytes))
            return _bytes_of(pages, num_bytes, 0)


_ONLY_KEPT = 2
"""References to a mapping without tensors: the list's, and the one that asks."""
_kept = _Kept()


class _Pieces:
    """Pieces of regions. Only they keep their region: it goes with the last of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: weakref.ref[mmap.mmap] | None = None
        self._num_taken = 0
        """Bytes of the newest region."""

    def take(self, num_bytes: int) -> Tensor:
        """Bytes that nobody has had."""
        with self._lock:
            region = None if self._newest is None else self._newest()
            if region is None or self._num_taken + num_bytes > _REGION_BYTES:
                region, self._num_taken = _map(_REGION_BYTES), 0
                self._newest = weakref.ref(region)
            begin = self._num_taken
            self._num_taken += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
            return _bytes_of(region, num_bytes, begin)


_pieces = _Pieces()


def _map(num_bytes: int) -> mmap.mmap:
    # private: memory that could be shared with a forked process gets no large pages on most systems
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    pages = mmap.mmap(-1, num_bytes + _LARGE_PAGE, **private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def _bytes_of(pages: mmap.mmap, num_bytes: int, begin: int) -> Tensor:
    """Counted from the first large page."""
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    begin += -whole.data_ptr() % _LARGE_PAGE
    return whole[begin : begin + num_bytes]


def return_unused() -> None:
    """Gives back to the system what was freed and is kept for the next allocation, where the C library can (glibc)."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # no such library, or no such function in it
        ctypes.CDLL(None).malloc_trim(0)


# ------------------------------------------------------------------ from the host to the device


def send(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """The array as a tensor on the device, in the order of what is enqueued there; nobody waits.

    From memory that is not pinned, torch's copy to a GPU would return only when everything enqueued before it is done.
    torch keeps the pinned memory until the copy is. On a CPU the tensor is the array's own memory.
    """
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

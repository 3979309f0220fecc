"""Memory of tensors: large pages for large tensors, and pinned memory for transfers to a GPU.

Large tensors are weights and KV, which every step reads, and the logits of a step.
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
"""One large page: the least size of a tensor that gets large pages.

A product reads rows that lie pages apart, and on small pages the processor translates the address of each row anew.
From 16 MiB on, the C library also returns freed memory to the system, so that every step gets new pages.
"""


def large_pages(num_bytes: int) -> Tensor:
    """Return zeroed bytes, uint8 [num_bytes], that take memory only when they are first written.

    They lie on large pages. The first access to a page costs a fault, and every address has to be translated; large
    pages make both 512 times rarer (docs/negative-results.md, "a prefix cache that made prompts slower"). A large page
    is allocated as a whole, so small pieces share one: on pages of its own, a matrix of 1.1 MiB would take 2.
    """
    if num_bytes > _REGION_BYTES // 2:
        return _bytes_of(_map(num_bytes), num_bytes, 0)
    return _region_allocator.take(num_bytes)


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return an uninitialized tensor of this shape, on the CPU, for use within one step.

    From 2 MiB on its memory lies on large pages, and the process keeps it for later tensors. Converting 32 rows of
    262,144 logits to float32 takes 2 ms there, and 14 ms in memory that is new from the system.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _SHORT_LIVED_BYTES:
        return torch.empty(*shape, dtype=dtype)
    return _mapping_cache.take(num_bytes).view(dtype).view(*shape)


def to_float32(values: Tensor) -> Tensor:
    """Return the values in float32, on a CPU in memory of `empty`."""
    if values.device.type != "cpu" or values.dtype is torch.float32:
        return values.float()
    return empty(values.shape, torch.float32).copy_(values)


class _MappingCache:
    """Mappings that are reused when their last tensor is gone. Free ones that are too small are dropped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._maps: list[mmap.mmap] = []

    def take(self, num_bytes: int) -> Tensor:
        """Return uninitialized bytes that no tensor uses."""
        with self._lock:
            free = [i for i in range(len(self._maps)) if sys.getrefcount(self._maps[i]) == _REFCOUNT_IF_FREE]
            large = [i for i in free if len(self._maps[i]) >= num_bytes + _LARGE_PAGE]
            if large:
                pages = self._maps[min(large, key=lambda i: len(self._maps[i]))]
            else:
                for i in reversed(free):
                    del self._maps[i]
                self._maps.append(pages := _map(num_bytes))
            return _bytes_of(pages, num_bytes, 0)


_REFCOUNT_IF_FREE = 2
"""References to a mapping without tensors: one of the list, one of the caller of getrefcount."""
_mapping_cache = _MappingCache()


class _RegionAllocator:
    """Pieces of regions. Only the pieces keep a region alive, so it is freed with the last of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: weakref.ref[mmap.mmap] | None = None
        self._num_taken = 0
        """Bytes taken of the newest region."""

    def take(self, num_bytes: int) -> Tensor:
        """Return zeroed bytes that were never used before."""
        with self._lock:
            region = None if self._newest is None else self._newest()
            if region is None or self._num_taken + num_bytes > _REGION_BYTES:
                region, self._num_taken = _map(_REGION_BYTES), 0
                self._newest = weakref.ref(region)
            begin = self._num_taken
            self._num_taken += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
            return _bytes_of(region, num_bytes, begin)


_region_allocator = _RegionAllocator()


def _map(num_bytes: int) -> mmap.mmap:
    # private, because shared mappings get no large pages on most systems
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    pages = mmap.mmap(-1, num_bytes + _LARGE_PAGE, **private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def _bytes_of(pages: mmap.mmap, num_bytes: int, begin: int) -> Tensor:
    """Return bytes of a mapping, counted from its first large page."""
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    begin += -whole.data_ptr() % _LARGE_PAGE
    return whole[begin : begin + num_bytes]


def return_unused() -> None:
    """Return freed memory to the system, where the C library can (glibc)."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # no such library, or no such function in it
        ctypes.CDLL(None).malloc_trim(0)


# ------------------------------------------------------------------ from the host to the device


def send(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """Return the array as a tensor on the device. The copy is enqueued, and the host does not wait for it.

    From memory that is not pinned, torch's copy to a GPU would return only when all work enqueued before it is done.
    torch keeps the pinned memory until the copy is done. On a CPU the tensor is the array's own memory.
    """
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

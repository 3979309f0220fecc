"""Memory for what is large and read all the time: weights and KV."""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

_LARGE_PAGE = 2 << 20


def large_pages(num_bytes: int) -> Tensor:
    """Zeroed bytes that take memory only when they are written for the first time. uint8 [num_bytes]

    They begin at a large page. The first touch of a page costs a fault, and every address has to be translated; where
    the system offers large pages, there are 512 times fewer of both (docs/negative-results.md, "a prefix cache that
    made prompts slower").
    """
    # private: memory that could be shared with a forked process gets no large pages on most systems
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    pages = mmap.mmap(-1, num_bytes + _LARGE_PAGE, **private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    begin = -whole.data_ptr() % _LARGE_PAGE
    return whole[begin : begin + num_bytes]

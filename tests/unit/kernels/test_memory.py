"""Memory for weights: dense, zeroed, never shared, and freed with its last tensor."""

from __future__ import annotations

import gc
import os
import platform

import pytest
import torch

from twostroke.kernels.memory import _MappingCache, _RegionAllocator, empty, large_pages, return_unused, to_float32
from twostroke.process_memory import anonymous_bytes


def test_pieces_lie_close_together_and_overlap_nowhere() -> None:
    pieces = _RegionAllocator()
    sizes = [1, 4096, 4097, 3 << 20, 100]
    found = [pieces.take(size) for size in sizes]
    for i, piece in enumerate(found):
        assert piece.shape == (sizes[i],)
        assert not piece.any()
        piece.fill_(i + 1)
    assert all(bool((piece == i + 1).all()) for i, piece in enumerate(found))
    begin, end = found[0].data_ptr(), found[-1].data_ptr() + sizes[-1]
    assert begin % (2 << 20) == 0
    assert all(piece.data_ptr() % 64 == 0 for piece in found)
    assert end - begin < sum(sizes) + 4096 * len(sizes)


def test_a_region_goes_with_its_last_piece() -> None:
    pieces = _RegionAllocator()
    first, second = pieces.take(10), pieces.take(10)
    assert pieces._newest is not None
    region = pieces._newest
    del first
    gc.collect()
    assert region() is not None
    second.fill_(1)
    del second
    gc.collect()
    assert region() is None
    assert not pieces.take(10).any()


@pytest.mark.parametrize("num_bytes", [1, 31 << 20, 65 << 20])
def test_any_size(num_bytes: int) -> None:
    found = [large_pages(num_bytes) for _ in range(3)]
    for piece in found:
        assert piece.dtype is torch.uint8
        assert piece.shape == (num_bytes,)
        piece[0] = piece[-1] = 1
    assert len({piece.data_ptr() for piece in found}) == 3


def test_memory_is_taken_again_when_its_last_tensor_is_gone() -> None:
    kept = _MappingCache()
    first, second = kept.take(20 << 20), kept.take(20 << 20)
    begins = {first.data_ptr(), second.data_ptr()}
    assert len(begins) == 2
    view = first[5:7]
    at = first.data_ptr()
    del first
    assert kept.take(20 << 20).data_ptr() not in begins, "a view of it is left"
    del view
    smaller = kept.take(18 << 20)
    assert smaller.data_ptr() == at
    assert second.data_ptr() in begins


def test_mappings_that_became_too_small_are_dropped() -> None:
    kept = _MappingCache()
    for num_bytes in (17 << 20, 18 << 20, 40 << 20):
        kept.take(num_bytes)
    assert [len(pages) for pages in kept._maps] == [42 << 20]


@pytest.mark.parametrize("num_rows", [1, 3, 32])
def test_wide_is_float(num_rows: int) -> None:
    """32 rows of bfloat16 take 16 MiB, and twice as much in float32."""
    values = empty((num_rows, 1 << 18), torch.bfloat16).copy_(torch.randn(num_rows, 1 << 18))
    for _ in range(2):
        assert torch.equal(to_float32(values), values.float())
    single = values.float()
    assert to_float32(single) is single


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps no holes, or cannot be told")
def test_what_was_freed_goes_back() -> None:
    """64 MiB in pieces too small for mappings of their own, below one that stays."""
    pieces = [torch.ones(1 << 16, dtype=torch.uint8) for _ in range(1 << 10)]
    stays = torch.ones(1 << 16, dtype=torch.uint8)
    del pieces
    before = anonymous_bytes(os.getpid())
    return_unused()
    assert before - anonymous_bytes(os.getpid()) > 48 << 20
    assert stays.all()

"""The one-scan search for a prefix against trying every length; the peak formula against walking through a prefill."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import given

from factories import make_layout
from oracle import naive_blocks
from twostroke.kv_cache.block_pool import BlockPool
from twostroke.kv_cache.layout import KVLayout
from twostroke.kv_cache.prefix_cache import SharedPrefixCache

WINDOWS = st.lists(st.one_of(st.none(), st.integers(1, 20)), min_size=1, max_size=4)
PATTERNS = st.one_of(
    WINDOWS, st.lists(st.sampled_from([None, 5, 18]), min_size=1, max_size=12), st.just([7] * 5 + [None])
)
"""Of layers: some repeat a few kinds, so that blocks of the kinds have unlike numbers of tokens."""


def names_of(layout: KVLayout, num_pages: int) -> tuple[list[bytes], list[tuple[int, bytes]]]:
    """Return a name for each page, and the names of all blocks that they fill."""
    hashes = [bytes([i]) for i in range(num_pages)]
    blocks = [
        (group_id, hashes[end - 1])
        for group_id, group in enumerate(layout.groups)
        for end in range(group.pages_per_block, num_pages + 1, group.pages_per_block)
    ]
    return hashes, blocks


@given(windows=PATTERNS, block_size=st.sampled_from([1, 2, 4]), num_tokens=st.integers(1, 90), data=st.data())
def test_the_longest_prefix_is_found(
    windows: list[int | None], block_size: int, num_tokens: int, data: st.DataObject
) -> None:
    layout = make_layout(windows, block_size)
    hashes, everything = names_of(layout, data.draw(st.integers(0, num_tokens // layout.block_size)))
    missing = data.draw(st.sets(st.sampled_from(everything), max_size=4)) if everything else set()
    known = set(everything) - missing
    pool = BlockPool(len(everything) + 1)
    for (group_id, block_hash), block_id in zip(sorted(known), pool.allocate(len(known)), strict=True):
        pool.name(block_id, group_id, block_hash)

    cached = SharedPrefixCache(layout, pool).longest_prefix(hashes, num_tokens)

    assert cached.num_tokens == naive_blocks.longest_prefix(layout, hashes, num_tokens, known)
    assert cached.num_tokens < num_tokens
    for group_id, group in enumerate(layout.groups):
        length, rest = divmod(cached.num_tokens, layout.tokens_per_block(group))
        assert rest == 0
        first = min(length, layout.first_needed_block(group, cached.num_tokens))
        assert cached.first_held[group_id] == first
        assert len(cached.rows[group_id]) == length
        names = hashes[group.pages_per_block - 1 :: group.pages_per_block]
        assert list(cached.rows[group_id][first:]) == [pool.find(group_id, h) for h in names[first:length]]


@pytest.mark.parametrize(
    "windows", [(None,), *[(w,) for w in range(1, 10)], (None, 3), (2, 5), (None, 5, 5), (None, None, 3)], ids=str
)
@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_every_pattern_of_a_few_blocks(windows: tuple[int | None, ...], block_size: int) -> None:
    layout = make_layout(windows, block_size)
    hashes, everything = names_of(layout, 6 // len(set(windows)))
    for pattern in itertools.product([False, True], repeat=len(everything)):
        known = {key for key, is_known in zip(everything, pattern, strict=True) if is_known}
        pool = BlockPool(len(everything) + 1)
        for (group_id, block_hash), block_id in zip(sorted(known), pool.allocate(len(known)), strict=True):
            pool.name(block_id, group_id, block_hash)
        num_tokens = len(hashes) * layout.block_size + 1
        cached = SharedPrefixCache(layout, pool).longest_prefix(hashes, num_tokens)
        assert cached.num_tokens == naive_blocks.longest_prefix(layout, hashes, num_tokens, known), f"{known}"


@given(
    windows=PATTERNS, block_size=st.sampled_from([1, 2, 4, 8]), num_tokens=st.integers(1, 60), chunk=st.integers(1, 70)
)
def test_no_prefill_holds_more_than_the_peak(
    windows: list[int | None], block_size: int, num_tokens: int, chunk: int
) -> None:
    layout = make_layout(windows, block_size)
    worst = naive_blocks.largest_window_demand(layout, num_tokens, chunk)
    assert worst <= layout.peak_blocks(num_tokens, min(chunk, num_tokens))

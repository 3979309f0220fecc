from __future__ import annotations

import pytest

from twostroke.kv_cache.block_pool import BlockPool


def test_a_cached_block_is_found_shared_and_freed_again() -> None:
    pool = BlockPool(2)
    [block_id] = pool.allocate(1)
    pool.name(block_id, 0, b"x")
    pool.free([block_id])
    assert (pool.num_free, pool.num_used, pool.num_cached) == (1, 0, 1)
    assert pool.find(0, b"x") == block_id
    assert pool.find(1, b"x") is None
    pool.share([block_id])
    assert (pool.num_free, pool.num_used, pool.num_cached) == (1, 1, 0)
    pool.check_invariants()


def test_the_tail_of_a_request_is_evicted_before_its_head() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for entry, block_id in enumerate(blocks):
        pool.name(block_id, 0, bytes([entry]))
    pool.free(reversed(blocks))
    assert pool.allocate(1) == [blocks[2]]
    assert [pool.find(0, bytes([entry])) for entry in range(3)] == [blocks[0], blocks[1], None]


def test_blocks_without_content_go_before_cached_ones() -> None:
    pool = BlockPool(2)
    named, plain = pool.allocate(2)
    pool.name(named, 0, b"x")
    pool.free([named])
    pool.free([plain])
    assert pool.allocate(1) == [plain]
    assert pool.find(0, b"x") == named


def test_using_a_cached_block_makes_it_the_last_to_be_evicted() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.name(first, 0, b"1")
    pool.name(second, 0, b"2")
    pool.free([first])
    pool.free([second])
    pool.share([first])
    pool.free([first])
    assert pool.allocate(1) == [second]


def test_of_two_equal_blocks_the_first_one_named_is_found() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.name(first, 0, b"x")
    pool.name(second, 0, b"x")
    assert pool.find(0, b"x") == first
    pool.free([second])
    assert pool.num_cached == 0
    pool.check_invariants()


def test_mistakes_of_ours_are_caught() -> None:
    pool = BlockPool(1)
    with pytest.raises(AssertionError, match="2 asked, 1 can be had"):
        pool.allocate(2)
    [block_id] = pool.allocate(1)
    pool.free([block_id])
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free([block_id])


def test_as_many_evictions_are_remembered_as_there_are_blocks_until_the_content_is_back() -> None:
    pool = BlockPool(2)
    for name in (b"a", b"b", b"c"):
        (block_id, other) = pool.allocate(2)
        pool.name(block_id, 0, name)
        pool.free([block_id, other])
        assert not pool.was_evicted(0, name)
    assert [pool.was_evicted(0, name) for name in (b"a", b"b", b"c")] == [True, True, False]
    assert not pool.was_evicted(1, b"a"), "another group's block"
    (block_id, other) = pool.allocate(2)
    assert [pool.was_evicted(0, name) for name in (b"a", b"b", b"c")] == [False, True, True], "too long ago"
    pool.name(block_id, 0, b"b")
    assert not pool.was_evicted(0, b"b")
    pool.check_invariants()

from __future__ import annotations

import pytest

from factories import make_kv
from twostroke.batch import BlockTableUpdate
from twostroke.config.cache import CacheConfig
from twostroke.errors import InvalidParameter
from twostroke.kv_cache.manager import KVCacheManager
from twostroke.kv_cache.prefix_cache import CachedPrefix, hash_blocks


def admit(kv: KVCacheManager, request_id: str, hashes: tuple[bytes, ...] = (), num_tokens: int = 1) -> CachedPrefix:
    cached = kv.find_cached(hashes, num_tokens)
    kv.admit(request_id, cached, kv.num_blocks_to_compute(num_tokens, num_tokens))
    return cached


def compute(kv: KVCacheManager, request_id: str, hashes: tuple[bytes, ...], num_tokens: int) -> None:
    assert kv.try_allocate(request_id, 0, num_tokens) is not None
    kv.cache_blocks(request_id, hashes, num_tokens)


def test_only_the_new_tail_is_reported() -> None:
    kv = make_kv()
    admit(kv, "a", num_tokens=5)
    assert kv.try_allocate("a", 0, 5) == (BlockTableUpdate(0, (0, 1)),)
    assert kv.try_allocate("a", 5, 6) == (BlockTableUpdate(0, ()),)
    assert kv.try_allocate("a", 6, 9) == (BlockTableUpdate(2, (2,)),)
    assert kv.block_tables("a") == ((0, 1, 2),)


def test_the_gauge_grows_by_a_block_per_block_size_tokens_and_wastes_less_than_one() -> None:
    kv = make_kv()
    admit(kv, "a")
    for num_tokens in range(1, 33):
        kv.try_allocate("a", num_tokens - 1, num_tokens)
        usage = kv.usage()
        assert usage.num_used == -(-num_tokens // 4)
        per_token = kv.layout.bytes_per_token
        assert usage.filled_bytes == num_tokens * per_token
        assert usage.allocated_bytes - usage.filled_bytes <= 3 * per_token
        assert usage.num_unreachable == 0


def test_without_room_nothing_changes() -> None:
    kv = make_kv(2, windows=[None, None], max_model_len=4)
    assert len(kv.layout.groups) == 1
    admit(kv, "a")
    kv.try_allocate("a", 0, 4)
    before = kv.block_tables("a"), kv.usage()
    assert kv.try_allocate("a", 4, 13) is None
    assert (kv.block_tables("a"), kv.usage()) == before


def test_a_second_request_shares_full_blocks_but_always_computes_its_last_token() -> None:
    kv = make_kv()
    tokens = list(range(8))
    hashes = hash_blocks(tokens, 4)
    admit(kv, "a", hashes, 8)
    compute(kv, "a", hashes, 8)
    assert kv.find_cached(hashes, 8).num_tokens == 4
    assert kv.find_cached(hashes, 9).num_tokens == 8
    cached = admit(kv, "b", hashes, 9)
    assert cached.num_tokens == 8
    assert kv.num_blocks_to_admit(cached, 3) == 1, "both are in use by a"
    assert kv.try_allocate("b", 8, 9) == (BlockTableUpdate(0, (0, 1, 2)),)
    assert kv.usage().num_used == 3
    kv.free("a")
    assert kv.usage().num_used == 3
    kv.free("b")
    assert (kv.usage().num_used, kv.usage().num_cached) == (0, 2)
    assert kv.num_blocks_to_admit(kv.find_cached(hashes, 9), 3) == 3, "no request holds them, so they count as free"
    kv.check_invariants()


def test_blocks_are_named_only_as_far_as_tokens_are_computed() -> None:
    kv = make_kv()
    hashes = hash_blocks(list(range(12)), 4)
    admit(kv, "a", hashes, 12)
    kv.try_allocate("a", 0, 12)
    kv.cache_blocks("a", hashes, 7)
    assert kv.find_cached(hashes, 12).num_tokens == 4


def test_rejected_drafts_give_whole_blocks_back_and_are_never_found() -> None:
    kv = make_kv()
    hashes = hash_blocks(list(range(12)), 4)
    admit(kv, "a", num_tokens=6)
    kv.try_allocate("a", 0, 6)
    kv.try_allocate("a", 6, 13)
    kv.roll_back("a", 7)
    assert kv.block_tables("a") == ((0, 1),)
    assert kv.usage().filled_bytes == 7 * kv.layout.bytes_per_token
    kv.cache_blocks("a", hashes, 7)
    assert kv.find_cached(hashes, 13).num_tokens == 4
    assert kv.try_allocate("a", 7, 9) == (BlockTableUpdate(2, (2,)),), "the new block replaces the rejected one"


def test_a_window_gives_back_what_no_query_sees_any_more() -> None:
    kv = make_kv(windows=[None, 6], max_model_len=32)
    admit(kv, "a")
    for end in range(1, 33):
        kv.try_allocate("a", end - 1, end)
    full, window = kv.block_tables("a")
    assert len(set(full)) == 8
    # The query at 28 sees 23..28; at 31 it sees 26..31. Block 5 (20..23) is freed when the next block is needed.
    assert window[:5] == (0,) * 5
    assert kv.num_blocks_held("a") == 8 + 3
    kv.check_invariants()


def test_a_prefix_with_a_window_needs_only_its_end_but_all_of_the_full_group() -> None:
    kv = make_kv(32, windows=[None, 5], max_model_len=32)
    hashes = hash_blocks(list(range(16)), 4)
    admit(kv, "a", hashes, 16)
    compute(kv, "a", hashes, 16)
    cached = kv.find_cached(hashes, 17)
    assert cached.num_tokens == 16
    assert cached.first_held == (0, 3)
    assert len(cached.block_ids) == 5


def test_the_baseline_reserves_one_run_for_the_whole_length() -> None:
    kv = make_kv(20, windows=[None, 5], kv_reservation="contiguous", enable_prefix_caching=False)
    admit(kv, "a")
    [first, second] = kv.try_allocate("a", 0, 1) or ()
    assert first.block_ids + second.block_ids == tuple(range(16))
    assert kv.try_allocate("a", 1, 2) == (BlockTableUpdate(0, ()),) * 2
    usage = kv.usage()
    assert (usage.num_used, usage.num_free, usage.num_unreachable) == (16, 4, 4)
    assert kv.num_free_blocks == 0
    assert usage.waste == 1 - 2 * 2 / 64
    kv.roll_back("a", 1)
    kv.check_invariants()
    kv.free("a")
    assert kv.num_free_blocks == 16


def test_the_baseline_reuses_the_gap_of_a_request_that_ended() -> None:
    kv = make_kv(24, kv_reservation="contiguous", enable_prefix_caching=False)
    for name in "abc":
        admit(kv, name)
    kv.free("b")
    assert kv.num_free_blocks == 8
    admit(kv, "d")
    assert kv.block_tables("d") == (tuple(range(8, 16)),)
    kv.check_invariants()


def test_shared_prefixes_and_runs_exclude_each_other() -> None:
    with pytest.raises(InvalidParameter, match=r"enable_prefix_caching=true: needs kv_reservation paged"):
        make_kv(kv_reservation="contiguous")
    assert not CacheConfig(kv_reservation="contiguous", enable_prefix_caching=False).enable_prefix_caching


def test_without_prefix_caching_nothing_is_found() -> None:
    kv = make_kv(enable_prefix_caching=False)
    hashes = hash_blocks(list(range(8)), 4)
    admit(kv, "a", hashes, 8)
    compute(kv, "a", hashes, 8)
    assert kv.find_cached(hashes, 9).num_tokens == 0
    kv.free("a")
    assert kv.usage().num_cached == 0


def test_an_import_that_shares_blocks_with_a_request_holds_them_when_that_has_ended() -> None:
    """It needs no free block, and leaves as much room as if it were alone: KVHandover counts like this."""
    kv = make_kv()
    hashes = hash_blocks(range(8), 4)
    admit(kv, "a", hashes, 9)
    compute(kv, "a", hashes, 8)
    cached = kv.find_cached(hashes, 9)
    assert kv.holds.num_blocks_for_import(cached, 8) == (0, 2)
    kv.holds.begin_import(1, cached, 8)
    kv.free("a")
    assert (kv.holds.num_blocks, kv.usage().num_used) == (2, 2)
    assert kv.holds.num_blocks_for_import(kv.find_cached((), 9), 8) == (2, 2)

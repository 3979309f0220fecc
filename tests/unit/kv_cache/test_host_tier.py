"""Evicted blocks go to host memory and are found there; the scheduler loads them without delaying requests."""

from __future__ import annotations

import pytest

from factories import make_layout
from fakes import FakeEngine
from twostroke.batch import KVLoad, KVMoves, KVStore, Limit
from twostroke.config.cache import CacheConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.errors import InvalidParameter
from twostroke.kv_cache.block_pool import BlockKey, BlockPool
from twostroke.kv_cache.host_tier import HostTier


def key(name: int) -> BlockKey:
    return 0, bytes([name])


def fill(pool: BlockPool, *names: int) -> list[int]:
    """Cache blocks with these names; the first one is evicted first."""
    block_ids = pool.allocate(len(names))
    for block_id, name in zip(block_ids, names, strict=True):
        pool.name(block_id, *key(name))
    pool.free(block_ids)
    return block_ids


def test_what_is_evicted_leaves_its_content_and_the_oldest_makes_room() -> None:
    pool = BlockPool(2)
    tier = HostTier(pool, 2)
    first = fill(pool, 1, 2)
    assert fill(pool, 3, 4) == first
    assert tier.take_moves(runs=True) == KVMoves(stores=(KVStore(first[0], 0), KVStore(first[1], 1)))
    assert tier.take_moves(runs=True) is None
    tier.load([key(1)])  # 3 is evicted, whose slot held 2; 1 is in use
    moves = tier.take_moves(runs=True)
    assert moves == KVMoves(stores=(KVStore(first[0], 1),), loads=(KVLoad(0, first[0], *key(1)),))
    assert [key(name) in tier for name in (1, 2, 3, 4)] == [True, False, True, False]
    assert pool.find(*key(1)) == first[0]
    tier.check_invariants()


def test_what_is_in_host_memory_is_not_copied_again() -> None:
    pool = BlockPool(1)
    tier = HostTier(pool, 2)
    fill(pool, 1)
    fill(pool, 2)
    tier.load([key(1)])
    assert tier.take_moves(runs=True) is not None
    fill(pool, 2)
    assert tier.take_moves(runs=True) is None
    assert (tier.num_stored, tier.num_loaded, tier.num_used) == (2, 1, 2)


def test_slots_that_are_read_are_not_given_on() -> None:
    pool = BlockPool(2)
    tier = HostTier(pool, 1)
    fill(pool, 1, 2)
    fill(pool, 3)  # evicts 1
    tier.take_moves(runs=True)
    tier.load([key(1)])  # evicts 2, which finds no slot
    assert tier.take_moves(runs=True) == KVMoves(loads=(KVLoad(0, 1, *key(1)),))
    assert key(1) in tier
    assert key(2) not in tier


def test_what_comes_beside_a_pass_is_nobodys_until_it_is_there() -> None:
    pool = BlockPool(2)
    tier = HostTier(pool, 2)
    fill(pool, 1, 2)
    fill(pool, 3, 4)
    tier.take_moves(runs=True)
    tier.prefetch([key(1)])
    assert pool.num_used == 1
    moves = tier.take_moves(runs=True)
    assert moves is not None
    (coming,) = moves.prefetches
    assert tier.held_block_ids == [coming.block_id]
    assert pool.find(*key(1)) is None
    tier.cache_prefetched()
    assert pool.find(*key(1)) == coming.block_id
    assert (pool.num_used, tier.held_block_ids) == (0, [])
    tier.cache_prefetched()


def test_a_step_that_does_not_run_takes_nothing_along() -> None:
    pool = BlockPool(2)
    tier = HostTier(pool, 2)
    fill(pool, 1, 2)
    fill(pool, 3)
    tier.prefetch([key(1)])
    assert tier.take_moves(runs=False) is None
    assert (pool.num_used, tier.held_block_ids) == (0, [])
    tier.cache_prefetched()
    assert pool.find(*key(1)) is None, "it was never filled"
    assert tier.take_moves(runs=True) == KVMoves(stores=(KVStore(0, 0), KVStore(1, 1)))


def test_nothing_is_found_once_it_is_forgotten() -> None:
    pool = BlockPool(2)
    tier = HostTier(pool, 3)
    fill(pool, 1, 2)
    fill(pool, 3, 4)
    tier.take_moves(runs=True)
    tier.prefetch([key(1)])
    tier.take_moves(runs=True)
    tier.load([key(2)])
    assert tier.forget() == 3
    tier.check_invariants()
    tier.cache_prefetched()
    assert [key(name) in tier for name in (1, 2, 3)] == [False] * 3
    assert pool.find(*key(1)) is None, "it was on its way"
    assert tier.take_moves(runs=True) is not None
    tier.check_invariants()
    assert tier.num_used == 0


def offloading_engine(num_blocks: int, num_slots: int, max_num_batched_tokens: int = 64) -> FakeEngine:
    """Return an engine with blocks of 4 tokens."""
    layout = make_layout([None], 4)
    return FakeEngine(
        layout,
        num_blocks,
        max_model_len=32,
        scheduler_config=SchedulerConfig(max_num_batched_tokens=max_num_batched_tokens),
        cache_config=CacheConfig(block_size=4, kv_offloading_size=num_slots * layout.bytes_per_block),
    )


def evicted_prompt(engine: FakeEngine, others: int = 2) -> list[int]:
    """Return a prompt that was computed, and whose blocks were evicted since."""
    prompt = list(range(17))
    engine.submit("first", prompt, 1)
    engine.run()
    for other in range(others):
        engine.submit(f"other {other}", [100 + other] * 28, 4)
        engine.run()
    return prompt


def test_a_prefix_that_was_evicted_comes_back_with_its_request_where_nobody_else_runs() -> None:
    engine = offloading_engine(8, 100)
    prompt = evicted_prompt(engine)
    engine.submit("again", prompt, 1)
    batch = engine.step()
    assert batch.kv_moves is not None
    assert (len(batch.kv_moves.loads), batch.kv_moves.prefetches) == (4, ())
    assert batch.admitted[0].num_cached_tokens == 16
    assert batch.num_tokens == 1


def test_beside_others_it_comes_first_and_they_lose_no_step() -> None:
    engine = offloading_engine(16, 100, max_num_batched_tokens=8)
    prompt = evicted_prompt(engine, others=4)
    engine.submit("talker", [200, 201], 20)
    engine.step()
    engine.submit("again", prompt, 1)
    first, second, third = engine.step(), engine.step(), engine.step()
    for batch in (first, second):  # two blocks a step: as many tokens as it may compute
        assert batch.kv_moves is not None
        assert (batch.kv_moves.loads, len(batch.kv_moves.prefetches)) == ((), 2)
        assert [r.request_id for r in batch.requests] == ["talker"]
        assert batch.limited_by is Limit.TOKENS
    assert first.wait_reason == "tokens: 2 of 4 blocks in host memory of its prefix are fetched beside this step"
    assert third.admitted[0].num_cached_tokens == 16
    assert [r.request_id for r in third.requests] == ["talker", "again"]


def test_without_the_tier_it_is_computed_again() -> None:
    engine = FakeEngine(make_layout([None], 4), 8, max_model_len=32, cache_config=CacheConfig(block_size=4))
    prompt = evicted_prompt(engine)
    engine.submit("again", prompt, 1)
    batch = engine.step()
    assert batch.kv_moves is None
    assert batch.admitted[0].num_cached_tokens == 0


def test_a_prefix_is_found_in_both_places() -> None:
    """Blocks that are still in the pool stay there while blocks for the rest are allocated."""
    engine = offloading_engine(8, 100)
    prompt = evicted_prompt(engine, others=0)
    engine.submit("other", [100] * 16, 4)  # takes the three free blocks and the last of the first request's
    engine.run()
    engine.submit("again", prompt, 1)
    batch = engine.step()
    assert batch.kv_moves is not None
    assert 0 < len(batch.kv_moves.loads) < 4
    assert batch.admitted[0].num_cached_tokens == 16


def test_a_tier_without_a_prefix_cache_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="extends the prefix cache"):
        CacheConfig(kv_offloading_size=1 << 20, enable_prefix_caching=False)
    with pytest.raises(InvalidParameter, match="kv_offloading_size"):
        CacheConfig(kv_offloading_size=0)

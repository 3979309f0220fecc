"""Prompts of mixed lengths with shared beginnings: blocks add up, and little of them is empty, in every step."""

from __future__ import annotations

import random

import pytest

from factories import make_layout
from fakes import FakeEngine
from twostroke.config.cache import CacheConfig
from twostroke.config.scheduler import SchedulerConfig

BLOCK_SIZE = 8


@pytest.mark.parametrize("num_blocks", [60, 400])
@pytest.mark.parametrize("seed", range(5))
def test_blocks_add_up_and_a_request_wastes_less_than_one(seed: int, num_blocks: int) -> None:
    """With few blocks there are preemptions and evictions, too."""
    dice = random.Random(seed)
    beginnings = [[dice.randrange(500) for _ in range(length)] for length in (16, 61, 120)]
    layout = make_layout(block_size=BLOCK_SIZE)
    engine = FakeEngine(
        layout,
        num_blocks,
        max_model_len=400,
        scheduler_config=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
        cache_config=CacheConfig(block_size=BLOCK_SIZE),
    )
    num_cached = num_preempted = 0
    waiting = 80
    while waiting or engine.live:
        if waiting and dice.random() < 0.5:
            waiting -= 1
            own = [dice.randrange(500) for _ in range(dice.choice([1, 5, 30, 150]))]
            engine.submit(f"r{waiting}", [*dice.choice(beginnings), *own], dice.randint(1, 40))
        batch = engine.step()
        num_cached += sum(request.num_cached_tokens for request in batch.admitted)
        num_preempted += len(batch.preempted_request_ids)
        engine.scheduler.check_invariants()
        usage = engine.kv.usage()
        assert usage.num_free + usage.num_used + usage.num_cached == usage.num_blocks
        assert usage.num_unreachable == 0, "any free block can be used by any request"
        empty_bytes = usage.allocated_bytes - usage.filled_bytes
        assert empty_bytes <= engine.scheduler.num_running * (BLOCK_SIZE - 1) * layout.bytes_per_token
    assert num_cached > 1000
    assert (num_preempted > 0) is (num_blocks == 60)
    assert engine.kv.usage().num_used == 0

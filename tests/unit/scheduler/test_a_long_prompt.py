"""A prompt of 32,768 tokens beside requests that decode, on an 8B model and a published card: whole, and in chunks."""

from __future__ import annotations

import pytest

from factories import LLAMA_3_8B, make_layout
from fakes import FakeEngine
from twostroke.batch import ScheduledBatch
from twostroke.config.scheduler import SchedulerConfig
from twostroke.cost.step_cost import MachineLimits, Share, step_cost

LENGTH, NUM_DECODES = 32_768, 8
H100 = MachineLimits(989.4e12, 3.35e12)


def seconds(batch: ScheduledBatch) -> float:
    """Return the least time that a step can take."""
    shares = [
        Share(request.num_computed_tokens, request.num_scheduled_tokens, int(request.samples_token))
        for request in batch.requests
    ]
    return step_cost(LLAMA_3_8B, shares, H100).seconds


def steps_beside(budget: int, *, is_chunked: bool) -> list[float]:
    """Return the times of the steps that compute the long prompt; all other requests get a token in each."""
    engine = FakeEngine(
        make_layout(block_size=16),
        2200,
        max_model_len=LENGTH + 100,
        scheduler_config=SchedulerConfig(max_num_batched_tokens=budget, enable_chunked_prefill=is_chunked),
        step_time_s=seconds,
    )
    engine.executor.checks_reads = False
    for number in range(NUM_DECODES):
        engine.submit(f"short{number}", [number], 90)
    engine.step()
    engine.submit("long", [1] * LENGTH, 1)
    times: list[float] = []
    while "long" in engine.live:
        before_s = engine.now_s
        batch = engine.step()
        times.append(engine.now_s - before_s)
        assert batch.num_decode_tokens == NUM_DECODES
    return times


@pytest.mark.parametrize(("budget", "longest_s"), [(1024, 0.045), (512, 0.023)])
def test_it_freezes_others_for_most_of_a_second_whole_and_for_a_chunk_in_chunks(budget: int, longest_s: float) -> None:
    """The article has 500 ms: arithmetic alone takes three quarters of a second. Chunks cost it little time."""
    (frozen_s,) = steps_beside(budget, is_chunked=False)
    assert frozen_s == pytest.approx(0.75, abs=0.02)
    chunks = steps_beside(budget, is_chunked=True)
    assert len(chunks) == -(-LENGTH // (budget - NUM_DECODES))
    assert max(chunks) < longest_s
    assert frozen_s < sum(chunks) < 1.1 * frozen_s

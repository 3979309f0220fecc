"""The ways of old, which the bench compares with: static batches, whole prompts, prompts first, no KV cache."""

from __future__ import annotations

import pytest

from factories import make_arrival, make_kv, make_layout, make_scheduler, one_token_each, scheduled_tokens
from fakes import FakeEngine
from twostroke.batch import Limit, Stroke
from twostroke.config.cache import CacheConfig
from twostroke.config.scheduler import SchedulerConfig


def hostage_steps(batching: str) -> FakeEngine:
    """Return the steps of a request of 2,000 tokens, nine of 20, and all further short ones served; ten slots."""
    engine = FakeEngine(
        make_layout(block_size=16),
        1000,
        max_model_len=2016,
        scheduler_config=SchedulerConfig(max_num_seqs=10, batching=batching),  # pyright: ignore
    )
    engine.submit("long", [0], 2000)
    for i in range(9):
        engine.submit(f"short{i}", [1 + i], 20)
    return engine


def test_the_hostages_of_a_static_batch() -> None:
    engine = hostage_steps("static")
    num_steps = engine.run()
    num_useful = sum(len(batch.requests) for batch in engine.batches)
    assert num_steps == 2000
    assert num_useful == 2000 + 9 * 20 == 2180
    assert num_useful / (10 * num_steps) == pytest.approx(0.109)
    assert sum(batch.num_tokens for batch in engine.batches) == num_useful, "no dead rows are computed"


def test_a_static_batch_admits_nobody_until_all_of_it_has_ended() -> None:
    scheduler = make_scheduler(max_num_seqs=2, batching="static")
    for name in "abc":
        scheduler.add_request(make_arrival(name))
    batch = scheduler.schedule(0.0)
    assert set(scheduled_tokens(batch)) == {"a", "b"}
    scheduler.update(batch.step, one_token_each(batch, finish=("a",)))
    batch = scheduler.schedule(0.0)
    assert set(scheduled_tokens(batch)) == {"b"}
    assert (batch.limited_by, batch.wait_reason) == (Limit.SEQS, "seqs: static batch, 1 of it still running")
    scheduler.update(batch.step, one_token_each(batch, finish=("b",)))
    assert set(scheduled_tokens(scheduler.schedule(0.0))) == {"c"}


def test_a_static_batch_goes_on_forming_while_only_the_budget_holds_it_up() -> None:
    scheduler = make_scheduler(max_num_seqs=3, batching="static", max_num_batched_tokens=6)
    for name in "abcd":
        scheduler.add_request(make_arrival(name, 4, 8))
    admitted: list[int] = []
    for _ in range(4):
        batch = scheduler.schedule(0.0)
        scheduler.update(batch.step, one_token_each(batch))
        admitted.append(scheduler.num_running)
    assert admitted == [2, 3, 3, 3]


def test_a_whole_prompt_waits_for_a_step_with_room() -> None:
    scheduler = make_scheduler(enable_chunked_prefill=False, max_num_batched_tokens=8)
    for name, num_prompt_tokens in (("a", 6), ("b", 5), ("c", 1)):
        scheduler.add_request(make_arrival(name, num_prompt_tokens, 4))
    batch = scheduler.schedule(0.0)
    assert scheduled_tokens(batch) == {"a": 6}, "c fits, but no request overtakes the head"
    assert (batch.limited_by, batch.wait_reason) == (Limit.TOKENS, "tokens: needs 5 at once, 2 are left")
    assert scheduled_tokens(scheduler.schedule(0.0)) == {"a": 1, "b": 5, "c": 1}


def test_a_prompt_that_fits_into_no_step_exceeds_the_budget_as_the_only_prompt() -> None:
    scheduler = make_scheduler(enable_chunked_prefill=False, max_num_batched_tokens=8)
    for name, num_prompt_tokens in (("a", 2), ("b", 20), ("c", 20)):
        scheduler.add_request(make_arrival(name, num_prompt_tokens, 4))
    assert scheduled_tokens(scheduler.schedule(0.0)) == {"a": 2}
    assert scheduled_tokens(scheduler.schedule(0.0)) == {"a": 1, "b": 20}
    assert scheduled_tokens(scheduler.schedule(0.0)) == {"a": 1, "b": 1, "c": 20}


def test_prompts_first_never_mixes_the_strokes() -> None:
    scheduler = make_scheduler(mixing="prefill_first", max_num_batched_tokens=4)
    scheduler.add_request(make_arrival("a", 2, 4))
    first = scheduler.schedule(0.0)
    scheduler.add_request(make_arrival("b", 6, 4))
    strokes = [[(r.request_id, r.stroke) for r in scheduler.schedule(0.0).requests] for _ in range(3)]
    assert set(scheduled_tokens(first)) == {"a"}
    assert strokes == [
        [("b", Stroke.PREFILL)],
        [("b", Stroke.PREFILL)],
        [("a", Stroke.DECODE), ("b", Stroke.DECODE)],
    ]


@pytest.mark.parametrize(("num_prompt_tokens", "budget", "num_passes"), [(1, 512, 1), (500, 512, 1), (500, 128, 4)])
def test_one_output_token_takes_the_passes_of_its_prompt_and_no_decode(
    num_prompt_tokens: int, budget: int, num_passes: int
) -> None:
    config = SchedulerConfig(max_num_batched_tokens=budget)
    engine = FakeEngine(make_layout(block_size=16), 64, max_model_len=700, scheduler_config=config)
    engine.submit("a", list(range(num_prompt_tokens)), 1)
    engine.run()
    passes = [batch for batch in engine.batches if not batch.is_empty]
    assert len(passes) == num_passes
    assert [batch.num_decode_tokens for batch in passes] == [0] * num_passes
    assert engine.executor.num_token_passes == num_prompt_tokens
    assert len(engine.ended["a"][1]) == num_prompt_tokens + 1


@pytest.mark.parametrize(("keeps_kv", "num_passes"), [(True, 699), (False, 119_900)])
@pytest.mark.parametrize("latency", [0, 1])
def test_token_passes_with_and_without_a_kv_cache(keeps_kv: bool, num_passes: int, latency: int) -> None:
    engine = FakeEngine(
        make_layout(block_size=16),
        64,
        max_model_len=700,
        scheduler_config=SchedulerConfig(enable_chunked_prefill=keeps_kv),
        cache_config=CacheConfig(enable_kv_cache=keeps_kv, enable_prefix_caching=False),
        latency=latency,
    )
    engine.executor.checks_reads = False
    engine.submit("a", [0] * 500, 200)
    engine.run()
    assert engine.executor.num_token_passes == num_passes
    assert pytest.approx(171.5, abs=0.05) == 119_900 / 699


def test_equal_bytes_hold_more_requests_in_blocks_than_in_runs() -> None:
    running: dict[str, int] = {}
    for reservation in ("paged", "contiguous"):
        kv = make_kv(64, kv_reservation=reservation, enable_prefix_caching=False)
        scheduler = make_scheduler(kv=kv)
        for i in range(64):
            scheduler.add_request(make_arrival(f"r{i}", 4, 4))
        scheduler.schedule(0.0)
        running[reservation] = scheduler.num_running
    assert running == {"paged": 64, "contiguous": 8}

"""The engine without a model: it follows the ideal schedules to the step, in simulated time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.counting_engine import counting_engine
from benchmarks.slots import continuous_schedule, static_schedule
from tiers import examples
from twostroke.config.cache import CacheConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.engine.event_sinks import read_events
from twostroke.errors import InvalidParameter
from twostroke.events import MeasurementBegan
from twostroke.measure.from_log import run_from_log
from twostroke.measure.summary import latencies, over_time, summarize
from twostroke.measure.workload import Lengths, SyntheticSpec, synthetic, with_arrivals, workload_of_lengths
from twostroke.scheduler.replay import replay
from twostroke.served_run import Run, ServedRequest


def _run(lengths: list[tuple[int, int]], arrivals: list[float] | None = None, **scheduler: object) -> Run:
    workload = workload_of_lengths(lengths)
    if arrivals is not None:
        workload = with_arrivals(workload, arrivals)
    config = SchedulerConfig(**scheduler)  # type: ignore[arg-type]
    engine = counting_engine(config, CacheConfig(), max_model_len=workload.max_request_tokens)
    return engine.run(workload)


@settings(max_examples=examples(25))
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=30),
    num_slots=st.integers(1, 6),
    batching=st.sampled_from(["static", "continuous"]),
)
def test_live_rows_are_those_of_the_ideal_schedule(lengths: list[int], num_slots: int, batching: str) -> None:
    run = _run([(1, length) for length in lengths], max_num_seqs=num_slots, batching=batching)
    ideal = {"static": static_schedule, "continuous": continuous_schedule}[batching]
    expected = [(part.live, part.saturated) for part in ideal(lengths, num_slots) for _ in range(part.num_steps)]
    assert [(step.num_seqs, step.num_waiting > 0) for step in run.steps] == expected


def test_time_is_counted_in_steps() -> None:
    run = _run([(3, 4), (3, 2)], max_num_seqs=1)
    first, second = (request.times for request in run.requests)
    assert (first.queue_time_s, first.ttft_s, first.e2e_s, first.tpot_s) == (0, 1, 4, 1)
    assert (second.queue_time_s, second.ttft_s, second.e2e_s) == (4, 5, 6)
    assert list(first.itl_s) == [1, 1, 1]
    assert run.duration_s == 6


def test_requests_arrive_on_time_even_when_nothing_else_happens() -> None:
    run = _run([(1, 2), (1, 2)], arrivals=[0.0, 100.0])
    assert [r.times.token_times_s for r in run.requests] == [[1, 2], [101, 102]]
    assert run.requests[1].times.ttft_s == 1


def test_a_second_run_reuses_the_engine() -> None:
    workload = workload_of_lengths([(16, 3)] * 2)
    engine = counting_engine(SchedulerConfig(max_num_seqs=1), CacheConfig(block_size=4), max_model_len=32)
    first, second = engine.run(workload), engine.run(workload)
    assert [r.num_cached_tokens for r in first.requests] == [0, 0]  # different prompts
    assert [r.num_cached_tokens for r in second.requests] == [12, 12]  # all but the block of the last token


def test_a_summary_holds_what_happened() -> None:
    run = _run([(8, 4)] * 6, max_num_seqs=2, max_num_batched_tokens=64)
    summary = summarize(run)
    assert summary["steps"] == 12
    assert summary["throughput"]["output_tok_s"] == pytest.approx(24 / 12)
    assert summary["throughput"]["prefill_tok_s"] == pytest.approx(48 / 12)
    assert summary["latency"]["tpot_s"]["p50"] == 1
    # requests wait until the last pair runs
    assert summary["limited_by"]["seqs"] == pytest.approx(8 / 12)
    assert list(summary["own_time_s"]) == ["2"]
    assert summary["own_time_s"]["2"]["count"] == 12
    series = over_time(run)
    assert len(series["end_s"]) == len(series["limited_by"]) == 12
    assert series["num_waiting"][0] == 4
    assert set(series["limited_by"]) == {"seqs", "none"}


def test_the_event_log_of_a_run_replays_every_batch(tmp_path: Path) -> None:
    """Chunks, preemptions and cache hits included: 30 requests over a pool that holds three of them."""
    spec = SyntheticSpec(
        num_requests=30,
        prompt_lengths=Lengths.uniform(1, 40),
        output_lengths=Lengths.exponential(12),
        num_prefix_groups=2,
        prefix_length=16,
    )
    path = tmp_path / "events.jsonl"
    workload = synthetic(spec)
    longest = workload.max_request_tokens
    cache = CacheConfig(block_size=4, num_kv_blocks=3 * (longest // 4 + 1))
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32)
    engine = counting_engine(config, cache, max_model_len=longest, event_log=path)
    run = engine.run(workload)
    engine.engine.close()
    assert sum(r.times.num_preemptions for r in run.requests) > 0
    assert sum(r.num_cached_tokens for r in run.requests) > 0
    assert replay(read_events(path)) is None

    # and every figure of the run is in the log as well
    read = run_from_log(read_events(path))
    assert sorted(map(_account, read.requests)) == sorted(map(_account, run.requests))
    assert [replace(s, wall_s=0, operator_s=0) for s in read.steps] == [
        replace(s, wall_s=0, operator_s=0) for s in run.steps
    ]
    assert latencies(read) == latencies(run)


def _account(request: ServedRequest) -> tuple[object, ...]:
    times = request.times
    return times.arrival_s, times.scheduled_s, times.token_times_s, request.num_cached_tokens, times.num_preemptions


def test_a_log_without_a_step_has_no_figures() -> None:
    with pytest.raises(InvalidParameter, match="finished step"):
        run_from_log([])


def test_a_log_gives_the_last_measurement_whatever_warmed_up_before(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    engine = counting_engine(SchedulerConfig(), CacheConfig(), max_model_len=16, event_log=path)
    engine.run(workload_of_lengths([(9, 5)] * 4))
    run = engine.run(workload_of_lengths([(4, 3), (5, 2)]))
    engine.engine.close()
    read = run_from_log(read_events(path))
    assert sorted(map(_account, read.requests)) == sorted(map(_account, run.requests))
    assert len(read.steps) == len(run.steps)


def test_names_may_be_used_again_in_one_log(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    engine = counting_engine(SchedulerConfig(), CacheConfig(), max_model_len=16, event_log=path)
    for _ in range(2):
        engine.executor.num_runs = 0
        engine.run(workload_of_lengths([(4, 3)]))
    engine.engine.close()
    read = run_from_log(event for event in read_events(path) if not isinstance(event, MeasurementBegan))
    assert [r.times.token_times_s for r in read.requests] == [[1, 2, 3], [4, 5, 6]]

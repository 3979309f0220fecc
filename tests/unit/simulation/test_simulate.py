"""The simulation against the engine: with steps of the same length both do the same, token by token."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.counting_engine import counting_engine
from factories import make_arrival, make_scheduler
from tiers import examples
from twostroke.config.cache import CacheConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.cost.step_cost import Layers
from twostroke.cost.step_model import Curve, StepTimeModel
from twostroke.engine.event_sinks import read_events
from twostroke.errors import InvalidParameter
from twostroke.events import Event, StepScheduled
from twostroke.measure.workload import Workload, with_arrivals, workload_of_lengths
from twostroke.planner.replay import figures, replay_log
from twostroke.request import FinishReason
from twostroke.served_run import Run
from twostroke.simulation.complete import check_complete
from twostroke.simulation.requests import SimulatedRequest, read_recording
from twostroke.simulation.settings import WhatIf, rehash_for_block_size
from twostroke.simulation.simulate import Simulation, simulate

ARRIVALS = [0.0, 0.0, 0.0, 5.5, 5.5, 9.5, 20.5, 30.5, 31.5, 32.5]
SECOND = StepTimeModel(layers=Curve((1,), (1.0,)), head=Curve((1,), (0.0,)), pair_s=0.0, seen_s=0.0)
"""Every step takes one, as that of a counting engine does."""


def recorded(workload: Workload, log: Path, scheduler: SchedulerConfig, cache: CacheConfig) -> list[Event]:
    log.unlink(missing_ok=True)
    engine = counting_engine(scheduler, cache, max_model_len=64, event_log=log)
    engine.run(workload)
    engine.engine.close()
    return list(read_events(log))


def served(run: Run) -> list[tuple[object, ...]]:
    """Return what was observed of each request, in an order that does not depend on which engine held it."""
    return sorted(
        (r.times.arrival_s, r.times.token_times_s, r.times.scheduled_s, r.num_cached_tokens, r.times.num_preemptions)
        for r in run.requests
    )


requests = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20), st.integers(0, 30)), min_size=1, max_size=12)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=examples(60))
@given(
    requests=requests,
    budget=st.sampled_from([1, 4, 16, 64]),
    slots=st.integers(1, 6),
    num_blocks=st.integers(16, 40),
    policy=st.sampled_from(["fcfs", "fair"]),
    caches=st.booleans(),
    seed=st.integers(0, 3),
)
def test_the_simulated_run_is_the_recorded_one(
    tmp_path: Path,
    requests: list[tuple[int, int, int]],
    budget: int,
    slots: int,
    num_blocks: int,
    policy: str,
    caches: bool,
    seed: int,
) -> None:
    lengths = [(prompt, output) for prompt, output, _ in requests]
    arrivals = sorted(float(arrival) for _, _, arrival in requests)
    # few kinds of tokens, so that some prompts begin alike
    workload = with_arrivals(workload_of_lengths(lengths, vocab_size=18, seed=seed), arrivals)
    scheduler = SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=slots, policy=policy)
    cache = CacheConfig(block_size=4, num_kv_blocks=num_blocks, enable_prefix_caching=caches)
    events = recorded(workload, tmp_path / "log.jsonl", scheduler, cache)
    recording = read_recording(events)
    simulated = simulate(recording.started, recording.requests, SECOND)
    measured = replay_log(events, step_times=SECOND).measured
    assert served(simulated) == served(measured)
    assert [(s.num_prefill_tokens, s.num_decode_tokens, s.limited_by) for s in simulated.steps] == [
        (s.num_prefill_tokens, s.num_decode_tokens, s.limited_by) for s in measured.steps
    ]


def some_log(tmp_path: Path) -> list[Event]:
    workload = with_arrivals(workload_of_lengths([(30, 12)] * 10), ARRIVALS)
    cache = CacheConfig(block_size=4, num_kv_blocks=64)
    return recorded(workload, tmp_path / "log.jsonl", SchedulerConfig(max_num_batched_tokens=16), cache)


def test_what_if_predicts_what_an_engine_with_these_settings_does(tmp_path: Path) -> None:
    events = some_log(tmp_path)
    workload = with_arrivals(workload_of_lengths([(30, 12)] * 10), ARRIVALS)
    other = SchedulerConfig(max_num_batched_tokens=8, max_num_seqs=2)
    cache = CacheConfig(block_size=4, num_kv_blocks=24)
    what_if = WhatIf.read(["max_num_batched_tokens=8", "max-num-seqs=2", "num_kv_blocks=24"])
    (predicted,) = replay_log(events, [what_if], SECOND).what_ifs
    really = replay_log(recorded(workload, tmp_path / "other.jsonl", other, cache), step_times=SECOND).measured
    assert served(predicted.run) == served(really)


def test_the_back_test_of_steps_that_take_a_second_is_exact(tmp_path: Path) -> None:
    found = replay_log(some_log(tmp_path))
    assert found.difference is None
    assert found.step_quality.p95_error < 1e-6
    measured, predicted = (figures(run) for run in (found.measured, found.back_test.run))
    assert predicted == pytest.approx(measured)


def test_twice_the_rate_and_a_faster_machine(tmp_path: Path) -> None:
    events = some_log(tmp_path)
    faster = WhatIf.read(["request_rate_factor=2", "step_time_factor=0.5"])
    (predicted,) = replay_log(events, [faster], SECOND).what_ifs
    measured = replay_log(events, step_times=SECOND).back_test.run
    halved = [[t / 2 for t in r.times.token_times_s] for r in measured.requests]
    assert [r.times.token_times_s for r in predicted.run.requests] == halved


@pytest.mark.parametrize("missing", range(1, 60, 7))
def test_a_log_with_a_hole_is_refused(tmp_path: Path, missing: int) -> None:
    events = some_log(tmp_path)
    check_complete(events)
    kind = type(events[missing]).__name__
    if kind == "MeasurementBegan":
        pytest.skip("nothing is decided by it")
    with pytest.raises(InvalidParameter, match=r"must hold every event from the engine.s start; it lacks"):
        check_complete(events[:missing] + events[missing + 1 :])


def test_a_log_that_was_changed_decides_something_else(tmp_path: Path) -> None:
    events = some_log(tmp_path)
    i = next(i for i, e in enumerate(events) if isinstance(e, StepScheduled) and e.batch.num_prefill_tokens)
    changed = events[i]
    assert isinstance(changed, StepScheduled)
    events[i] = replace(changed, batch=replace(changed.batch, num_free_blocks=7))
    difference = replay_log(events, step_times=SECOND).difference
    assert difference is not None
    assert difference.recorded.num_free_blocks == 7


def simulated(requests: Sequence[SimulatedRequest], **given: object) -> list[list[float]]:
    simulation = Simulation(make_scheduler(**given), Layers([None]), SECOND, block_size=4)
    return [r.times.token_times_s for r in simulation.run(requests).requests]


def test_who_is_given_up_in_the_queue_gives_its_place_away() -> None:
    first = SimulatedRequest(make_arrival("a", 4, 20), 20)
    gone = SimulatedRequest(make_arrival("b", 4, 20), 0, FinishReason.ABORT, ended_after_s=3.0)
    last = SimulatedRequest(make_arrival("c", 4, 20, arrival_time_s=1.0), 2)
    times = simulated([first, gone, last], max_num_seqs=1)
    assert times == [[float(i) for i in range(1, 21)], [21.0, 22.0]]


def test_time_passes_between_arrivals() -> None:
    times = simulated([SimulatedRequest(make_arrival(n, 4, 1, arrival_time_s=t), 1) for n, t in (("a", 0), ("b", 100))])
    assert times == [[1.0], [101.0]]


def test_a_request_that_is_too_long_is_refused() -> None:
    with pytest.raises(InvalidParameter, match=r"30 \+ 20 tokens; the engine accepts 32"):
        simulated([SimulatedRequest(make_arrival("a", 30, 20), 20)])


@given(st.sampled_from([(4, 8), (4, 16), (16, 4), (8, 2), (4, 4)]), st.integers(0, 9), st.integers(0, 9))
def test_prefixes_stay_shared_whatever_the_block_size(sizes: tuple[int, int], shared: int, own: int) -> None:
    before, after = sizes

    def request(name: str) -> SimulatedRequest:
        names = [b"%d" % i for i in range(shared)] + [name.encode() + b"%d" % i for i in range(own)]
        return SimulatedRequest(make_arrival(name, before * len(names) or 1, 4, block_hashes=tuple(names)), 4)

    a, b = (one.arrival.block_hashes for one in rehash_for_block_size([request("a"), request("b")], before, after))
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=True)))
    assert same == shared * before // after
    assert len(set(a)) == len(a) == (shared + own) * before // after


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("max_num_batched_tokens", "must be key=value"),
        ("max_num_batchd_tokens=4", "Did you mean max_num_batched_tokens"),
        ("threads=4", "names a setting that cannot be simulated. Known: "),
    ],
)
def test_settings_that_nobody_knows(word: str, message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        WhatIf.read([word])


@pytest.mark.parametrize(
    "word", ["max_num_seqs=0", "block_size=3", "policy=best", "kv_cache_dtype=fp4", "num_kv_blocks=-1"]
)
def test_values_out_of_range(tmp_path: Path, word: str) -> None:
    with pytest.raises(InvalidParameter):
        replay_log(some_log(tmp_path), [WhatIf.read([word])], SECOND)


_MAX_SIMULATED_STEPS = (
    *("max_num_batched_tokens", "max_num_seqs", "itl_slo", "ageing_s", "flex_slowdown", "max_model_len", "block_size"),
    *("num_kv_blocks", "kv_cache_memory", "request_rate_factor", "step_time_factor", "prefill", "link_bytes_per_s"),
)


@pytest.mark.parametrize("name", _MAX_SIMULATED_STEPS)
@pytest.mark.parametrize("value", ["abc", "NaN", "-5", "Infinity", "0.0", "true", "[1]", "[" * 100_000, "9" * 5000])
def test_numbers_that_are_none_are_refused_by_name(tmp_path: Path, name: str, value: str) -> None:
    if (name, value) == ("flex_slowdown", "0.0"):
        return  # it is one
    with pytest.raises(InvalidParameter) as refused:
        replay_log(some_log(tmp_path), [WhatIf.read([f"{name}={value}"])], SECOND)
    assert refused.value.name == name
    assert "must be " in str(refused.value)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("kv_cache_memory=2", "kv_cache_memory=2: must make room for 1 to 16,777,216 KV blocks of"),
        (f"num_kv_blocks={10**12}", "it makes room for 1,000,000,000,000"),
        ("max_model_len=1", "max_model_len=1: must be a whole number, 2 to 2147483647"),
    ],
)
def test_memory_for_no_block_or_too_many_is_refused(tmp_path: Path, word: str, told: str) -> None:
    with pytest.raises(InvalidParameter, match=re.escape(told)):
        replay_log(some_log(tmp_path), [WhatIf.read([word])], SECOND)


def test_a_factor_may_be_as_large_as_its_limit_says() -> None:
    for name in ("request_rate_factor", "step_time_factor"):
        assert getattr(WhatIf.read([f"{name}=1000000"]), name) == 1e6
        with pytest.raises(
            InvalidParameter, match=f"{name}=1000001: must be a number, more than 0 and at most 1000000"
        ):
            getattr(WhatIf.read([f"{name}=1000001"]), name)

"""Constructed loads: the doctor names the right setting, and changing it has the predicted effect."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import pytest
from rich.console import Console

from pool_log import D, P, PoolLog, died_and_resumed
from timed_engine import STEP_TIMES, history
from twostroke.batch import Limit
from twostroke.config.cache import CacheConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.cost.step_model import Curve, StepTimeModel, scaled
from twostroke.errors import InvalidParameter
from twostroke.event_codec import plain
from twostroke.events import EngineLost, EngineStarted, Event, EventsDropped, RequestArrived, RequestRouted
from twostroke.measure.from_log import run_from_log
from twostroke.measure.workload import Workload, with_arrivals, workload_of_lengths
from twostroke.planner import doctor
from twostroke.planner.constraint import Binding
from twostroke.planner.doctor import Diagnosis, diagnose, last_run
from twostroke.planner.faults import faults_of
from twostroke.planner.levers import levers_of
from twostroke.planner.read_signals import signals_of
from twostroke.planner.replay import figures, replay_log
from twostroke.planner.show_doctor import diagnosis_json, print_diagnosis
from twostroke.request import FinishReason
from twostroke.scheduler.replay import layout_of


def every(seconds: float, lengths: list[tuple[int, int]], seed: int = 0) -> Workload:
    return with_arrivals(workload_of_lengths(lengths, seed=seed), [seconds * i for i in range(len(lengths))])


def naive() -> dict[str, Any]:
    """Static batches, memory for the longest request each: low use, low throughput."""
    return {
        "workload": workload_of_lengths([(64, 8 + 37 * (i % 9)) for i in range(48)]),
        "scheduler": SchedulerConfig(batching="static", max_num_seqs=32),
        "cache": CacheConfig(kv_reservation="contiguous", enable_prefix_caching=False),
        "num_blocks": 640,
    }


def little_memory() -> dict[str, Any]:
    """Long answers in little KV memory."""
    return {
        "workload": workload_of_lengths([(256, 200)] * 40),
        "scheduler": SchedulerConfig(max_num_seqs=32),
        "cache": CacheConfig(enable_prefix_caching=False),
        "num_blocks": 200,
    }


def few_slots() -> dict[str, Any]:
    return {
        "workload": every(0.05, [(32, 64)] * 60),
        "scheduler": SchedulerConfig(max_num_seqs=4),
    }


def whole_prompts() -> dict[str, Any]:
    """Some requests decode, and long prompts are computed in one piece."""
    return {
        "workload": with_arrivals(
            workload_of_lengths([(16, 400)] * 6 + [(1500, 4)] * 4), [0.0] * 6 + [1.0 + 3.0 * i for i in range(4)]
        ),
        "scheduler": SchedulerConfig(enable_chunked_prefill=False),
    }


def large_chunks() -> dict[str, Any]:
    """Repeat the comparison with large chunks."""
    return whole_prompts() | {"scheduler": SchedulerConfig(max_num_batched_tokens=1024)}


def prompts_that_wait() -> dict[str, Any]:
    """Whole prompts that fit only into a step without other tokens: they wait until no request decodes."""
    return {
        "workload": with_arrivals(
            workload_of_lengths([(16, 400)] * 6 + [(500, 4)] * 4), [0.0] * 6 + [1.0 + 3.0 * i for i in range(4)]
        ),
        "scheduler": SchedulerConfig(enable_chunked_prefill=False, max_num_batched_tokens=500),
    }


def measurement_lock() -> dict[str, Any]:
    """A single user, who waits for each token."""
    return {"workload": every(3.0, [(32, 100)] * 10)}


def short_outputs() -> dict[str, Any]:
    """Return a classifier's load: dozens of prompts with a few output tokens each.

    Decodes beside prompts take as long as these.
    """
    return {"workload": workload_of_lengths([(300, 3)] * 40)}


def short_outputs_in_few_slots() -> dict[str, Any]:
    """Return the load of `short_outputs` with a queue for slots, which more slots would not shorten."""
    return short_outputs() | {"scheduler": SchedulerConfig(max_num_seqs=4)}


def idle() -> dict[str, Any]:
    """Return two requests at a time; while one decodes, the prompt of the other is computed."""
    arrivals = [30.0 * (i // 2) + 0.5 * (i % 2) for i in range(24)]
    return {"workload": with_arrivals(workload_of_lengths([(700, 40)] * 24), arrivals)}


def idle_in_bursts() -> dict[str, Any]:
    """Return bursts of more requests than slots, with idle time between them: a burst is a queue."""
    arrivals = [30.0 * (i // 12) for i in range(48)]
    return {
        "workload": with_arrivals(workload_of_lengths([(32, 48)] * 48), arrivals),
        "scheduler": SchedulerConfig(max_num_seqs=4),
    }


def engine_time() -> dict[str, Any]:
    """Small steps, for an engine with a large time of its own."""
    return {"workload": every(0.5, [(32, 60)] * 12)}


def a_handful() -> dict[str, Any]:
    """Too few requests to judge by."""
    return {"workload": workload_of_lengths([(32, 64)] * 9)}


@functools.cache
def log_of(case: Any, noise: float = 0.05) -> list[Event]:
    """Return the log of a case, made once; no test changes it."""
    return history(**case(), noise=noise)


@functools.cache
def diagnosis_of(case: Any, noise: float = 0.05) -> Diagnosis:
    """Return what the doctor says of a case, asked once."""
    return diagnose(log_of(case, noise))


CASES = [
    (naive, Binding.SLOTS, "continuous batching with paged KV"),
    (little_memory, Binding.KV, "half as much KV memory again"),
    (few_slots, Binding.SLOTS, "twice the slots"),
    (whole_prompts, Binding.PROMPTS, "chunked prefill"),
    (prompts_that_wait, Binding.PROMPTS, "chunked prefill"),
    (large_chunks, Binding.PROMPTS, "a limit for the time between tokens"),
    (idle_in_bursts, Binding.SLOTS, "twice the slots"),
]
NOTHING_TO_DO = [
    (short_outputs, Binding.COMPUTE),
    (short_outputs_in_few_slots, Binding.COMPUTE),
    (idle, Binding.NONE),
]


def with_settings(case: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """The same load on an engine with other settings."""
    of_scheduler = {name: value for name, value in settings.items() if hasattr(SchedulerConfig(), name)}
    of_cache = {name: value for name, value in settings.items() if hasattr(CacheConfig(), name)}
    scheduler, cache = case.get("scheduler", SchedulerConfig()), case.get("cache", CacheConfig())
    num_blocks = of_cache.pop("num_kv_blocks", case.get("num_blocks", 1024))
    return case | {
        "scheduler": dataclasses.replace(scheduler, **of_scheduler),
        "cache": dataclasses.replace(cache, **of_cache),
        "num_blocks": num_blocks,
    }


@pytest.mark.parametrize(("case", "constraint", "lever"), CASES, ids=[case.__name__ for case, _, _ in CASES])
def test_each_load_has_its_lever(case: Any, constraint: Binding, lever: str) -> None:
    found = diagnosis_of(case)
    assert (found.constraint, found.levers[0].name) == (constraint, lever), found.evidence
    assert found.evidence


@pytest.mark.parametrize(("case", "constraint"), NOTHING_TO_DO, ids=[case.__name__ for case, _ in NOTHING_TO_DO])
@pytest.mark.parametrize("noise", [0.05, 3.0])
def test_an_idle_server_and_a_compute_bound_one_have_nothing_to_do(
    case: Any, constraint: Binding, noise: float
) -> None:
    found = diagnosis_of(case, noise)
    assert (found.constraint, found.levers, found.to_measure, named(found)) == (constraint, (), (), set())
    assert found.signals.stalled_itl["p99"] > 5 * 0.03, "there is something that one might take for long prompts"


@pytest.mark.parametrize(
    ("case", "constraint", "lever"),
    [case for case in CASES if case[0] in (little_memory, few_slots, large_chunks)],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_a_machine_that_others_use_changes_no_verdict(case: Any, constraint: Binding, lever: str) -> None:
    found = diagnosis_of(case, 3.0)
    assert (found.constraint, found.levers[0].name) == (constraint, lever), found.remark


def test_speculation_for_a_single_user_is_something_to_measure() -> None:
    found = diagnosis_of(measurement_lock)
    assert (found.constraint, found.levers) == (Binding.BANDWIDTH, ())
    assert [lever.name for lever in found.to_measure] == ["speculation"]
    assert "twostroke calibrate" in found.to_measure[0].measure


@pytest.mark.parametrize("case", [case for case, _, _ in CASES], ids=lambda c: c.__name__)
def test_pulling_the_lever_does_what_was_predicted(case: Any) -> None:
    before = case()
    lever = diagnosis_of(case).levers[0]
    assert lever.before is not None
    assert lever.after is not None
    after = with_settings(before, lever.settings)
    really = figures(run_from_log(history(**after, noise=0.05)))[lever.metric]
    was = figures(run_from_log(log_of(case)))[lever.metric]
    assert lever.gain > 1.05
    assert (really - was) * (lever.after - lever.before) > 0, "the metric moved the other way"
    predicted = lever.after - lever.before
    assert abs((really - was) - predicted) <= 0.3 * abs(predicted)


def test_background_work_that_waits_is_no_queue() -> None:
    case = few_slots()
    requests = tuple(dataclasses.replace(request, background=True) for request in case["workload"].requests)
    found = diagnose(history(**case | {"workload": Workload(requests, {})}))
    assert found.constraint is not Binding.SLOTS


def test_levers_that_change_answers_come_after_those_that_help_without() -> None:
    found = diagnose(history(**little_memory() | {"workload": workload_of_lengths([(256, 200)] * 60)}))
    assert [lever.is_exact for lever in found.levers] == [True, False]
    assert found.levers[1].gain > found.levers[0].gain > 1.05, "eight bits hold twice as much"


def test_eight_bits_in_as_many_blocks_are_half_the_memory_so_the_lever_names_more() -> None:
    case = little_memory() | {"cache": CacheConfig(enable_prefix_caching=False, num_kv_blocks=200)}
    flags = next(lever.flags for lever in diagnose(history(**case)).levers if not lever.is_exact)
    assert flags.startswith("--kv-cache-dtype int8 --num-kv-blocks 3"), flags


def named(found: Diagnosis) -> set[str]:
    return {fault.name for fault in found.faults}


def test_thrash_is_named() -> None:
    workload = workload_of_lengths([(16, 300)] * 24)
    cache = CacheConfig(enable_prefix_caching=False)
    assert "preemption thrash" in named(diagnose(history(workload, cache=cache, num_blocks=130)))
    assert "preemption thrash" not in named(diagnose(history(workload, cache=cache, num_blocks=1000)))


def hot_prefix() -> Workload:
    """Many requests have one prefix; in between are prompts that occur once."""
    hot, cold = (
        workload_of_lengths([(512, 2)], seed=1).requests[0],
        workload_of_lengths([(900, 2)] * 12, seed=2).requests,
    )
    requests = [request for one in cold for request in (hot, one)]
    workload = Workload(tuple(requests), {})
    return with_arrivals(workload, [2.0 * i for i in range(len(requests))])


def test_eviction_of_a_hot_prefix_is_named() -> None:
    assert "eviction of a hot prefix" in named(diagnose(history(hot_prefix(), num_blocks=70, max_model_len=1000)))
    assert "eviction of a hot prefix" not in named(diagnose(history(hot_prefix(), num_blocks=2000, max_model_len=1000)))


def test_preempted_requests_that_share_nothing_have_no_hot_prefix() -> None:
    """Their own blocks are evicted and computed again: that is thrash."""
    found = diagnose(history(workload_of_lengths([(28, 96)] * 16), num_blocks=24, max_model_len=256))
    assert found.signals.num_evicted_hits >= 3
    assert named(found) == {"preemption thrash"}


def test_long_prompt_stalls_are_named() -> None:
    assert "long-prompt stalls" in named(diagnosis_of(whole_prompts, 0.0))
    paced = whole_prompts() | {"scheduler": SchedulerConfig(itl_slo="80ms")}
    assert "long-prompt stalls" not in named(diagnose(history(**paced)))


def test_kv_growth_is_named() -> None:
    growing = every(0.8, [(64, 1500)] * 40)
    assert "KV growth" in named(diagnose(history(growing, num_blocks=3000)[:2600]))
    steady = every(0.8, [(64, 20)] * 40)
    assert "KV growth" not in named(diagnose(history(steady, num_blocks=3000)))


def test_fragmentation_is_named() -> None:
    assert "fragmentation" in named(diagnosis_of(naive))
    assert "fragmentation" not in named(diagnosis_of(little_memory))


def test_flooding_is_named() -> None:
    workload = workload_of_lengths([(64, 16)] * 40)
    tenants = ["loud"] * 38 + ["quiet"] * 2
    assert "tenant flooding" in named(diagnose(history(workload, tenants=tenants)))
    fair = SchedulerConfig(policy="fair")
    assert "tenant flooding" not in named(diagnose(history(workload, fair, tenants=tenants)))
    assert "tenant flooding" not in named(diagnose(history(workload, tenants=["loud", "quiet"] * 20)))


def test_a_host_leak_is_named() -> None:
    load, few = every(4.0, [(64, 20)] * 60), CacheConfig(enable_prefix_caching=False)
    leak = diagnose(history(load, cache=few, memory_bytes=lambda at_s: 500_000_000 + int(100_000 * at_s)))
    assert "host leak" in named(leak)
    seen = next(fault.seen for fault in leak.faults if fault.name == "host leak")
    assert "360 MB an hour" in seen
    for steady in (lambda _: 500_000_000, lambda at_s: 500_000_000 + int(5_000_000 * (at_s % 7))):
        assert "host leak" not in named(diagnose(history(load, cache=few, memory_bytes=steady)))


def test_kv_blocks_that_are_used_for_the_first_time_are_no_leak() -> None:
    load = every(4.0, [(512, 20)] * 60)
    block_bytes = layout_of(history(every(1.0, [(8, 2)]))[0].layout).bytes_per_block
    filling = diagnose(
        history(load, memory_bytes=lambda at_s: 10**9 + int(33 / 4 * at_s) * block_bytes, num_blocks=3000)
    )
    assert "host leak" not in named(filling)


def test_an_engine_that_is_slow_itself_is_named() -> None:
    found = diagnose(history(**engine_time(), own_s=0.05))
    assert found.constraint is Binding.ENGINE


@pytest.mark.parametrize("case", [few_slots, little_memory], ids=lambda c: c.__name__)
def test_a_dump_with_a_gap_is_predicted_from_what_is_left(case: Any) -> None:
    events = log_of(case)
    cut = len(events) // 3
    gap = EventsDropped(events[cut].time_s, events[0].process, cut - 20)
    whole, found = diagnose(events), diagnose([events[0], gap, *events[cut:]])
    assert (found.constraint, found.levers[0].name) == (whole.constraint, whole.levers[0].name)
    assert found.levers[0].before is not None


def test_a_handful_of_requests_is_no_load() -> None:
    few, enough = (
        diagnose(history(workload_of_lengths([(32, 64)] * n), SchedulerConfig(max_num_seqs=2))) for n in (9, 10)
    )
    assert (few.constraint, few.levers, few.to_measure) == (Binding.UNKNOWN, (), ())
    assert "9 requests with a token, fewer than the 10 needed" in few.evidence[0]
    assert (enough.constraint, enough.levers[0].name) == (Binding.SLOTS, "twice the slots")


def test_without_a_back_test_that_holds_no_lever_is_offered() -> None:
    slow = scaled(STEP_TIMES, 1.5)
    found = diagnose(log_of(few_slots, 0.0), slow)
    assert (found.constraint, found.levers) == (Binding.SLOTS, ())
    assert "the back-test is off by" in found.remark
    assert "more than the 25% allowed" in found.remark
    console = Console(record=True, width=160)
    print_diagnosis(found, console)
    assert "advice   none whose effect can be predicted" in console.export_text()
    near = diagnose(log_of(few_slots, 0.0), scaled(STEP_TIMES, 1.2))
    assert near.levers, near.remark


def test_a_log_of_drafts_is_not_predicted() -> None:
    first, *others = log_of(few_slots, 0.0)
    assert isinstance(first, EngineStarted)
    found = diagnose([dataclasses.replace(first, speculation={"method": "ngram"}), *others])
    assert (found.constraint, found.levers) == (Binding.SLOTS, ())
    assert "drafts" in found.remark


def test_a_lever_that_brings_less_than_a_tenth_is_not_offered() -> None:
    """Requests queue for slots, but their time goes into arithmetic: twice the slots make steps twice as long."""
    linear = StepTimeModel(
        layers=Curve((1, 512), (0.01, 5.12)), head=Curve((1, 64), (0.001, 0.002)), pair_s=0.0, seen_s=0.0
    )
    found = diagnose(history(**few_slots(), step_times=linear))
    assert (found.constraint, found.levers) == (Binding.SLOTS, ())
    assert "no setting that relieves it is predicted to bring 10%" in found.remark
    console = Console(record=True, width=160)
    print_diagnosis(found, console)
    assert "nothing to do" in console.export_text()


@pytest.mark.parametrize("case", [case for case, _, _ in CASES], ids=lambda c: c.__name__)
def test_every_lever_that_is_offered_brings_a_tenth_and_is_not_on_yet(case: Any) -> None:
    found = diagnose(log_of(case), link_bytes_per_s=1e9)
    on = {**found.signals.started.scheduler, **found.signals.started.cache}
    for lever in found.levers:
        assert lever.gain >= 1.1, lever.name
        assert all(on.get(name) != value for name, value in lever.settings.items()), lever


def test_a_limit_that_is_set_and_broken_gets_only_tighter_ones() -> None:
    """The engine's step times are far too short, as on a machine that has become slow."""
    case = large_chunks() | {"scheduler": SchedulerConfig(max_num_batched_tokens=1024, itl_slo=0.2)}
    started, *others = log_of(large_chunks, 0.0)
    assert isinstance(started, EngineStarted)
    broken = [dataclasses.replace(started, scheduler=plain(case["scheduler"])), *others]
    found = signals_of(broken)
    levers = [lever for lever in levers_of(Binding.PROMPTS, found, None) if "itl_slo" in lever.settings]
    assert levers
    assert all(lever.settings["itl_slo"] < 0.2 for lever in levers)
    remedy = next(fault.remedy for fault in faults_of(found, Binding.PROMPTS) if fault.name == "long-prompt stalls")
    assert "--itl-slo below 200ms" in remedy
    assert "--max-num-batched-tokens 509" in remedy, "half of the largest chunk, below the 1024 that are set"


@pytest.mark.parametrize(
    ("scheduler", "cache", "flags"),
    [
        (SchedulerConfig(batching="static"), CacheConfig(), "leave out --batching"),
        (
            SchedulerConfig(),
            CacheConfig(kv_reservation="contiguous", enable_prefix_caching=False),
            "leave out --kv-reservation",
        ),
        (SchedulerConfig(), CacheConfig(), None),
    ],
)
def test_only_baselines_that_are_on_are_to_be_left_out(
    scheduler: SchedulerConfig, cache: CacheConfig, flags: str | None
) -> None:
    levers = levers_of(Binding.SLOTS, signals_of(history(workload_of_lengths([(8, 2)]), scheduler, cache)), None)
    assert next((lever.flags for lever in levers if lever.flags.startswith("leave out")), None) == flags


def test_kv_in_8_bits_is_no_lever_and_no_remedy_where_it_is_on() -> None:
    case = {"workload": workload_of_lengths([(16, 300)] * 24), "cache": CacheConfig(enable_prefix_caching=False)}
    started, *others = history(**case, num_blocks=130)
    assert isinstance(started, EngineStarted)
    for kv_format, is_offered in (("bf16", True), ("int8", False), ("int4", False), ("fp8", False)):
        found = signals_of([dataclasses.replace(started, layout=started.layout | {"kv_format": kv_format}), *others])
        names = [lever.name for lever in levers_of(Binding.KV, found, None)]
        assert ("KV in 8 bits" in names) is is_offered
        thrash = next(fault for fault in faults_of(found, Binding.KV) if fault.name == "preemption thrash")
        assert ("8 bits" in thrash.remedy) is is_offered


@pytest.mark.parametrize(("model_bits", "is_named"), [(16.0, True), (32.0, True), (8.5, False), (5.7, False)])
def test_weights_in_8_bits_are_named_where_they_are_larger(model_bits: float, is_named: bool) -> None:
    first, *others = log_of(measurement_lock)
    assert isinstance(first, EngineStarted)
    found = signals_of([first, *others])
    count = int(8 * found.weight_bytes / model_bits)
    found.started = dataclasses.replace(first, model=f"m (LlamaForCausalLM, {count} parameters, torch.bfloat16)")
    names = [lever.name for lever in levers_of(Binding.BANDWIDTH, found, None)]
    assert ("weights in 8 bits" in names) is is_named


def test_drafts_and_pools_that_are_on_are_not_named() -> None:
    first, *others = log_of(measurement_lock)
    assert isinstance(first, EngineStarted)
    drafts = signals_of([dataclasses.replace(first, speculation={"method": "ngram"}), *others])
    assert levers_of(Binding.BANDWIDTH, drafts, None) == ()
    routed = RequestRouted(others[0].time_s, "gateway", "1-0", decode="d0", prefill="p0", reason="")
    pooled = signals_of([first, *others, routed])
    names = [lever.name for lever in levers_of(Binding.PROMPTS, pooled, 1e9)]
    assert "prefill and decode in two pools" not in names


def test_what_is_printed_and_what_programs_read() -> None:
    found = diagnose(log_of(few_slots, 0.0), STEP_TIMES)
    console = Console(record=True, width=160)
    print_diagnosis(found, console)
    text = console.export_text()
    assert "bound by slots" in text
    assert "--max-num-seqs 8" in text
    assert "predicted: TTFT P99" in text
    assert f"twostroke explain '{found.example}'" in text
    data = json.loads(json.dumps(diagnosis_json(found)))
    assert data["levers"][0]["settings"] == {"max_num_seqs": 8}
    assert data["levers"][0]["gain"] > 1.05


@pytest.mark.parametrize(
    ("case", "own_s", "says"),
    [
        (idle, 0.0, "nothing to do"),
        (short_outputs, 0.0, "nothing to do"),
        (measurement_lock, 0.0, "none whose effect can be predicted"),
        (engine_time, 0.05, "none whose effect can be predicted"),
        (a_handful, 0.0, "none whose effect can be predicted"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_nothing_to_do_is_said_only_where_that_is_so(case: Any, own_s: float, says: str) -> None:
    console = Console(record=True, width=160)
    print_diagnosis(diagnose(history(**case(), own_s=own_s)), console)
    (line,) = [line for line in console.export_text().splitlines() if line.startswith("advice")]
    assert line.split(maxsplit=1)[1].strip() == says


@pytest.mark.parametrize("itl_slo", ["300ms", 0.3])
def test_stalls_within_the_limit_that_was_asked_for_are_none(itl_slo: str | float) -> None:
    case = large_chunks()
    kept = case | {"scheduler": SchedulerConfig(max_num_batched_tokens=1024, itl_slo=itl_slo)}
    assert diagnose(history(**case)).constraint is Binding.PROMPTS
    found = diagnose(history(**kept))
    assert found.constraint is not Binding.PROMPTS
    assert found.signals.stalled_itl["p99"] > 0.1, "there is something that one might take for it"


def test_the_example_is_the_request_that_was_hit_most() -> None:
    case = whole_prompts()
    found = diagnose(history(**case))
    requests = {request.request_id: request for request in run_from_log(history(**case)).requests}
    assert max(requests[found.example].times.itl_s) == max(max(r.times.itl_s) for r in requests.values())
    queued = diagnosis_of(few_slots, 0.0)
    requests = {request.request_id: request for request in run_from_log(log_of(few_slots, 0.0)).requests}
    assert requests[queued.example].times.ttft_s == max(r.times.ttft_s for r in requests.values())


def printed(found: Diagnosis) -> str:
    console = Console(record=True, width=160)
    print_diagnosis(found, console)
    return console.export_text()


def test_an_engine_without_a_step_is_idle() -> None:
    """A server that has just started: its flight recorder holds its start, and no more."""
    started = log_of(few_slots, 0.0)[0]
    for events in ([started], []):
        found = diagnose(events)
        assert found.constraint is Binding.NONE
        assert "the engine is idle: no step ended" in printed(found)
        assert "0 requests, 0 tokens, 0 steps" in printed(found)
        assert "nothing to do" in printed(found)
        json.dumps(diagnosis_json(found))


def test_an_engine_that_was_asked_and_has_finished_no_step_is_not_called_idle() -> None:
    events = log_of(few_slots, 0.0)
    arrived = next(event for event in events if isinstance(event, RequestArrived))
    found = diagnose([events[0], arrived])
    assert found.constraint is Binding.UNKNOWN
    assert found.evidence == ("1 request arrived, and no step has ended yet. Try again later.",)
    assert "none whose effect can be predicted" in printed(found)


@pytest.mark.parametrize("first", [1, 40])
def test_a_log_without_its_beginning_gets_no_verdict(first: int) -> None:
    """Without the start, an engine has 0 slots; the replay's words."""
    events = log_of(few_slots, 0.0)[first:]
    for reader in (diagnose, replay_log):
        with pytest.raises(InvalidParameter, match="it lacks the start of the engine before") as refused:
            reader(events)
        assert refused.value.remedy == "Give a file that --event-log wrote, as it was written."


def test_a_dump_with_a_gap_says_so_and_is_read_if_it_holds_the_start() -> None:
    started, *others = log_of(few_slots, 0.0)
    kept = others[200:]
    gap = EventsDropped(kept[0].time_s, kept[0].process, 200)
    assert diagnose([started, gap, *kept]).constraint is Binding.SLOTS
    with pytest.raises(InvalidParameter, match="it lacks the start of the engine"):
        diagnose([gap, *kept])


@pytest.mark.parametrize(
    ("time_s", "words"),
    [(-1.0, "from 0 s on, .*the earliest is -1.000 s"), (5.0, "steps that took time; all of them are at 5.000 s")],
)
def test_times_that_cannot_be_get_no_verdict(time_s: float, words: str) -> None:
    events = [dataclasses.replace(event, time_s=time_s) for event in log_of(few_slots, 0.0)]
    with pytest.raises(InvalidParameter, match=words):
        diagnose(events)


@pytest.mark.parametrize("constraint", [one for one in Binding if one not in (Binding.NONE, Binding.COMPUTE)])
def test_nothing_to_do_is_not_said_where_something_binds_and_nothing_was_tried(constraint: Binding) -> None:
    found = dataclasses.replace(diagnose([]), constraint=constraint)
    assert "advice   none whose effect can be predicted" in printed(found)
    tried = dataclasses.replace(found, has_predictions=True)
    assert "advice   nothing to do" in printed(tried)


def test_one_request_is_counted_as_one() -> None:
    found = diagnose(history(workload_of_lengths([(32, 64)])))
    assert printed(found).startswith("1 request, 64 tokens, ")


def test_two_pools_are_predicted_where_a_link_is_known() -> None:
    events = log_of(large_chunks, 0.0)

    def pools(found: Diagnosis) -> Any:
        return next(lever for lever in (*found.levers, *found.to_measure) if "two pools" in lever.name)

    unknown, known = pools(diagnose(events)), pools(diagnose(events, link_bytes_per_s=1e9))
    assert unknown.settings == {}
    assert unknown.before is None
    assert "--link-bytes-per-s" in unknown.measure
    assert known.settings == {"prefill": 1, "decode": 1, "link_bytes_per_s": 1e9}
    assert known.gain > 2
    with pytest.raises(InvalidParameter, match="more than 0 bytes a second"):
        diagnose(events, link_bytes_per_s=0.0)


def handed_over(count: int) -> list[Event]:
    """Return the events of both processes by time: their steps have the same numbers at the same time."""
    log = PoolLog()
    for i in range(count):
        log.handed_over(f"r#{i}.0", 1.25 * i)
    return sorted(log.events, key=lambda event: event.time_s)


def test_logs_of_two_processes_count_each_sequence_once_and_every_step() -> None:
    found = signals_of(handed_over(12))
    assert (found.num_requests, found.num_served, sum(found.waiting_by_tenant.values())) == (12, 12, 12)
    assert (found.num_steps, found.num_outputs, found.num_processes) == (36, 36, 2)
    assert found.ttft["count"] == found.queue["count"] == 12
    assert found.ttft["p50"] == found.ttft["p99"] == pytest.approx(1.0), "from the arrival to the prefill's token"
    assert found.queue["p99"] == pytest.approx(0.25)
    assert found.itl["count"] == 24, "the second token comes from another process, and has a gap before it"
    assert found.itl["p99"] == pytest.approx(1.0)
    assert found.busiest_s < found.busy_s, "two processes work at the same time"
    assert found.busy <= 1.0
    diagnosed = diagnose(handed_over(12))
    assert diagnosed.constraint is Binding.LINK
    assert not diagnosed.levers


def test_a_process_of_a_pool_may_end_a_sequence_after_another_has_taken_it() -> None:
    """A server hears its processes one after the other, not in the order of time."""
    events = handed_over(12)
    late = [event for event in events if event.process == P]
    early = [event for event in events if event.process == D]
    for order in ([*late, *early], [*early[:1], *late, *early[1:]]):
        assert (signals_of(order).num_requests, signals_of(order).num_outputs) == (12, 36)


def test_a_sequence_that_another_process_resumes_is_one() -> None:
    log = PoolLog()
    died_and_resumed(log, "a#0.0")
    found = signals_of(log.events)
    assert (found.num_requests, found.num_served, found.num_outputs, found.num_lost) == (1, 1, 4, 1)
    assert found.ttft["count"] == 1
    assert found.longest_itl[0] == pytest.approx(4.0), "the death is a gap between tokens"


@pytest.mark.parametrize("is_told_first_by_gateway", [True, False])
def test_an_abort_in_a_pool_counts_once(is_told_first_by_gateway: bool) -> None:
    log = PoolLog()
    for name in ("a#0.0", "b#1.0"):
        log.arrive(D, name, 0.0, arrival_s=0.0, max_tokens=9)
        log.prefill(D, name, 0.0, 1.0)
    reason = FinishReason.ABORT
    if is_told_first_by_gateway:
        log.end_everywhere("a#0.0", 1.5, reason)
        log.end(D, "a#0.0", 1.6, reason)
    else:
        log.end(D, "a#0.0", 1.5, reason)
        log.end_everywhere("a#0.0", 1.6, reason)
    log.end(D, "b#1.0", 2.0, reason)  # withdrawn, and run elsewhere
    log.start("decode-1.1", 2.0)
    log.arrive("decode-1.1", "b#1.0@1", 2.1, arrival_s=0.0, num_tokens=11)
    log.prefill("decode-1.1", "b#1.0@1", 2.1, 3.0, num_tokens=11, reason=FinishReason.LENGTH)
    found = signals_of(log.events)
    assert (found.num_aborted, found.num_requests) == (1, 1)


def test_two_processes_that_decode_are_no_engine_to_simulate() -> None:
    log = PoolLog()
    log.start("decode-1.1", 0.0)
    for i in range(24):
        process, name = (D, "decode-1.1")[i % 2], f"r#{i}.0"
        log.arrive(process, name, i * 0.1, arrival_s=0.0)
        log.prefill(process, name, i * 0.1, i * 0.1 + 0.05, reason=FinishReason.LENGTH)
    signals = signals_of(log.events)
    assert signals.num_steps == signals.num_requests == 24
    signals.waiting_s = {Limit.SEQS: signals.busy_s}
    _, remark = doctor._predict_levers(levers_of(Binding.SLOTS, signals, None), log.events, None, signals)
    assert "is that of an engine in a pool" in remark


def after_a_while(idle_s: float) -> dict[str, Any]:
    """Return the load of `few_slots`, on a server that was started long before."""
    case = few_slots()
    workload = case["workload"]
    return case | {"workload": with_arrivals(workload, [idle_s + one.arrival_s for one in workload.requests])}


def test_the_time_before_the_first_request_is_no_idle_time() -> None:
    waited, at_once = history(**after_a_while(600.0)), history(**few_slots())
    assert signals_of(waited).begin_s == pytest.approx(600.0)
    assert diagnose(waited).constraint is diagnose(at_once).constraint is Binding.SLOTS
    assert signals_of(waited).busy == pytest.approx(signals_of(at_once).busy, rel=1e-3)
    assert diagnosis_of(idle).constraint is Binding.NONE, "requests that trickle in leave a server idle"


def test_of_a_log_of_several_runs_the_last_is_meant() -> None:
    last = log_of(few_slots)
    found = diagnose([*log_of(idle), *log_of(little_memory)[:-3], *last])
    alone = diagnose(last)
    assert found.signals == alone.signals
    assert (found.constraint, found.levers) == (alone.constraint, alone.levers)
    assert found.remark.endswith("the log has 3 runs; this is the last one")
    assert "runs in this log" not in alone.remark


def test_an_engine_that_died_and_was_started_again_is_of_the_same_run() -> None:
    started, *others = log_of(few_slots)
    assert isinstance(started, EngineStarted)
    again = dataclasses.replace(started, process="engine-2")
    lost = EngineLost(others[-1].time_s, started.process, "it was ended by signal 9")
    assert last_run([started, *others, lost, again]) == ([started, *others, lost, again], 1)
    assert last_run([started, *others, again]) == ([again], 2)
    pools = handed_over(2)
    assert last_run(pools) == (pools, 1), "each process starts once"
    assert last_run([*pools, *pools]) == (pools, 2)


def long_prompts_and_few_slots() -> dict[str, Any]:
    """Return two long prompts by themselves, whose time to the first token is their own, and queues of short ones."""
    lengths = [(1900, 1)] * 2 + [(16, 10)] * 50
    return {
        "workload": with_arrivals(workload_of_lengths(lengths), [0.0, 3.0] + [6.0] * 25 + [9.0] * 25),
        "scheduler": SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=128),
    }


def test_a_lever_that_helps_the_median_alone_is_offered_and_says_so() -> None:
    found = diagnosis_of(long_prompts_and_few_slots)
    assert found.constraint is Binding.SLOTS
    (lever,) = found.levers
    assert (lever.settings, lever.metric) == ({"max_num_seqs": 8}, "ttft_p50")
    assert lever.gain > 1.5
    before, after = lever.costs["ttft_p99"]
    assert before / after < 1.1, "by the slowest alone it was none"
    console = Console(record=True, width=160)
    print_diagnosis(found, console)
    assert "predicted: TTFT P50 " in console.export_text()

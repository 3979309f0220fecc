"""Numbers against those of the same run, read off its log in another way."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from alone_metrics import AloneMetrics
from explain_loads import random_load, times_of
from factories import make_layout
from fakes import FakeEngine
from twostroke.batch import Commit, DraftReason, KVLoad, KVMoves, KVStore, Limit, ScheduledBatch
from twostroke.config.cache import CacheConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.events import (
    EngineStarted,
    Event,
    EventRing,
    KVBlockChecked,
    RequestArrived,
    RequestFinishedByCaller,
    StepCommitted,
    StepScheduled,
)
from twostroke.kv_check import Verdict
from twostroke.metrics.engine_metrics import EngineMetrics
from twostroke.metrics.exposition import EngineCollector, exposition
from twostroke.request import Arrival, FinishReason

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scraped(metrics: EngineMetrics) -> Samples:
    """Name and own labels to value, as a scraper reads them."""
    text = exposition(EngineCollector(metrics)).decode()
    return {
        (sample.name, frozenset(sample.labels.items() - metrics.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def counted(events: list[Event]) -> Samples:
    metrics = AloneMetrics("some model")
    for event in events:
        metrics.observe(event)
    return scraped(metrics)


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"twostroke:{name}", frozenset(labels.items())]


def buckets(samples: Samples, name: str) -> dict[float, float]:
    return {
        float(dict(labels)["le"]): found
        for (full, labels), found in samples.items()
        if full == f"twostroke:{name}_bucket"
    }


@pytest.mark.parametrize("seed", range(25))
def test_sums_agree_with_the_times_of_the_same_run(seed: int) -> None:
    events = random_load(seed)
    samples = counted(events)
    everybody = times_of(events)
    served = [times for times in everybody.values() if times.token_times_s]
    tpots = [times.tpot_s for times in served if times.tpot_s is not None]
    expected = {
        "time_to_first_token_seconds": [times.ttft_s for times in served],
        "e2e_request_latency_seconds": [times.e2e_s for times in served],
        "request_queue_time_seconds": [times.queue_time_s for times in served],
        "request_prefill_time_seconds": [times.ttft_s - times.queue_time_s for times in served],
        "request_decode_time_seconds": [times.e2e_s - times.ttft_s for times in served],
        "request_inference_time_seconds": [times.e2e_s - times.queue_time_s for times in served],
        "request_time_per_output_token_seconds": tpots,
        "request_generation_tokens": [float(len(times.token_times_s)) for times in everybody.values()],
    }
    for name, values in expected.items():
        assert value(samples, f"{name}_count") == len(values), name
        assert value(samples, f"{name}_sum") == pytest.approx(sum(values)), name
        for bound, count in buckets(samples, name).items():
            assert count == sum(v <= bound for v in values), f"{name} up to {bound}"
    itls = [gap for times in served for gap in times.itl_s]
    assert value(samples, "inter_token_latency_seconds_sum") == pytest.approx(sum(itls))
    assert value(samples, "inter_token_latency_seconds_count") == len(itls) - num_first_tokens_beyond_one(events)
    assert value(samples, "output_gap_seconds_count") == num_steps_with_tokens(events) - len(served)
    assert value(samples, "output_gap_seconds_sum") == pytest.approx(sum(itls))
    assert value(samples, "generation_tokens_total") == sum(len(times.token_times_s) for times in served)
    assert value(samples, "num_preemptions_total") == sum(times.num_preemptions for times in everybody.values())


def num_first_tokens_beyond_one(events: list[Event]) -> int:
    """Return the number of tokens that came together with a first token: they have no gap."""
    seen: set[str] = set()
    num_tokens = 0
    for commit in (c for event in events if isinstance(event, StepCommitted) for c in event.commits if c.num_tokens):
        num_tokens += 0 if commit.request_id in seen else commit.num_tokens - 1
        seen.add(commit.request_id)
    return num_tokens


def num_steps_with_tokens(events: list[Event]) -> int:
    """Return for each request the number of steps that gave it tokens before its end."""
    ended: set[str] = set()
    num_steps = 0
    for event in events:
        if isinstance(event, RequestFinishedByCaller):
            ended.add(event.request_id)
        if isinstance(event, StepCommitted):
            num_steps += sum(bool(c.num_tokens) and c.request_id not in ended for c in event.commits)
            ended |= {commit.request_id for commit in event.commits if commit.finish_reason is not None}
    return num_steps


@pytest.mark.parametrize("seed", range(25))
def test_drafts_and_what_the_gate_decided_are_counted(seed: int) -> None:
    events = random_load(seed)
    samples = counted(events)
    decided = [e.batch.drafts.reason for e in events if isinstance(e, StepScheduled) and e.batch.drafts is not None]
    for reason in DraftReason:
        assert value(samples, "spec_decode_decisions_total", reason=reason) == decided.count(reason), reason
    commits = [c for e in events if isinstance(e, StepCommitted) for c in e.commits if c.num_draft_tokens]
    assert value(samples, "spec_decode_num_drafts_total") == len(commits)
    assert value(samples, "spec_decode_num_draft_tokens_total") == sum(c.num_draft_tokens for c in commits)
    assert value(samples, "spec_decode_num_accepted_tokens_total") == sum(c.num_tokens - 1 for c in commits)


@pytest.mark.parametrize("seed", range(25))
def test_gauges_follow_the_decisions_and_end_at_zero(seed: int) -> None:
    metrics = AloneMetrics("some model")
    events = random_load(seed)
    num_blocks = 0
    for event in events:
        metrics.observe(event)
        if isinstance(event, EngineStarted):
            num_blocks = event.num_blocks
        if isinstance(event, KVBlockChecked):
            num_blocks -= sum(block_id is not None for block_id in event.quarantined)
        if isinstance(event, StepScheduled) and event.batch.step % 16 == 1:
            samples = scraped(metrics)
            assert value(samples, "num_requests_running") == event.batch.num_running
            assert value(samples, "num_requests_waiting") == event.batch.num_waiting
            by_reason = [n for (name, _), n in samples.items() if name == "twostroke:num_requests_waiting_by_reason"]
            assert sum(by_reason) == event.batch.num_waiting
            usage = 1 - event.batch.num_free_blocks / num_blocks
            if event.batch.num_running or event.batch.num_waiting:
                assert value(samples, "kv_cache_usage_perc") == pytest.approx(usage)
    samples = scraped(metrics)
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "gen_throughput"):
        assert value(samples, name) == 0, name
    ended = [n for (name, _), n in samples.items() if name == "twostroke:request_success_total"]
    assert sum(ended) == 25
    steps = [event for event in events if isinstance(event, StepScheduled) and not event.batch.is_empty]
    assert value(samples, "iteration_tokens_total_sum") == sum(event.batch.num_tokens for event in steps)
    assert value(samples, "engine_steps_total") == len(steps)


# ---------------------------------------------------------------------- by hand


class ByHand:
    """Events of one sequence after the other, as an engine would write them."""

    def __init__(self) -> None:
        self.metrics = AloneMetrics("m")
        self.steps = itertools.count()

    def arrive(self, sequence_id: str, at_s: float, num_prompt_tokens: int = 7, max_tokens: int = 50) -> None:
        arrival = Arrival(sequence_id, at_s, num_prompt_tokens, max_tokens)
        self.metrics.observe(RequestArrived(at_s, "p", sequence_id, arrival))

    def commit(self, at_s: float, reason: FinishReason | None = None, **num_tokens: int) -> None:
        step = next(self.steps)
        commits = tuple(Commit(name, number, finish_reason=reason) for name, number in num_tokens.items())
        self.metrics.observe(StepCommitted(at_s, "p", step, commits))

    def value(self, name: str, **labels: str) -> float:
        return value(scraped(self.metrics), name, **labels)


def test_a_step_of_three_tokens_counts_three_times_a_third_of_its_gap() -> None:
    run = ByHand()
    run.arrive("a", 1.0)
    run.commit(1.5, a=1)
    run.commit(2.1, a=3)
    assert run.value("inter_token_latency_seconds_count") == 3
    assert run.value("inter_token_latency_seconds_sum") == pytest.approx(0.6)
    assert run.value("inter_token_latency_seconds_bucket", le="0.2") == 0, "0.6 / 3 is a little above 0.2"
    assert run.value("inter_token_latency_seconds_bucket", le="0.3") == 3
    assert run.value("output_gap_seconds_count") == 1
    assert run.value("output_gap_seconds_bucket", le="0.5") == 0
    assert run.value("output_gap_seconds_bucket", le="0.75") == 1


def test_one_token_has_no_time_per_output_token() -> None:
    run = ByHand()
    run.arrive("a", 1.0)
    run.commit(1.5, FinishReason.LENGTH, a=1)
    assert run.value("request_time_per_output_token_seconds_count") == 0
    assert run.value("time_to_first_token_seconds_sum") == 0.5
    assert run.value("request_success_total", finished_reason="length") == 1


def test_tokens_behind_a_stop_string_are_generated_and_do_not_count() -> None:
    run = ByHand()
    run.arrive("a", 0.0)
    for at_s in (1.0, 2.0, 3.0, 4.0):
        run.commit(at_s, a=1)
    run.metrics.observe(RequestFinishedByCaller(4.5, "p", "a", FinishReason.STOP, 2))
    assert run.value("generation_tokens_total") == 4
    assert run.value("request_generation_tokens_sum") == 2
    assert run.value("e2e_request_latency_seconds_sum") == 2.0
    assert run.value("request_time_per_output_token_seconds_sum") == 1.0
    assert run.value("request_success_total", finished_reason="stop") == 1


def test_an_abort_ends_when_it_is_heard() -> None:
    run = ByHand()
    run.arrive("a", 0.0)
    run.arrive("b", 0.0)
    run.commit(1.0, a=1)
    for name in "ab":
        run.metrics.observe(RequestFinishedByCaller(1.5, "p", name, FinishReason.ABORT))
    assert run.value("e2e_request_latency_seconds_sum") == 1.5
    assert run.value("e2e_request_latency_seconds_count") == 1, "who never got a token has no latency"
    assert run.value("request_success_total", finished_reason="abort") == 2
    run.commit(2.0, a=1)
    assert run.value("generation_tokens_total") == 1, "the result of a step that was running comes too late"


def test_the_sequences_of_a_request_are_one_request() -> None:
    run = ByHand()
    for index in range(3):
        run.arrive(f"mine#4.{index}", 0.0)
    run.commit(1.0, **{"mine#4.0": 1, "mine#4.1": 1, "mine#4.2": 1})
    run.commit(2.0, FinishReason.LENGTH, **{"mine#4.0": 1, "mine#4.1": 1})
    assert run.value("request_params_n_count") == 0
    run.commit(3.0, FinishReason.LENGTH, **{"mine#4.2": 1})
    assert run.value("request_params_n_sum") == 3
    assert run.value("request_params_n_count") == 1
    assert run.value("request_max_num_generation_tokens_sum") == 2
    assert run.value("request_params_max_tokens_sum") == 50
    assert run.value("request_generation_tokens_count") == 3


def test_an_engine_that_starts_again_has_failed_those_who_ran() -> None:
    run = ByHand()
    run.arrive("a", 0.0)
    started = random_load(0)[0]
    run.metrics.observe(started)
    assert run.value("request_success_total", finished_reason="error") == 1
    assert run.value("num_requests_waiting") == 0
    assert run.value("engine_starts_total") == 1


def test_why_they_wait() -> None:
    run = ByHand()
    for name in "abc":
        run.arrive(name, 0.0)
    assert run.value("num_requests_waiting_by_reason", reason="step") == 3
    run.metrics.observe(StepScheduled(1.0, "p", ScheduledBatch(0, (), Limit.KV, num_waiting=3)))
    run.arrive("d", 1.0)
    assert run.value("num_requests_waiting_by_reason", reason="kv") == 3
    assert run.value("num_requests_waiting_by_reason", reason="step") == 1
    assert run.value("num_requests_waiting") == 4


def test_the_prefix_cache() -> None:
    log = EventRing(1000)
    engine = FakeEngine(
        make_layout(block_size=4),
        32,
        max_model_len=64,
        scheduler_config=SchedulerConfig(),
        cache_config=CacheConfig(block_size=4),
        log=log,
    )
    for name in ("first", "again"):
        engine.submit(name, list(range(10)), 1)
        engine.run()
    samples = counted(list(log))
    assert value(samples, "prefix_cache_queries_total") == 20
    assert value(samples, "prefix_cache_hits_total") == 8
    assert value(samples, "prompt_tokens_total") == 20
    assert value(samples, "prompt_tokens_cached_total") == 8
    assert value(samples, "cache_hit_rate") == pytest.approx(0.4)


def test_throughput_is_that_of_the_last_second() -> None:
    run = ByHand()
    run.arrive("a", 0.0)
    for number in range(11):
        run.commit(1.0 + number / 8, a=2)
    assert run.value("gen_throughput") == pytest.approx(16.0)


def test_checks_of_cached_blocks_and_what_comes_of_a_bad_one() -> None:
    engine = FakeEngine(
        make_layout(block_size=4),
        64,
        max_model_len=64,
        cache_config=CacheConfig(block_size=4, kv_check_rate=1.0),
        corruption_chance=1.0,
        check_time_s=0.25,
        log=EventRing(1000),
    )
    engine.submit("talker", list(range(10)), 8)
    engine.step()
    engine.submit("hit", list(range(10)), 2)
    engine.step()
    metrics = AloneMetrics("some model")
    assert isinstance(engine.log, EventRing)
    for event in engine.log:
        metrics.observe(event)
        if isinstance(event, KVBlockChecked):
            samples = scraped(metrics)
            running, waiting = (value(samples, f"num_requests_{name}") for name in ("running", "waiting"))
            assert (running, waiting) == (0, 1), "who had answered has ended, who had not is in the queue again"
            break
    assert value(samples, "kv_quarantined_blocks") == 1
    assert value(samples, "kv_check_seconds_total") == 0.25
    assert value(samples, "kv_checks_total", verdict="corruption") == 1
    assert value(samples, "kv_checks_total", verdict="exact") == 0
    assert value(samples, "request_success_total", finished_reason="error") == 1
    tiny = KVBlockChecked(9.0, "fake", 8.0, "x", 0, Verdict.NUMERICS, 3, 1, 0.125)
    metrics.observe(tiny)
    metrics.observe(replace(tiny, largest_difference=0.0625))
    assert value(scraped(metrics), "kv_largest_numeric_difference") == 0.125


def test_moves_to_host_memory_and_back_are_counted() -> None:
    moves = KVMoves(stores=(KVStore(0, 0), KVStore(1, 1)), prefetches=(KVLoad(1, 2, 0, b"name"),))
    metrics = AloneMetrics("some model")
    names = ("stored", "loaded", "prefetched")
    assert [value(scraped(metrics), "kv_offloaded_blocks_total", move=name) for name in names] == [0, 0, 0]
    metrics.observe(StepScheduled(1.0, "fake", ScheduledBatch(0, (), Limit.NONE, kv_moves=moves)))
    assert [value(scraped(metrics), "kv_offloaded_blocks_total", move=name) for name in names] == [2, 0, 1]


@pytest.mark.parametrize("limits", [{"ttft_slo": 0.05}, {"itl_slo": "10ms"}, {"ttft_slo": 0.05, "itl_slo": 0.01}, {}])
def test_who_kept_the_limits_is_counted_by_limit(limits: dict[str, str | float]) -> None:
    mixed = {"enable_chunked_prefill": True, "mixing": "mixed"}
    first, *events = random_load(3)
    assert isinstance(first, EngineStarted)
    samples = counted([replace(first, scheduler=first.scheduler | mixed | limits), *events])
    served = [times for times in times_of([first, *events]).values() if times.token_times_s]
    keeps = {
        "ttft": [times.ttft_s <= 0.05 for times in served],
        "itl": [sum(gap > 0.01 for gap in times.itl_s) <= 0.01 * len(times.itl_s) for times in served],
    }
    keeps = {name: kept for name, kept in keeps.items() if f"{name}_slo" in limits}
    if limits:
        keeps["all"] = [all(kept) for kept in zip(*keeps.values(), strict=True)]
    told = {labels for name, labels in samples if name == "twostroke:slo_requests_total"}
    assert len(told) == 2 * len(keeps)
    for limit, kept in keeps.items():
        assert value(samples, "slo_requests_total", limit=limit, kept="true") == sum(kept)
        assert value(samples, "slo_requests_total", limit=limit, kept="false") == len(kept) - sum(kept)

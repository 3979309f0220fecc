"""Runs of the real scheduler whose event logs are explained and counted, and what such a run really took."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import replace

from factories import make_layout
from fakes import FakeEngine
from twostroke.config.cache import CacheConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.events import (
    Event,
    EventRing,
    KVBlockChecked,
    RequestArrived,
    RequestFinishedByCaller,
    StepCommitted,
    StepScheduled,
)
from twostroke.kv_cache.layout import KVLayout
from twostroke.outputs import RequestTimes

NUM_REQUESTS = 25


def random_load(seed: int) -> list[Event]:
    """Run random settings, arrivals, priorities, aborts and step times, until all requests have ended."""
    return list(_run(seed))


@functools.cache
def _run(seed: int) -> tuple[Event, ...]:
    rng = random.Random(seed)
    layout = make_layout(rng.choice([[None], [None], [None, 6, 6]]), rng.choice([1, 2, 4]))
    is_chunked = rng.random() < 0.8
    settings = SchedulerConfig(
        max_num_batched_tokens=rng.choice([1, 4, 8, 20]),
        max_num_seqs=rng.choice([1, 3, 8]),
        policy=rng.choice(["fcfs", "priority"]),
        ageing_s=100.0,
        enable_chunked_prefill=is_chunked,
        batching=rng.choice(["continuous", "continuous", "static"]),
        mixing=rng.choice(["mixed", "mixed", "prefill_first"]),
    )
    longest = 40
    least = layout.peak_blocks(longest, min(longest, settings.max_num_batched_tokens) if is_chunked else longest)
    engine = FakeEngine(
        layout,
        least + rng.randint(0, 3),
        max_model_len=longest,
        scheduler_config=settings,
        cache_config=_cache_config(layout, rng),
        latency=rng.choice([0, 0, 1, 2]),
        max_drafts=rng.choice([0, 3, "auto"]),
        stop_chance=rng.choice([0.0, 0.1]),
        corruption_chance=rng.choice([0.0, 0.3]),
        check_time_s=rng.choice([0.0, 0.2]),
        seed=seed,
        log=EventRing(1_000_000),
    )
    for number in range(NUM_REQUESTS):
        num_prompt_tokens = rng.randint(1, rng.choice([3, longest - 1]))
        max_tokens = rng.randint(1, longest - num_prompt_tokens)
        prompt = [rng.randint(0, 1)] * num_prompt_tokens
        engine.now_s += rng.random()
        arrival_time_s = engine.now_s - rng.choice([0.0, rng.random() / 8])
        engine.submit(f"r{number}#0.0", prompt, max_tokens, priority=rng.randint(0, 2), arrival_time_s=arrival_time_s)
        for _ in range(rng.choice([0, 0, 1, 3])):
            step(engine, rng)
        if engine.live and rng.random() < 0.15:
            engine.now_s += rng.random() / 16
            engine.abort(rng.choice(sorted(engine.live)))
    while engine.scheduler.has_work:
        step(engine, rng)
    engine.run(max_steps=5)
    assert isinstance(engine.log, EventRing)
    return tuple(engine.log)


def _cache_config(layout: KVLayout, rng: random.Random) -> CacheConfig:
    caches = rng.random() < 0.7
    rate = rng.choice([0.0, 0.5, 1.0]) if caches else 0.0
    num_slots = rng.choice([0, 0, 2, 100]) if caches else 0
    return CacheConfig(
        block_size=layout.block_size,
        enable_prefix_caching=caches,
        kv_check_rate=rate,
        kv_offloading_size=num_slots * layout.bytes_per_block or None,
    )


def step(engine: FakeEngine, rng: random.Random) -> None:
    """Run a step of unpredictable start and duration."""
    engine.now_s += rng.random() / 8
    engine.step()
    engine.now_s += rng.random()


def times_of(events: Sequence[Event]) -> dict[str, RequestTimes]:
    """Return the times of each request's events, read from the log in the simplest way; ids are used once."""
    times: dict[str, RequestTimes] = {}
    ended: set[str] = set()
    for event in events:
        match event:
            case RequestArrived():
                times[event.request_id] = RequestTimes(event.arrival.arrival_time_s)
            case StepScheduled():
                for share in event.batch.requests:
                    mine = times[share.request_id]
                    mine.scheduled_s = event.time_s if mine.scheduled_s is None else mine.scheduled_s
                for request_id in event.batch.preempted_request_ids:
                    times[request_id].num_preemptions += 1
            case StepCommitted():
                for commit in event.commits:
                    num_tokens = 0 if commit.request_id in ended else commit.num_tokens  # a result behind the end
                    times[commit.request_id].token_times_s.extend([event.time_s] * num_tokens)
                ended |= {commit.request_id for commit in event.commits if commit.finish_reason is not None}
            case KVBlockChecked():
                ended.update(event.suspects.ended)
                times.update({i: replace(times[i], scheduled_s=None) for i in event.suspects.started_over})
                times.update({i: replace(times[i], finish_s=event.time_s) for i in event.suspects.ended})
            case RequestFinishedByCaller():
                ended.add(event.request_id)
                times[event.request_id].finish_s = event.time_s
            case _:
                pass
    return times

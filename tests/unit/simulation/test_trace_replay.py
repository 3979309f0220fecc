"""Hits and evictions of a simulated trace, request by request, against a cache that can be read at a glance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from factories import make_layout
from oracle.naive_trace_cache import NaiveTraceCache
from tiers import examples
from traces import conversations, long_documents
from twostroke.batch import NOT_TIMED, BlockTableUpdate, Commit, ScheduledBatch, StepDurations
from twostroke.config.cache import CacheConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.cost.step_cost import Layers
from twostroke.cost.step_model import Curve, StepTimeModel
from twostroke.kv_cache.manager import KVCacheManager
from twostroke.scheduler.scheduler import Scheduler
from twostroke.served_run import Run
from twostroke.simulation.simulate import Simulation
from twostroke.simulation.trace import TRACE_BLOCK, TraceEntry, trace_requests

STEP = StepTimeModel(layers=Curve((1, 512), (0.01, 0.1)), head=Curve((1,), (0.0,)), pair_s=1e-6, seen_s=1e-6)


class WatchedManager(KVCacheManager):
    """Notes for whom blocks were evicted."""

    def __init__(self, num_blocks: int, block_size: int, max_model_len: int) -> None:
        super().__init__(
            make_layout(block_size=block_size), num_blocks, CacheConfig(block_size=block_size), max_model_len
        )
        self.evictions: Counter[str] = Counter()

    def try_allocate(self, request_id: str, start: int, end: int) -> tuple[BlockTableUpdate, ...] | None:
        before = self.num_evicted_blocks
        updates = super().try_allocate(request_id, start, end)
        self.evictions[request_id] += self.num_evicted_blocks - before
        return updates


class WatchedScheduler(Scheduler):
    """Tells the naive cache of every decision and every result."""

    naive: NaiveTraceCache
    hits: list[tuple[str, int]]
    batch: ScheduledBatch

    def schedule(self, now_s: float) -> ScheduledBatch:
        self.batch = super().schedule(now_s)
        self.hits += [(one.request_id, one.num_cached_tokens) for one in self.batch.admitted]
        self.naive.decided(self.batch)
        return self.batch

    def update(self, step: int, commits: Sequence[Commit], seconds: StepDurations = NOT_TIMED) -> None:
        super().update(step, commits, seconds)
        self.naive.committed(self.batch, commits)


def compare(
    entries: Sequence[TraceEntry],
    *,
    divisor: int = 64,
    block_size: int = 8,
    num_blocks: int = 120,
    max_num_seqs: int = 8,
    budget: int = 64,
) -> tuple[Run, WatchedScheduler, int]:
    """Run a trace on both caches, and check that they agree; return how many blocks were evicted."""
    longest = num_blocks * block_size
    requests, _ = trace_requests(entries, block_size=block_size, divisor=divisor, longest=longest)
    kv = WatchedManager(num_blocks, block_size, longest)
    config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
    scheduler = WatchedScheduler(config, kv, max_model_len=longest)
    scheduler.naive = NaiveTraceCache(entries, num_blocks, block_size, divisor)
    scheduler.hits = []
    run = Simulation(scheduler, Layers([None]), STEP, block_size=block_size).run(requests)
    assert scheduler.hits == scheduler.naive.hits
    assert +kv.evictions == scheduler.naive.evictions
    firsts = dict(reversed(scheduler.hits))
    assert {one.request_id: one.num_cached_tokens for one in run.requests} == firsts
    assert len(run.requests) == len(requests)
    return run, scheduler, kv.num_evicted_blocks


@pytest.mark.parametrize("make", [conversations, long_documents])
def test_a_trace_hits_and_evicts_what_a_naive_cache_does(
    make: Callable[[int, int], list[TraceEntry]],
) -> None:
    run, scheduler, num_evicted = compare(make(400, 1))
    assert sum(num_tokens for _, num_tokens in scheduler.hits) > 1000, "nothing was found: this compares nothing"
    assert num_evicted > 1000
    assert len(run.requests) > 300


def test_preempted_requests_find_what_is_left_of_their_own() -> None:
    shorts = [TraceEntry(0.5 * i, 600, 900 + 37 * (i % 20), (0, i + 1)) for i in range(100)]
    run, scheduler, _ = compare(shorts, num_blocks=30, divisor=16, block_size=4, max_num_seqs=16)
    assert sum(one.times.num_preemptions for one in run.requests) > 10
    assert len(scheduler.hits) > len(run.requests)


prompts = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 6), st.integers(0, TRACE_BLOCK - 1), st.integers(0, 900)),
    min_size=1,
    max_size=25,
)


@settings(deadline=None, max_examples=examples(150))
@given(
    prompts=prompts,
    gaps_s=st.lists(st.sampled_from([0.0, 0.05, 1.0]), min_size=25, max_size=25),
    sizes=st.sampled_from([(64, 8), (64, 2), (32, 4), (128, 4)]),
    num_blocks=st.integers(8, 60),
    max_num_seqs=st.integers(1, 6),
    budget=st.sampled_from([4, 16, 64]),
)
def test_any_trace(
    prompts: list[tuple[int, int, int, int]],
    gaps_s: list[float],
    sizes: tuple[int, int],
    num_blocks: int,
    max_num_seqs: int,
    budget: int,
) -> None:
    entries: list[TraceEntry] = []
    now_s = 0.0
    for (family, length, less, outputs), gap_s in zip(prompts, gaps_s, strict=False):
        now_s += gap_s
        hash_ids = tuple(10 * family + i for i in range(length))
        entries.append(TraceEntry(now_s, length * TRACE_BLOCK - less, outputs, hash_ids))
    divisor, block_size = sizes
    compare(
        entries,
        divisor=divisor,
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        budget=budget,
    )

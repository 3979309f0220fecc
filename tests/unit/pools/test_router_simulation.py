"""A prefill pool in simulated time, under a workload in which few prefixes make most of the requests.

The members are simple models of workers: a queue, a rate, a prefix cache whose evictions are not reported, and reports
ten times a second. The router sees only the reports.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from pool_cases import BLOCK_SIZE, chain, decode_member, prefill_member, request, router_of
from twostroke.pools.route import RouteRequest

NUM_MEMBERS = 8
NUM_GROUPS = 60
RATE = 4000.0
REPORT_S = 0.1
CACHED_BLOCKS = 800
"""Of a member: ten prefixes and what comes with them, of the sixty."""


@dataclass(frozen=True)
class Asked:
    time_s: float
    group: int
    request: RouteRequest


@dataclass
class Worker:
    free_s: float = 0.0
    """When its queue is empty."""
    cached: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    def compute(self, asked: Asked) -> float:
        """Return the seconds until the first token. Prompts are computed one after the other."""
        hashes = asked.request.block_hashes
        depth = next((i for i, block_hash in enumerate(hashes) if block_hash not in self.cached), len(hashes))
        for block_hash in reversed(hashes):
            self.cached[block_hash] = None
            self.cached.move_to_end(block_hash)
        while len(self.cached) > CACHED_BLOCKS:
            self.cached.popitem(last=False)
        num_tokens = max(1, asked.request.num_prompt_tokens - depth * BLOCK_SIZE)
        self.free_s = max(self.free_s, asked.time_s) + num_tokens / RATE
        return self.free_s - asked.time_s

    def num_queued_tokens(self, now_s: float) -> int:
        return math.ceil(max(0.0, self.free_s - now_s) * RATE)


Choose = Callable[[Asked], int]
Report = Callable[[float, list[Worker]], None]


def skewed_workload(seed: int, requests_per_s: float, num_requests: int = 2000) -> list[Asked]:
    """Zipf over groups with a prefix each, a suffix for each request, at random times."""
    rng = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(NUM_GROUPS)]
    now_s, all_asked = 0.0, list[Asked]()
    for number in range(num_requests):
        now_s += rng.expovariate(requests_per_s)
        (group,) = rng.choices(range(NUM_GROUPS), weights)
        hashes = chain(f"own {number}", rng.randint(2, 24), chain(f"group {group}", 60))
        all_asked.append(Asked(now_s, group, request(len(hashes) * BLOCK_SIZE + 1, hashes, 50)))
    return all_asked


def p99_ttft_s(workload: list[Asked], choose: Choose, report: Report) -> float:
    workers = [Worker() for _ in range(NUM_MEMBERS)]
    reported_s, ttfts = 0.0, list[float]()
    for asked in workload:
        while reported_s + REPORT_S <= asked.time_s:
            reported_s += REPORT_S
            report(reported_s, workers)
        ttfts.append(workers[choose(asked)].compute(asked))
    return sorted(ttfts)[int(0.99 * len(ttfts))]


def by_turns() -> Choose:
    turn = iter(range(10**9))
    return lambda _: next(turn) % NUM_MEMBERS


def by_prefix_alone() -> Choose:
    return lambda asked: asked.group % NUM_MEMBERS


def by_router(*, sees_prefixes: bool) -> tuple[Choose, Report]:
    """Compare routers. The decode member is too busy and slow to prefill, so they choose among the others."""
    decode = decode_member(0, num_running=500, max_num_seqs=100_000, prefill_tokens_per_s=100.0)
    idle = {"prefill_tokens_per_s": RATE, "num_blocks": CACHED_BLOCKS, "num_free_blocks": CACHED_BLOCKS}
    router = router_of(decode, *(prefill_member(i, **idle) for i in range(NUM_MEMBERS)))

    def choose(asked: Asked) -> int:
        seen = asked.request if sees_prefixes else request(asked.request.num_prompt_tokens, (), 50)
        route = router.route(seen)
        router.placed(seen, route)
        assert route.prefill_id is not None
        return int(route.prefill_id[1:])

    def report(now_s: float, workers: list[Worker]) -> None:
        router.put(decode)
        for number, worker in enumerate(workers):
            router.put(prefill_member(number, **idle, num_queued_prompt_tokens=worker.num_queued_tokens(now_s)))

    return choose, report


def nothing(now_s: float, workers: list[Worker]) -> None:
    del now_s, workers


@pytest.mark.parametrize("requests_per_s", [25.0, 42.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_prefixes_and_load_together_beat_either_alone(seed: int, requests_per_s: float) -> None:
    workload = skewed_workload(seed, requests_per_s)
    both = p99_ttft_s(workload, *by_router(sees_prefixes=True))
    load_alone = p99_ttft_s(workload, *by_router(sees_prefixes=False))
    turns = p99_ttft_s(workload, by_turns(), nothing)
    prefix_alone = p99_ttft_s(workload, by_prefix_alone(), nothing)
    assert both < load_alone < turns
    assert both < prefix_alone

"""Placement search (DistServe, OSDI 2024): workers, ranks and token budget with the most goodput per device.

Goodput counts requests within two latency limits. Pure: no clock, no tensor, no I/O.

    candidates ──► each rate, slowest first ──► simulate ──► PlacementOutcome ──► goodput per device ──► Ranking
                     until a limit is missed

goodput    requests a second that keep both limits, at the fastest rate up to which the limits are kept
devices    GPUs or CPU cores of the candidate: traffic beyond its goodput needs several copies of it

The limits are kept at a rate if the share `attainment` of all requests keeps both. A candidate is skipped without a
simulation if an upper bound shows that it cannot reach the requested places. The places are therefore those of an
exhaustive search (tests/unit/planner/test_placement.py).

The bound is the workers' time divided by the least possible work of requests:

    requests a second  <=  workers x m / (least seconds of the m smallest requests)     m: how many must keep the limits

The least work of a request is its tokens at the best rate of any step (layers(n) / n), and the reads of its decodes.
Prompt tokens that another request may have left in the prefix cache count as no work.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import takewhile
from typing import NamedTuple

from twostroke.batch import Limit
from twostroke.cost.step_model import Curve, StepTimeModel
from twostroke.events import EngineStarted
from twostroke.scheduler.replay import layers_of
from twostroke.served_run import Run
from twostroke.simulation.requests import SimulatedRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One placement of a model.

    >>> str(Candidate(prefill=1, decode=2, threads=None, ranks=2, max_num_batched_tokens=512, num_devices=6))
    '1 prefill : 2 decode, 2 ranks, budget 512'
    """

    prefill: int = 0
    """Prefill workers; 0 with decode 0: one process does both."""
    decode: int = 0
    threads: int | None = None
    """Threads of each rank; None on a GPU."""
    ranks: int = 1
    """Tensor-parallel ranks of each worker."""
    max_num_batched_tokens: int
    num_devices: int
    """Number of devices of all workers."""

    @property
    def is_split(self) -> bool:
        """Whether prefill and decode have workers of their own."""
        return self.prefill > 0

    @property
    def num_workers(self) -> int:
        """Number of processes; each has all of its ranks."""
        return max(1, self.prefill + self.decode)

    def __str__(self) -> str:
        """Name for tables and messages."""
        words = [f"{self.prefill} prefill : {self.decode} decode" if self.is_split else "one process"]
        if self.threads is not None:
            words.append(f"{self.threads} thread{'s' * (self.threads > 1)}")
        if self.ranks > 1:
            words.append(f"{self.ranks} ranks")
        return ", ".join([*words, f"budget {self.max_num_batched_tokens}"])


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyLimits:
    """The limits of a request, and the share of requests that must keep them."""

    ttft_target_s: float
    tpot_target_s: float
    attainment: float = 0.99
    """Share of all requests that must keep both."""


class LatencyOutcome(NamedTuple):
    """One latency of a run, and its limit."""

    option: str
    """The limit, as the option spells it."""
    limit_s: float
    num_within: int
    """Number of requests that keep it; a request without this latency keeps it."""
    p50_s: float
    """Median; 0 where no request has this latency."""
    p99_s: float

    @property
    def name(self) -> str:
        """TTFT or TPOT."""
        return self.option.split("_")[0].upper()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementOutcome:
    """A candidate's run at one rate."""

    rate_factor: float
    """Requests arrive this many times as fast as in the workload."""
    num_requests: int
    num_within: int
    """Number of requests that keep both limits."""
    ttft: LatencyOutcome
    tpot: LatencyOutcome
    duration_s: float
    """Seconds from the first arrival to the last token."""
    num_output_tokens: int
    scheduler_limit: Limit
    """Limit that bound most steps."""

    @property
    def share(self) -> float:
        """Share of the requests that keep both limits."""
        return self.num_within / self.num_requests

    @property
    def goodput(self) -> float:
        """Requests a second that keep both limits."""
        return self.num_within / self.duration_s

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens per second of all requests."""
        return self.num_output_tokens / self.duration_s

    def keeps(self, limits: LatencyLimits) -> bool:
        """Return whether enough requests keep both limits."""
        return self.num_within >= num_that_must_keep(self.num_requests, limits)

    @property
    def worse(self) -> LatencyOutcome:
        """Latency whose limit more requests miss."""
        return min(self.ttft, self.tpot, key=lambda one: one.num_within)


Simulate = Callable[[Candidate, float], PlacementOutcome]
"""Runs the workload with one candidate at one rate factor; the same arguments give the same outcome."""
Bound = Callable[[Candidate], float]
"""Bounds a candidate's goodput over all rates from above, in requests a second, without a simulation."""


class Space(NamedTuple):
    """The candidates and the rates to try, slowest rate first."""

    candidates: tuple[Candidate, ...]
    rate_factors: tuple[float, ...]

    @property
    def most_simulations(self) -> int:
        """Upper bound of the number of simulations."""
        return len(self.candidates) * len(self.rate_factors)


@dataclass(frozen=True, slots=True)
class CandidateResult:
    """The results of a candidate."""

    candidate: Candidate
    best: PlacementOutcome | None
    """Outcome at the fastest rate up to which the limits are kept; None: they are missed at the slowest rate."""
    missed: PlacementOutcome | None
    """Outcome at the first rate that misses the limits; None: they are kept at every rate."""

    @property
    def goodput(self) -> float:
        """Requests a second within both limits; 0 where the limits are missed at the slowest rate."""
        return 0.0 if self.best is None else self.best.goodput

    @property
    def goodput_per_device(self) -> float:
        """Goodput for each GPU or core."""
        return self.goodput / self.candidate.num_devices


@dataclass(frozen=True, slots=True)
class Ranking:
    """The best candidates, best first; empty where none keeps the limits."""

    places: tuple[CandidateResult, ...]
    unsplit: CandidateResult | None
    """The best candidate with one process, ranked or not; None: no such candidate keeps the limits."""
    nearest: CandidateResult | None
    """The candidate with the most requests within the limits at the slowest rate, if none keeps them."""
    num_simulations: int
    num_skipped: int
    """Number of candidates that the bound ruled out."""


def num_that_must_keep(num_requests: int, limits: LatencyLimits) -> int:
    """Return how many requests the attainment requires; exact for shares of few digits.

    >>> num_that_must_keep(100, LatencyLimits(ttft_target_s=1, tpot_target_s=1, attainment=0.99))
    99
    """
    return math.ceil(Fraction(str(limits.attainment)) * num_requests)


def search(
    space: Space, limits: LatencyLimits, simulate: Simulate, *, bound: Bound | None = None, num_places: int = 5
) -> Ranking:
    """Rank the candidates by goodput per device; equal candidates keep the order of the space.

    Args:
        space: candidates and rates to try.
        limits: limits that requests must keep.
        simulate: runs one candidate at one rate.
        bound: upper bound of a candidate's goodput; None: every candidate is simulated.
        num_places: number of best candidates to return.
    """
    places: list[CandidateResult] = []
    misses: list[CandidateResult] = []
    unsplit: CandidateResult | None = None
    num_simulations = num_skipped = 0
    # one process first: the splits are always compared with it, and the sort below is stable
    order = [c for c in space.candidates if not c.is_split] + [c for c in space.candidates if c.is_split]
    for candidate in order:
        least = places[-1].goodput_per_device if len(places) >= num_places else 0.0
        if bound is not None and bound(candidate) / candidate.num_devices < least:
            num_skipped += 1
            continue
        found, num_run = _simulate_rates(candidate, space.rate_factors, limits, simulate)
        num_simulations += num_run
        if found.best is None:
            misses.append(found)
            continue
        if not candidate.is_split and (unsplit is None or found.goodput_per_device > unsplit.goodput_per_device):
            unsplit = found
        places = sorted([*places, found], key=lambda one: -one.goodput_per_device)[:num_places]
    nearest = None
    if not places:
        nearest = max(misses, key=lambda one: _nearness(one.missed), default=None)
    return Ranking(tuple(places), unsplit, nearest, num_simulations, num_skipped)


def _simulate_rates(
    candidate: Candidate, rates: Sequence[float], limits: LatencyLimits, simulate: Simulate
) -> tuple[CandidateResult, int]:
    """Return the results of a candidate, and the number of simulations."""
    best: PlacementOutcome | None = None
    for num_run, rate in enumerate(rates, 1):
        outcome = simulate(candidate, rate)
        if not outcome.keeps(limits):
            return CandidateResult(candidate, best, outcome), num_run
        if best is None or outcome.goodput > best.goodput:
            best = outcome
    return CandidateResult(candidate, best, None), len(rates)


def _nearness(outcome: PlacementOutcome | None) -> tuple[int, float]:
    """Return a sort key: how many requests keep both limits, then how closely the worse of the two limits is missed."""
    assert outcome is not None, "a candidate without a place has missed a limit"
    return outcome.num_within, -max(one.p99_s / one.limit_s for one in (outcome.ttft, outcome.tpot))


def outcome_of(run: Run, limits: LatencyLimits, *, rate_factor: float, num_requests: int) -> PlacementOutcome:
    """Count the requests that keep the limits.

    Args:
        run: of the requests with a token; requests without one keep no limit.
        limits: limits that requests must keep.
        rate_factor: multiple of the workload's arrival rate.
        num_requests: requests of the workload.
    """
    ttft = [request.times.ttft_s for request in run.requests]
    tpot = [request.times.tpot_s for request in run.requests]
    in_ttft = [seconds <= limits.ttft_target_s for seconds in ttft]
    in_tpot = [seconds is None or seconds <= limits.tpot_target_s for seconds in tpot]
    limited = Counter(step.limited_by for step in run.steps if step.limited_by is not Limit.NONE)
    return PlacementOutcome(
        rate_factor=rate_factor,
        num_requests=num_requests,
        num_within=sum(map(all, zip(in_ttft, in_tpot, strict=True))),
        ttft=_beside("ttft_target_s", limits.ttft_target_s, sum(in_ttft), ttft),
        tpot=_beside("tpot_target_s", limits.tpot_target_s, sum(in_tpot), tpot),
        duration_s=run.duration_s,
        num_output_tokens=run.num_output_tokens,
        scheduler_limit=limited.most_common(1)[0][0] if limited else Limit.NONE,
    )


def _beside(option: str, limit_s: float, num_within: int, seconds: Sequence[float | None]) -> LatencyOutcome:
    known = sorted(one for one in seconds if one is not None)
    return LatencyOutcome(option, limit_s, num_within, _quantile(known, 0.5), _quantile(known, 0.99))


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed; 0 if there are no values.

    >>> _quantile([1.0, 2.0, 3.0, 4.0], 0.5), _quantile([1.0, 2.0], 0.99), _quantile([], 0.5)
    (2.0, 2.0, 0.0)
    """
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def candidates_of(
    *,
    workers: Sequence[tuple[int | None, int]],
    budgets: Sequence[int],
    max_workers: int,
    max_devices: int,
) -> tuple[Candidate, ...]:
    """Return one process and every split of up to `max_workers`, each with every budget, within the number of devices.

    A split whose two sizes have a common divisor is left out: it equals several copies of a smaller one.

    Args:
        workers: threads (None on a GPU) and ranks of each kind of worker.
        budgets: token budgets of a step.
        max_workers: most workers of a split.
        max_devices: most GPUs or cores of a candidate.
    """
    splits = [
        (prefill, total - prefill)
        for total in range(2, max_workers + 1)
        for prefill in range(1, total)
        if math.gcd(prefill, total - prefill) == 1
    ]
    found: list[Candidate] = []
    for prefill, decode in [(0, 0), *splits]:
        for threads, ranks in workers:
            num_devices = max(1, prefill + decode) * ranks * (threads or 1)
            if num_devices <= max_devices:
                found += [
                    Candidate(
                        prefill=prefill,
                        decode=decode,
                        threads=threads,
                        ranks=ranks,
                        max_num_batched_tokens=budget,
                        num_devices=num_devices,
                    )
                    for budget in budgets
                ]
    return tuple(found)


def goodput_bound(
    requests: Sequence[SimulatedRequest],
    started: EngineStarted,
    step_times: StepTimeModel,
    limits: LatencyLimits,
    *,
    num_workers: int,
) -> float:
    """Return requests a second within the limits that workers cannot pass.

    Args:
        requests: requests of the workload.
        started: start-up event of each worker.
        step_times: step times of each worker.
        limits: limits that requests must keep.
        num_workers: number of workers that compute at once.
    """
    block_size: int = started.layout["block_size"]
    longest_prompt = max(request.arrival.num_prompt_tokens for request in requests)
    most = max(started.scheduler["max_num_batched_tokens"], longest_prompt)
    token_s = least_seconds_per_token(step_times.layers, most)
    seen = Counter(name for request in requests for name in set(request.arrival.block_hashes))
    seen.update(name for request in requests for name in request.output_hashes)
    layers = layers_of(started)

    def least_s(request: SimulatedRequest) -> float:
        arrival = request.arrival
        num_shared = len(list(takewhile(lambda name: seen[name] > 1, arrival.block_hashes)))
        num_prompt = max(1, arrival.num_prompt_tokens - num_shared * block_size)
        num_decodes = max(0, request.num_outputs - 1)
        reads = layers.work([(arrival.num_prompt_tokens, 1, 1)]).num_seen * num_decodes
        return (num_prompt + num_decodes) * token_s + reads * step_times.seen_s

    least = sorted(map(least_s, requests))
    num_must = num_that_must_keep(len(least), limits)
    total_s = sum(least[:num_must])
    return num_workers * num_must / total_s if total_s > 0 else float("inf")


def least_seconds_per_token(curve: Curve, most: int) -> float:
    """Return the least of seconds(n) / n for n from 1 to `most`.

    Between two points of a curve seconds(n) / n rises or falls throughout, so the least is at a point or at the end.

    >>> least_seconds_per_token(Curve((1, 100), (1.0, 2.0)), 50) == Curve((1, 100), (1.0, 2.0)).at(50) / 50
    True
    """
    counts = {1, most, *(count for count in curve.counts if count <= most)}
    return min(curve.at(count) / count for count in counts)

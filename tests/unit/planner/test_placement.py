"""The placement search compared with an exhaustive one, and properties of every ranking."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from factories import uniform_layout
from tiers import examples
from twostroke.config.cache import CacheConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.cost.step_model import Curve, StepTimeModel
from twostroke.event_codec import plain
from twostroke.events import EngineStarted
from twostroke.outputs import RequestTimes
from twostroke.planner.placement import (
    Candidate,
    LatencyLimits,
    PlacementOutcome,
    Ranking,
    Space,
    candidates_of,
    goodput_bound,
    least_seconds_per_token,
    outcome_of,
    search,
)
from twostroke.request import Arrival
from twostroke.served_run import Run, ServedRequest
from twostroke.simulation.requests import SimulatedRequest
from twostroke.simulation.simulate import simulate as run_simulated

LIMITS = LatencyLimits(ttft_target_s=1.0, tpot_target_s=0.1, attainment=0.75)
RATES = (0.5, 1.0, 2.0)


def started(budget: int) -> EngineStarted:
    """Return an engine of two layers with room for all requests."""
    layout = uniform_layout((None, None), block_size=16, num_kv_heads=1, head_dim=2, kv_format="f32")
    scheduler = SchedulerConfig(max_num_batched_tokens=budget)
    cache = CacheConfig(block_size=16, num_kv_blocks=256)
    return EngineStarted(0.0, "simulated", plain(scheduler), plain(cache), plain(layout), 256, 128, "none")


def served(ttft_s: float, tpot_s: float | None) -> ServedRequest:
    """Return a request with these latencies; None: it has one token."""
    later = [] if tpot_s is None else [ttft_s + tpot_s]
    return ServedRequest("request", RequestTimes(0.0, token_times_s=[ttft_s, *later]))


Table = dict[tuple[Candidate, float], PlacementOutcome]


@st.composite
def spaces(draw: st.DrawFn) -> tuple[Space, dict[tuple[Candidate, float], list[ServedRequest]]]:
    """Draw a few candidates, and for each the latencies of four requests at each rate."""
    budgets = draw(st.lists(st.sampled_from([64, 128, 256]), min_size=1, max_size=2, unique=True))
    kinds = draw(st.lists(st.sampled_from([(None, 1), (None, 2)]), min_size=1, max_size=2, unique=True))
    candidates = candidates_of(workers=kinds, budgets=budgets, max_workers=3, max_devices=6)
    requests = st.builds(served, st.floats(0.01, 2), st.none() | st.floats(0.01, 0.2))
    runs = {
        (candidate, rate): draw(st.lists(requests, min_size=4, max_size=4))
        for candidate in candidates
        for rate in RATES
    }
    return Space(candidates, RATES), runs


def table_of(runs: dict[tuple[Candidate, float], list[ServedRequest]], limits: LatencyLimits) -> Table:
    """Return runs of four requests; the faster they arrive, the sooner the run ends."""
    return {
        (candidate, rate): outcome_of(Run(tuple(requests), (), 4 / rate), limits, rate_factor=rate, num_requests=4)
        for (candidate, rate), requests in runs.items()
    }


def found(
    space: Space, table: Table, limits: LatencyLimits, *, num_places: int = 2, slack: float | None = None
) -> Ranking:
    """Return the search's result, with a bound `slack` above the best outcome of a candidate; None: without a bound."""

    def bound(candidate: Candidate) -> float:
        return max(table[candidate, rate].goodput for rate in RATES) + (slack or 0.0)

    return search(
        space,
        limits,
        lambda candidate, rate: table[candidate, rate],
        bound=None if slack is None else bound,
        num_places=num_places,
    )


def exhaustive(space: Space, table: Table, limits: LatencyLimits) -> list[tuple[Candidate, float]]:
    """Return every candidate with its goodput per device, best first, by the definition."""
    kept: list[tuple[Candidate, float]] = []
    for candidate in space.candidates:
        goodputs: list[float] = []
        for rate in space.rate_factors:
            if not table[candidate, rate].keeps(limits):
                break
            goodputs.append(table[candidate, rate].goodput)
        if goodputs:
            kept.append((candidate, max(goodputs) / candidate.num_devices))
    return sorted(kept, key=lambda one: (-one[1], one[0].is_split))


@settings(max_examples=examples(100), deadline=None)
@given(spaces(), st.integers(1, 4), st.sampled_from([None, 0.0, 0.3]))
def test_the_pruned_search_finds_what_the_exhaustive_one_finds(
    case: tuple[Space, dict[tuple[Candidate, float], list[ServedRequest]]], num_places: int, slack: float | None
) -> None:
    space, runs = case
    table = table_of(runs, LIMITS)
    expected = exhaustive(space, table, LIMITS)
    ranking = found(space, table, LIMITS, num_places=num_places, slack=slack)
    assert [(one.candidate, one.goodput_per_device) for one in ranking.places] == expected[:num_places]
    unsplit = next((one for one in expected if not one[0].is_split), None)
    told = ranking.unsplit and (ranking.unsplit.candidate, ranking.unsplit.goodput_per_device)
    assert told == unsplit
    assert (ranking.nearest is None) == bool(expected)
    assert ranking.num_simulations <= space.most_simulations


@settings(max_examples=examples(60), deadline=None)
@given(spaces(), st.floats(1, 3), st.floats(1, 3), st.floats(0.3, 1))
def test_looser_limits_never_lower_the_best_goodput(
    case: tuple[Space, dict[tuple[Candidate, float], list[ServedRequest]]], ttft: float, tpot: float, share: float
) -> None:
    space, runs = case
    looser = LatencyLimits(ttft_target_s=1.0 * ttft, tpot_target_s=0.1 * tpot, attainment=0.75 * share)
    tight, loose = (found(space, table_of(runs, limits), limits) for limits in (LIMITS, looser))
    if tight.places:
        assert loose.places[0].goodput_per_device >= tight.places[0].goodput_per_device


@settings(max_examples=examples(60), deadline=None)
@given(spaces(), st.data())
def test_more_candidates_never_lower_the_best_goodput(
    case: tuple[Space, dict[tuple[Candidate, float], list[ServedRequest]]], data: st.DataObject
) -> None:
    space, runs = case
    table = table_of(runs, LIMITS)
    fewer = tuple(one for one in space.candidates if data.draw(st.booleans()))
    some, every = found(Space(fewer, RATES), table, LIMITS), found(space, table, LIMITS)
    if some.places:
        assert every.places[0].goodput_per_device >= some.places[0].goodput_per_device


def test_the_nearest_keeps_the_limits_most_often() -> None:
    one, split = candidates_of(workers=[(None, 1)], budgets=[64], max_workers=2, max_devices=2)
    fast, slow = served(0.5, 0.05), served(5.0, 0.05)
    table = table_of({(one, 0.5): [fast, slow, slow, slow], (split, 0.5): [fast, fast, slow, slow]}, LIMITS)
    ranking = search(Space((one, split), (0.5,)), LIMITS, lambda candidate, rate: table[candidate, rate])
    assert not ranking.places
    assert ranking.nearest is not None
    assert ranking.nearest.missed is not None
    assert (ranking.nearest.candidate, ranking.nearest.missed.worse.option) == (split, "ttft_target_s")


def test_candidates_are_one_process_and_splits_that_are_no_multiples_of_others() -> None:
    names = [
        (one.prefill, one.decode, one.num_devices)
        for one in candidates_of(workers=[(2, 1)], budgets=[64], max_workers=4, max_devices=8)
    ]
    assert names == [(0, 0, 2), (1, 1, 4), (1, 2, 6), (2, 1, 6), (1, 3, 8), (3, 1, 8)]


@settings(max_examples=examples(30), deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 20), st.booleans()), min_size=1, max_size=12),
    gap_s=st.sampled_from([0.0, 0.01, 0.1]),
    budget=st.sampled_from([16, 64]),
    head_s=st.sampled_from([0.0, 0.004]),
)
def test_no_simulated_run_has_more_goodput_than_the_bound(
    lengths: list[tuple[int, int, bool]], gap_s: float, budget: int, head_s: float
) -> None:
    machine = StepTimeModel(
        layers=Curve((1, 8, 64), (0.010, 0.011, 0.050)), head=Curve((1,), (head_s,)), pair_s=1e-6, seen_s=1e-5
    )
    shared = tuple(bytes([i]) * 4 for i in range(5))
    requests = [
        SimulatedRequest(
            Arrival(
                f"{i}",
                i * gap_s,
                num_prompt,
                num_output,
                block_hashes=tuple(
                    name if is_alike else bytes([i, j]) for j, name in enumerate(shared[: num_prompt // 16])
                ),
            ),
            num_output,
        )
        for i, (num_prompt, num_output, is_alike) in enumerate(lengths)
    ]
    engine = started(budget)
    limits = replace(LIMITS, ttft_target_s=1e6, tpot_target_s=1e6)
    run = run_simulated(engine, requests, machine)
    goodput = len(run.requests) / run.duration_s
    assert goodput <= goodput_bound(requests, engine, machine, limits, num_workers=1) * (1 + 1e-9)


@pytest.mark.parametrize("most", [1, 7, 64, 500])
def test_the_least_seconds_of_a_token_are_those_of_the_best_step(most: int) -> None:
    curve = Curve((1, 8, 64), (0.010, 0.030, 0.050))
    assert least_seconds_per_token(curve, most) == min(curve.at(n) / n for n in range(1, most + 1))

"""Budgets by limits of time, with a machine that takes exactly as long as it is said to, or longer."""

from __future__ import annotations

import itertools
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from factories import make_arrival, make_kv
from tiers import examples
from twostroke.config.scheduler import SchedulerConfig
from twostroke.cost.step_cost import Layers, StepWork
from twostroke.cost.step_model import Curve, StepTimeModel, scaled
from twostroke.errors import InvalidParameter
from twostroke.request import Request
from twostroke.scheduler.scheduler import Scheduler
from twostroke.scheduler.step_budget import MAX_CHUNK_INTERVAL, MIN_CHUNK, LateShare, SloBudget, StepSpread
from twostroke.scheduler.step_correction import StepCorrection
from twostroke.served_run import Run
from twostroke.simulation.requests import SimulatedRequest
from twostroke.simulation.simulate import Simulation

MACHINE = StepTimeModel(
    layers=Curve((1, 16, 512), (0.020, 0.022, 0.420)), head=Curve((1, 64), (0.002, 0.006)), pair_s=5e-8, seen_s=1e-7
)
LAYERS = Layers([None] * 4)
LONG = 2048


def served(requests: list[SimulatedRequest], machine: StepTimeModel = MACHINE, **given: object) -> Run:
    """Run the workload with a scheduler that predicts with MACHINE."""
    kv = make_kv(2000, block_size=16, max_model_len=LONG, enable_prefix_caching=False)
    scheduler = Scheduler(SchedulerConfig(**given), kv, max_model_len=LONG, step_times=MACHINE, layers=LAYERS)
    return Simulation(scheduler, LAYERS, machine, block_size=16, hashes_blocks=False).run(requests)


def decodes_and_prompts(num_decodes: int, prompts: list[tuple[int, float]]) -> list[SimulatedRequest]:
    """Some short requests with long answers, and prompts that come in between."""
    short = [SimulatedRequest(make_arrival(f"d{i}", 8, 300), 300) for i in range(num_decodes)]
    long = [
        SimulatedRequest(make_arrival(f"p{i}", length, 2, arrival_time_s=at), 2)
        for i, (length, at) in enumerate(prompts)
    ]
    return short + long


def gaps(run: Run) -> list[float]:
    return [gap for r in run.requests if r.request_id.startswith("d") for gap in r.times.itl_s]


def worst_ttft(run: Run) -> float:
    return max(r.times.ttft_s for r in run.requests if r.request_id.startswith("p"))


@settings(max_examples=examples(40), deadline=None)
@given(
    num_decodes=st.integers(1, 20),
    prompts=st.lists(st.tuples(st.integers(20, 1500), st.floats(0.5, 5.0)), min_size=1, max_size=4),
    itl_slo=st.sampled_from([0.05, 0.08, 0.15]),
)
def test_no_token_is_later_than_the_limit_where_that_can_be(
    num_decodes: int, prompts: list[tuple[int, float]], itl_slo: float
) -> None:
    run = served(decodes_and_prompts(num_decodes, prompts), itl_slo=itl_slo)
    least = LAYERS.work([(LONG, 1, 1)] * num_decodes + [(LONG, MIN_CHUNK, 1)])
    if MACHINE.seconds(least) <= itl_slo:
        assert max(gaps(run)) <= itl_slo + 1e-9


@pytest.mark.parametrize("num_decodes", [1, 8, 24])
def test_ttft_is_no_worse_than_that_of_the_best_fixed_budget_that_keeps_the_limit(num_decodes: int) -> None:
    requests = decodes_and_prompts(num_decodes, [(1200, 1.0), (700, 2.5), (300, 2.6)])
    limit = 0.1
    fixed = {
        budget: served(requests, max_num_batched_tokens=budget) for budget in (32, 48, 64, 80, 96, 112, 128, 192, 256)
    }
    keeping = [worst_ttft(run) for run in fixed.values() if max(gaps(run)) <= limit]
    assert keeping, "no fixed budget keeps the limit"
    run = served(requests, itl_slo="100ms")
    assert max(gaps(run)) <= limit + 1e-9
    assert worst_ttft(run) <= min(keeping) * 1.001


@pytest.mark.parametrize("factor", [0.5, 1.5, 3.0])
def test_a_machine_that_is_not_as_it_was_measured_is_followed(factor: float) -> None:
    prompts = [(600, 0.5 + i) for i in range(24)]
    run = served(decodes_and_prompts(4, prompts), scaled(MACHINE, factor), itl_slo=0.15 if factor > 1 else 0.05)
    late = sorted(gaps(run))
    half = [
        gap for r in run.requests if r.request_id.startswith("d") for gap in itertools.islice(r.times.itl_s, 150, None)
    ]
    limit = 0.15 if factor > 1 else 0.05
    assert sum(gap > limit for gap in half) <= 0.05 * len(half), late[-10:]


def test_nobody_decodes_and_the_step_is_as_large_as_it_may_be() -> None:
    alone = [SimulatedRequest(make_arrival("p0", 1500, 2), 2)]
    assert worst_ttft(served(alone, itl_slo=0.03)) == worst_ttft(served(alone))


def test_a_limit_that_cannot_be_kept_does_not_starve_a_prompt() -> None:
    run = served(decodes_and_prompts(2, [(320, 0.5)]), itl_slo="1ms")
    chunks = [step.num_prefill_tokens for step in run.steps if step.num_prefill_tokens and step.num_decode_tokens]
    assert set(chunks) == {MIN_CHUNK}
    assert worst_ttft(run) < 2.0


def test_with_a_limit_for_ttft_alone_chunks_are_as_small_as_is_in_time() -> None:
    requests = decodes_and_prompts(8, [(1024, 1.0)])
    tight, loose = (served(requests, ttft_slo=limit) for limit in (1.2, 3.0))
    assert worst_ttft(tight) <= 1.2
    assert worst_ttft(tight) < worst_ttft(loose) <= 3.0
    assert max(gaps(loose)) < max(gaps(tight)), "who has time disturbs others less"


def chat_with_a_document(num_chats: int = 150) -> list[SimulatedRequest]:
    """Return short prompts all the time, and one that takes 1.5 s by itself."""
    chats = [SimulatedRequest(make_arrival(f"p{i}", 24, 4, arrival_time_s=0.1 * i), 4) for i in range(num_chats)]
    return [*chats, SimulatedRequest(make_arrival("long", 1800, 4, arrival_time_s=1.01), 4)]


def ttft_of(run: Run, *, of_chats: bool) -> list[float]:
    return sorted(r.times.ttft_s for r in run.requests if r.request_id.startswith("p") == of_chats)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_with_both_limits_a_prompt_that_cannot_keep_its_own_gives_way(policy: str) -> None:
    """Under `fair` too, which is a server's default and orders by tenant first: all of these are one tenant's."""
    requests = chat_with_a_document()
    limits: tuple[dict[str, str], ...] = ({}, {"ttft_slo": "300ms"})
    without, with_both = (served(requests, itl_slo=0.1, policy=policy, **given) for given in limits)
    p99 = {name: ttft_of(run, of_chats=True)[-2] for name, run in (("without", without), ("both", with_both))}
    assert p99["without"] > 0.5
    assert p99["both"] <= 0.3
    kept = [sum(ttft <= 0.3 for ttft in ttft_of(run, of_chats=True)) for run in (without, with_both)]
    assert kept[1] == 150 > kept[0]
    (long_before,), (long_after,) = (ttft_of(run, of_chats=False) for run in (without, with_both))
    assert long_before < long_after < 2 * long_before, "it waits for those that came meanwhile, and not for ever"
    assert max(gaps(with_both), default=0) <= 0.1 + 1e-9


@settings(max_examples=examples(25), deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 400), st.floats(0, 3)), min_size=1, max_size=12),
    ttft_slo=st.sampled_from([0.01, 0.1, 0.5]),
    num_blocks=st.sampled_from([130, 2000]),
)
def test_every_request_ends_with_a_limit_for_its_ttft(
    lengths: list[tuple[int, float]], ttft_slo: float, num_blocks: int
) -> None:
    requests = [
        SimulatedRequest(make_arrival(f"p{i}", length, 5, arrival_time_s=at), 5)
        for i, (length, at) in enumerate(lengths)
    ]
    kv = make_kv(num_blocks, block_size=16, max_model_len=LONG, enable_prefix_caching=False)
    config = SchedulerConfig(ttft_slo=ttft_slo, itl_slo=0.1)
    scheduler = Scheduler(config, kv, max_model_len=LONG, step_times=MACHINE, layers=LAYERS)
    run = Simulation(scheduler, LAYERS, MACHINE, block_size=16, hashes_blocks=False).run(requests)
    assert [len(r.times.token_times_s) for r in run.requests] == [5] * len(requests)
    scheduler.check_invariants()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"itl_slo": "50"}, "must be a time with its unit"),
        ({"itl_slo": "-5ms"}, "must be a time with its unit"),
        ({"itl_slo": 0}, "more than 0"),
        ({"ttft_slo": "2h"}, "at most 3600"),
        ({"itl_slo": "50ms", "mixing": "prefill_first"}, "needs chunked prefill"),
        ({"ttft_slo": 1.0, "enable_chunked_prefill": False}, "needs chunked prefill"),
    ],
)
def test_limits_that_mean_nothing(given: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        SchedulerConfig(**given)


def test_what_the_machine_could_do_at_best_is_enough_to_begin_with() -> None:
    """Floors know nothing of the time that each step takes whatever is in it."""
    floors = StepTimeModel(
        layers=Curve((1, 512), (0.001, 0.300)), head=Curve((1, 64), (0.0, 0.001)), pair_s=0, seen_s=0
    )
    requests = decodes_and_prompts(6, [(900, 1.0 + 2.5 * i) for i in range(6)])
    best = served(requests, itl_slo=0.1)
    kv = make_kv(2000, block_size=16, max_model_len=LONG, enable_prefix_caching=False)
    scheduler = Scheduler(SchedulerConfig(itl_slo=0.1), kv, max_model_len=LONG, step_times=floors, layers=LAYERS)
    run = Simulation(scheduler, LAYERS, MACHINE, block_size=16, hashes_blocks=False).run(requests)
    late = [gap for gap in gaps(run) if gap > 0.1]
    assert len(late) <= 0.01 * len(gaps(run)) + 3, "it has to learn it"
    assert worst_ttft(run) <= 1.15 * worst_ttft(best)


def test_a_correction_finds_the_fixed_time_and_the_factor() -> None:
    correction = StepCorrection()
    for i in range(200):
        predicted = (0.001, 0.002, 0.050)[i % 3]
        correction.learn(predicted, 0.008 + 1.5 * predicted)
    assert correction.seconds(0.03) == pytest.approx(0.053, rel=1e-6)
    for _ in range(2000):  # steps of one size only: no more than a factor can be learned
        correction.learn(0.010, 0.020)
    assert correction.seconds(0.010) == pytest.approx(0.020, rel=1e-3)


TIGHT = StepTimeModel(
    layers=Curve((1, 8, 16, 1024), (0.0035, 0.0040, 0.0050, 0.150)),
    head=Curve((1, 64), (0.0005, 0.003)),
    pair_s=3e-9,
    seen_s=2e-8,
)
"""Step times in which eight decodes take 4.6 ms, as in R5."""


class Noisy:
    """TIGHT with random step times: scaled by a factor, sometimes by a larger one, or longer by some milliseconds."""

    def __init__(self, seed: int, *, sigma: float = 0.0, hiccups: float = 0.0, stalls: float = 0.0) -> None:
        self._random = Random(seed)
        self._sigma, self._hiccups, self._stalls = sigma, hiccups, stalls

    def seconds(self, work: StepWork) -> float:
        random = self._random
        factor = random.lognormvariate(0, self._sigma)
        if random.random() < self._hiccups:
            factor *= random.uniform(1.5, 2.5)
        return TIGHT.seconds(work) * factor + (random.random() < self._stalls) * random.uniform(0.003, 0.012)


def late_share(seed: int, itl_slo: float, **noise: float) -> float:
    """Return the share of late gaps of eight decodes, until the last of six prompts is computed."""
    kv = make_kv(2000, block_size=16, max_model_len=LONG, enable_prefix_caching=False)
    config = SchedulerConfig(itl_slo=itl_slo, max_num_batched_tokens=2048)
    scheduler = Scheduler(config, kv, max_model_len=LONG, step_times=TIGHT, layers=LAYERS)
    short = [SimulatedRequest(make_arrival(f"d{i}", 16, 700), 700) for i in range(8)]
    long = [SimulatedRequest(make_arrival(f"p{i}", 1024, 2, arrival_time_s=0.3 + 0.4 * i), 2) for i in range(6)]
    run = Simulation(scheduler, LAYERS, Noisy(seed, **noise), block_size=16, hashes_blocks=False).run(short + long)
    found = gaps(run)
    return sum(gap > itl_slo for gap in found) / len(found)


@pytest.mark.parametrize("times", [4, 8])
@pytest.mark.parametrize(
    "noise",
    [
        {"sigma": 0.15},
        {"sigma": 0.15, "hiccups": 0.03},
        {"stalls": 0.03},
        {"sigma": 0.15, "stalls": 0.03},
    ],
    ids=str,
)
def test_a_limit_is_kept_for_99_of_100_steps_on_a_machine_whose_steps_scatter(
    times: int, noise: dict[str, float]
) -> None:
    shares = [late_share(seed, times * 0.00465, **noise) for seed in range(3)]
    assert sum(shares) / len(shares) <= 0.01, shares


def test_no_step_has_more_tokens_than_any_may_have() -> None:
    run = served([SimulatedRequest(make_arrival("p", 40, 2), 2)], ttft_slo=0.5, max_num_batched_tokens=8)
    assert max(step.num_prefill_tokens + step.num_decode_tokens for step in run.steps) == 8


def test_a_short_prompt_that_keeps_the_limit_is_not_spared() -> None:
    """Steps were late, but the limit is far above what this prompt takes: its few tokens are no sign of a tight one."""
    budget = SloBudget(64, MACHINE, LAYERS, itl_slo_s=10.0)
    for _ in range(100):
        budget._late_share.learn(True)  # pyright: ignore[reportPrivateUsage]
    decoding = Request(make_arrival("d", 8, 300))
    decoding.num_computed_tokens = 8
    head = Request(make_arrival("p", 5, 2))
    assert [budget.tokens(0.0, [decoding], head) for _ in range(6)] == [6] * 6


def test_prompts_are_spared_no_longer_than_a_few_steps() -> None:
    """The limit is below what a step with the smallest chunk takes, and above what decodes alone take."""
    run = served(decodes_and_prompts(2, [(640, 0.5)]), itl_slo=0.0232)
    beside = [step for step in run.steps if step.num_decode_tokens and step.end_s < worst_ttft(run) + 0.5]
    carried = [i for i, step in enumerate(beside) if step.num_prefill_tokens]
    distances = [later - earlier for earlier, later in itertools.pairwise(carried)]
    assert max(distances) == MAX_CHUNK_INTERVAL
    assert min(distances) == 1


def test_a_spread_is_passed_by_the_share_that_is_asked_for() -> None:
    spread, random = StepSpread(0.99), Random(0)
    passed = 0
    for _ in range(20_000):
        ratio = random.lognormvariate(0, 0.3)
        passed += spread.value is not None and ratio > spread.value
        spread.learn(ratio)
    assert 0.006 < passed / 20_000 < 0.014
    for _ in range(len(spread)):
        spread.learn(2.0)
    assert spread.value == 2.0, "what is long ago is forgotten"


def test_lateness_counts_the_latest_steps() -> None:
    lateness = LateShare()
    for i in range(1000):
        lateness.learn(i % 100 == 0)
    assert lateness.share == pytest.approx(0.01)
    for _ in range(400):
        lateness.learn(False)
    assert lateness.share == 0

"""Value of drafts and times of steps, compared with all possible plans and with the learned numbers."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.cost.acceptance import Acceptance, best_plan, expected_tokens
from twostroke.cost.step_time import StepTimes


@given(
    acceptances=st.lists(st.sampled_from([0.0, 0.1, 0.35, 0.5, 0.85, 0.9, 1.0]), min_size=1, max_size=3),
    base=st.floats(0.1, 10.0),
    per_token=st.floats(0.0, 2.0),
)
def test_no_other_plan_is_better_where_a_token_costs_the_same_wherever_it_stands(
    acceptances: list[float], base: float, per_token: float
) -> None:
    def step_s(num_tokens: int) -> float:
        return base + per_token * num_tokens

    def rate(num_drafts: tuple[int, ...]) -> float:
        tokens = sum(expected_tokens(a, k) for a, k in zip(acceptances, num_drafts, strict=True))
        return tokens / step_s(len(acceptances) + sum(num_drafts))

    plan = best_plan(acceptances, 3, step_s, lambda rows, k: 0.0)
    best = max(map(rate, itertools.product(range(4), repeat=len(acceptances))))
    assert rate(plan.num_drafts) == pytest.approx(best)
    assert plan.tokens / plan.seconds == pytest.approx(best)
    assert plan.gain == pytest.approx(best / rate((0,) * len(acceptances)))
    if any(acceptances) and len(set(acceptances)) == len(acceptances):  # equally likely drafts are added together
        drafted = max(rate(k) for k in itertools.product(*(range(4 if a else 1) for a in acceptances)) if any(k))
        assert plan.drafted_tokens / plan.drafted_seconds == pytest.approx(drafted), "told also where it does not pay"
    if not any(acceptances):
        assert (plan.drafted_tokens, plan.drafted_seconds) == (len(acceptances), plan.plain_seconds)


def test_rounds_of_drafting_are_paid_for() -> None:
    def plan(round_s: float) -> tuple[int, ...]:
        return best_plan([0.8], 8, lambda n: 1.0, lambda rows, k: round_s * k).num_drafts

    assert plan(0.0) == (8,)
    assert 1 <= plan(0.2)[0] < 8
    assert plan(1.0) == (0,)


@pytest.mark.parametrize("probability", [0.0, 0.3, 1.0])
def test_acceptance_comes_to_what_it_is(probability: float) -> None:
    found = Acceptance(0.7)
    for place in range(200):
        found.learn(1, int(place % 10 < 10 * probability))
    assert found.probability == pytest.approx(probability, abs=0.1)


def test_a_round_that_falls_is_one_failure_behind_its_successes() -> None:
    found = Acceptance(0.5)
    found.learn(4, 2)
    assert found.probability == pytest.approx((0.93 * 1 + 2) / (0.93 * 2 + 3))
    found = Acceptance(0.5)
    found.learn(4, 4)
    assert found.probability == pytest.approx((0.93 * 1 + 4) / (0.93 * 2 + 4))


def test_a_hiccup_changes_no_prediction() -> None:
    times = StepTimes()
    for seconds in (1.0, 1.1, 50.0, 0.9, 1.0):
        times.learn(4, seconds)
    assert times.predicted(4) == 1.0


def test_sizes_between_and_beyond_those_that_ran() -> None:
    times = StepTimes()
    times.learn(16, 2.0)
    times.learn(64, 5.0)
    assert times.predicted(8) == pytest.approx(1.5)
    assert times.predicted(1) == pytest.approx(1.0625)
    assert times.predicted(32) == pytest.approx(3.0)
    assert times.predicted(128) == pytest.approx(9.0)

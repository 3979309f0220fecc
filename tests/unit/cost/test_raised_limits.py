"""Limits raised to observed steps: no step is faster than its floor."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from factories import uniform_shape
from twostroke.cost.step_cost import MachineLimits, Share, StepCost, raised_by_steps, step_cost

SHAPE = uniform_shape(
    hidden_size=64,
    intermediate_size=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=320,
    windows=(None, 24),
    bytes_per_weight=2,
)
RATES = st.floats(1e6, 1e15)
LIMITS = st.builds(MachineLimits, RATES, RATES, st.booleans())
SHARES = st.lists(st.builds(Share, st.integers(0, 500), st.integers(1, 200), st.integers(0, 1)), min_size=1, max_size=5)
STEPS = st.lists(st.tuples(SHARES, st.floats(1e-7, 1e3)), min_size=1, max_size=12)
ROUNDING = 1 + 1e-8


@given(LIMITS, STEPS)
def test_no_step_that_was_seen_is_faster_than_its_floor(
    limits: MachineLimits, seen: list[tuple[list[Share], float]]
) -> None:
    steps = [(step_cost(SHAPE, shares, limits), seconds) for shares, seconds in seen]
    raised = raised_by_steps(limits, steps)
    assert raised.flops_per_s >= limits.flops_per_s
    assert raised.bytes_per_s >= limits.bytes_per_s
    for cost, seconds in steps:
        assert raised.floor_s(cost) <= min(seconds, limits.floor_s(cost)) * ROUNDING
    was_passed = any(limits.floor_s(cost) > seconds * ROUNDING for cost, seconds in steps)
    assert raised != limits or not was_passed
    assert raised_by_steps(raised, steps) == raised, "once is enough"


@given(LIMITS, SHARES)
def test_the_floor_is_that_of_the_step(limits: MachineLimits, shares: list[Share]) -> None:
    cost = step_cost(SHAPE, shares, limits)
    assert limits.floor_s(cost) == cost.seconds


@given(LIMITS, LIMITS)
def test_the_best_of_two_measurements(one: MachineLimits, other: MachineLimits) -> None:
    both = one.best_of(other)
    assert both == other.best_of(one)
    assert both.flops_per_s == max(one.flops_per_s, other.flops_per_s)
    assert both.is_estimate is (one.is_estimate and other.is_estimate)


def test_a_step_without_a_time_raises_nothing() -> None:
    limits = MachineLimits(1.0, 1.0)
    assert limits.raised_by(StepCost(10.0, 10.0, 0.0, 0.0, 1.0, "compute", 10.0), 0.0) is limits

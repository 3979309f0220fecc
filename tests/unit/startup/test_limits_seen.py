"""An engine's limits at run time: a step faster than its floor raises them, in the log and on the page."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from timed_engine import LIMITS, STEP_TIMES, history
from twostroke import LLM, SamplingParams
from twostroke.cost.step_model import scaled
from twostroke.events import Event, StepCommitted, StepScheduled
from twostroke.explain.step import DecidedStep
from twostroke.live.rows import row_of_step
from twostroke.measure.workload import workload_of_lengths

LOAD = workload_of_lengths([(40, 12), (9, 20), (64, 6), (3, 16)])


def steps_of(events: list[Event]) -> list[tuple[StepScheduled, float]]:
    decided = {event.batch.step: event for event in events if isinstance(event, StepScheduled)}
    done = [event for event in events if isinstance(event, StepCommitted)]
    return [(decided[event.step], event.time_s - decided[event.step].time_s) for event in done]


@pytest.mark.parametrize("factor", [1.0, 0.05, 0.001])
def test_steps_faster_than_their_floors_raise_the_limits_of_those_that_follow(factor: float) -> None:
    steps = steps_of(history(LOAD, step_times=scaled(STEP_TIMES, factor)))
    limits, num_passed = LIMITS, 0
    for decided, seconds in steps:
        assert decided.cost is not None
        assert decided.cost.seconds == limits.floor_s(decided.cost)
        num_passed += decided.cost.seconds > 1.1 * seconds
        limits = limits.raised_by(decided.cost, seconds)
    assert (limits == LIMITS) is (factor == 1.0)
    assert (num_passed == 0) is (factor == 1.0)
    assert num_passed < len(steps) / 2, "after a few, floors are at what was seen"


def test_a_journal_keeps_no_step_that_was_decided_empty() -> None:
    """With steps ahead an engine decides empty ones, too; they are never committed."""
    with LLM("embedded", threads=1, num_kv_blocks=64, max_model_len=64, async_scheduling=True) as llm:
        for _ in range(3):
            llm.generate("x", SamplingParams(max_tokens=4))
        journal = llm.engine.engine._journal  # pyright: ignore
        assert journal._uncommitted == {}


def test_it_is_said_and_not_again_for_a_little_more(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="twostroke"):
        history(LOAD, step_times=scaled(STEP_TIMES, 0.05))
    said = [record.message for record in caplog.records if "machine limits raised" in record.message]
    assert 1 <= len(said) <= 4
    assert "its floor was" in said[0]


@pytest.mark.parametrize("factor", [1.0, 0.05, 0.001])
def test_the_page_shows_no_step_below_its_floor(factor: float) -> None:
    num_raised = 0
    for decided, seconds in steps_of(history(LOAD, step_times=scaled(STEP_TIMES, factor))):
        step = DecidedStep(decided)
        assert decided.cost is not None
        assert step.floor_s == decided.cost.seconds, "while it runs there is nothing better to say"
        step.done_s = decided.time_s + seconds
        row = row_of_step(step)
        assert row.floor_ms is not None
        assert row.ms is not None
        assert 0 < row.floor_ms <= row.ms
        num_raised += row.floor_ms < decided.cost.seconds * 1e3 * (1 - 1e-6)
    assert (num_raised > 0) is (factor < 1)
    assert DecidedStep(replace(decided, cost=None)).floor_s is None

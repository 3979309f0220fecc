from __future__ import annotations

import dataclasses

import pytest

from factories import make_layout
from fakes import FakeEngine
from twostroke.config.scheduler import SchedulerConfig
from twostroke.events import EngineStarted, Event, EventRing, RequestFinishedByCaller, StepScheduled
from twostroke.scheduler.replay import replay


@pytest.fixture(scope="module")
def events() -> list[Event]:
    """A run with preemptions, an abort, priorities, drafts, and results one step late."""
    log = EventRing(10_000)
    engine = FakeEngine(
        make_layout((None, 6), 2),
        26,
        max_model_len=24,
        scheduler_config=SchedulerConfig(max_num_batched_tokens=8, policy="priority"),
        latency=1,
        max_drafts=2,
        log=log,
    )
    for i in range(12):
        engine.submit(f"r{i}", [i % 2] * (1 + i), 12, priority=i % 3)
        engine.step()
    engine.abort("r11")
    engine.run()
    return list(log)


def test_a_log_decides_the_same_again(events: list[Event]) -> None:
    batches = [event.batch for event in events if isinstance(event, StepScheduled)]
    assert any(batch.preempted_request_ids for batch in batches)
    assert any(scheduled.num_draft_tokens for batch in batches for scheduled in batch.requests)
    assert replay(events) is None


def test_two_runs_in_one_log(events: list[Event]) -> None:
    assert replay(events + events) is None


def test_the_first_difference_is_returned(events: list[Event]) -> None:
    without_abort = [event for event in events if not isinstance(event, RequestFinishedByCaller)]
    difference = replay(without_abort)
    assert difference is not None
    assert difference.recorded.step == difference.decided.step


def test_other_settings_decide_otherwise(events: list[Event]) -> None:
    started = events[0]
    assert isinstance(started, EngineStarted)
    other = dataclasses.replace(started, scheduler=started.scheduler | {"max_num_batched_tokens": 7})
    assert replay([other, *events[1:]]) is not None


def test_a_log_begins_at_its_beginning(events: list[Event]) -> None:
    with pytest.raises(AssertionError, match="a log begins with EngineStarted"):
        replay(events[1:])

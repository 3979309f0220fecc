"""A recording is the same wherever one comes from, and says what is wrong with it."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from explain_loads import random_load
from twostroke.errors import InvalidParameter
from twostroke.events import EngineStarted, Event, EventsDropped, StepScheduled
from twostroke.live import recording
from twostroke.live.recording import RecordedLog, is_truncated


def seen(state: dict[str, Any]) -> bytes:
    return msgspec.json.encode(state)


@pytest.mark.parametrize("most", [2, 64])
def test_a_step_looks_the_same_wherever_one_comes_from(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(recording, "CHUNK_EVENTS", 16)
    monkeypatch.setattr(recording, "MAX_CHECKPOINTS", most)
    events = random_load(3)
    played = RecordedLog(events, "a log")
    in_order = [seen(played.state(step)) for step in range(played.num_steps)]
    assert len(set(in_order)) == played.num_steps > 50
    dice = random.Random(most)
    for step in dice.choices(range(played.num_steps), k=60):
        assert seen(played.state(step)) == in_order[step]
    assert list(played.events()) == events


def test_a_step_ends_where_the_next_one_is_decided() -> None:
    events = random_load(1)
    played = RecordedLog(events, "a log")
    steps = [event for event in events if isinstance(event, StepScheduled) and event.batch.requests]
    assert played.num_steps == len(steps)
    assert [played.step_at(step.time_s) for step in steps] == sorted(played.step_at(step.time_s) for step in steps)
    assert played.step_at(steps[7].time_s) >= 7
    assert played.step_at(-1.0) == 0
    shown = played.state(5)
    assert shown["engines"]["engine"]["steps"][-1].step == steps[5].batch.step
    assert shown["recording"] == {
        "name": "a log",
        "num_steps": len(steps),
        "step": 5,
        "first_s": events[0].time_s,
        "last_s": steps[-1].time_s,
        "problem": "",
    }


def test_what_is_missing_is_told() -> None:
    events: list[Event] = random_load(1)
    cut = [events[0], EventsDropped(events[40].time_s, events[40].process, 39), *events[40:]]
    assert "39 events before" in RecordedLog(cut, "a log").state(0)["recording"]["problem"]


def test_a_log_without_a_step_is_shown_and_one_without_an_event_is_refused() -> None:
    started = RecordedLog(random_load(1)[:1], "a log")
    assert started.num_steps == 0
    assert started.state(0)["recording"]["step"] == -1
    with pytest.raises(InvalidParameter, match="holds no event"):
        RecordedLog([], "an empty log")


def test_a_last_line_that_was_cut_off_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for text, is_cut in ((b"", False), (b"a\n", False), (b"a\nb", True)):
        path.write_bytes(text)
        assert is_truncated(path) is is_cut


def test_an_engine_whose_start_is_not_in_it_is_told() -> None:
    events: list[Event] = random_load(1)
    problem = RecordedLog(events[len(events) // 2 :], "a log").state(0)["recording"]["problem"]
    assert problem == "The start of fake is missing: it is shown only from its next start on."


def test_events_that_contradict_each_other_are_refused_in_a_sentence() -> None:
    events: list[Event] = random_load(1)
    started = events[0]
    assert isinstance(started, EngineStarted)
    for broken in (
        *(replace(started, num_blocks=number) for number in (1, 2**70)),
        replace(started, layout={}),
        replace(started, scheduler={}),
    ):
        with pytest.raises(InvalidParameter, match=r"a log.*does not fit those before it"):
            RecordedLog([broken, *events[1:]], "a log")


@pytest.mark.parametrize(
    ("until", "on", "why"), [(10, 20, "the steps between are missing"), (20, 10, "steps are duplicated")]
)
def test_steps_that_do_not_follow_each_other_are_told_once(until: int, on: int, why: str) -> None:
    events: list[Event] = random_load(1)
    places = [place for place, event in enumerate(events) if isinstance(event, StepScheduled)]
    first, last = (events[places[number]] for number in (on, until - 1))
    assert isinstance(first, StepScheduled)
    assert isinstance(last, StepScheduled)
    problem = RecordedLog([*events[: places[until]], *events[places[on] :]], "a log").state(0)["recording"]["problem"]
    assert problem.startswith(f"Step {first.batch.step} of fake follows step {last.batch.step}: {why}")
    assert problem.count("Step") == 1

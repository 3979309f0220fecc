from __future__ import annotations

from pathlib import Path

import pytest

from explain_loads import random_load, times_of
from twostroke.engine.event_sinks import read_events
from twostroke.errors import InvalidParameter
from twostroke.event_codec import pack
from twostroke.events import EngineStarted, Event, EventsDropped
from twostroke.explain.recorder import CHUNK_EVENTS, FlightRecorder
from twostroke.explain.timeline import timeline_of
from twostroke.scheduler.replay import replay


def recorded(events: list[Event], **limits: float) -> FlightRecorder:
    recorder = FlightRecorder(**limits)
    for event in events:
        recorder.append(pack(event))
    return recorder


@pytest.mark.parametrize("seed", range(5))
def test_what_fits_comes_back_and_replays(seed: int, tmp_path: Path) -> None:
    events = random_load(seed)
    recorder = recorded(events, minutes=1e6)
    assert list(recorder.events()) == events
    assert recorder.num_dropped == 0
    assert recorder.dump(tmp_path / "dump.jsonl") == len(events)
    assert list(read_events(tmp_path / "dump.jsonl")) == events
    assert replay(read_events(tmp_path / "dump.jsonl")) is None


@pytest.mark.parametrize("limits", [{"minutes": 0.5}, {"minutes": 1e6, "max_bytes": 2000}], ids=str)
def test_a_history_that_lost_its_beginning_says_so_and_explains_the_rest(limits: dict[str, float]) -> None:
    events = random_load(3)
    recorder = recorded(events, **limits)
    started, gap, *kept = recorder.events()
    assert started == events[0]
    assert isinstance(gap, EventsDropped)
    assert gap.num_events == recorder.num_dropped == len(events) - len(kept) > 0
    assert kept == events[-len(kept) :]
    assert len(kept) < len(events) / 2, "little was dropped: the test is too easy"

    num_complete = num_incomplete = num_unknown = 0
    for sequence_id in times_of(events):
        (whole,) = timeline_of(events, sequence_id).lanes
        try:
            (lane,) = timeline_of(recorder.events(), sequence_id).lanes
        except InvalidParameter:
            num_unknown += 1
            assert whole.end_s <= gap.time_s
            continue
        assert lane.end_s == whole.end_s
        assert sum(s.duration_s for s in lane.segments) == pytest.approx(lane.duration_s)
        if lane.is_complete:
            num_complete += 1
            assert lane.begin_s >= gap.time_s - 1.0
            assert [(s.label, s.start_s, s.end_s) for s in lane.segments][1:] == [
                (s.label, s.start_s, s.end_s) for s in whole.segments
            ][1:]
        else:
            num_incomplete += 1
            assert lane.notes[0] == "the history begins after its arrival"
            assert lane.begin_s >= whole.begin_s
    assert num_incomplete
    assert num_unknown


def test_a_gap_cannot_be_replayed() -> None:
    recorder = recorded(random_load(3), minutes=0.5)
    with pytest.raises(InvalidParameter, match=r"must hold every event from the engine.s start; it lacks \d+ before"):
        replay(recorder.events())


def test_both_bounds_hold_after_every_event() -> None:
    recorder = FlightRecorder(minutes=1.0, max_bytes=3000)
    for number, event in enumerate(random_load(7)):
        recorder.append(pack(event))
        assert recorder.num_bytes <= 3000
        if number % 50:
            continue
        times = [kept.time_s for kept in recorder.events() if not isinstance(kept, EngineStarted)]
        late = [time_s for time_s in times if time_s < event.time_s - 60.0]
        assert len(late) < 2 * CHUNK_EVENTS, "whole chunks go, so at most one is partly too old, and one is open"


def test_a_second_engine_begins_the_history_behind_the_first() -> None:
    first, second = random_load(3), random_load(4)
    recorder = recorded([*first, *second], minutes=1e6, max_bytes=4000)
    assert next(recorder.events()) == second[0], "the engine that what is left belongs to"

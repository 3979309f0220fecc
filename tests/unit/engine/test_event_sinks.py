from __future__ import annotations

from pathlib import Path

from twostroke.engine.event_sinks import JsonlEventLog, read_events
from twostroke.events import RequestFinishedByCaller
from twostroke.request import FinishReason

EVENTS = [RequestFinishedByCaller(float(i), "p", f"r{i}", FinishReason.ABORT) for i in range(3)]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "events.jsonl"
    with JsonlEventLog(path) as log:
        for event in EVENTS:
            log.append(event)
        assert list(read_events(path)) == EVENTS, "readable while the engine runs"
    with JsonlEventLog(path) as log:
        log.append(EVENTS[0])
    assert list(read_events(path)) == [*EVENTS, EVENTS[0]]


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with JsonlEventLog(path) as log:
        log.append(EVENTS[0])
    with path.open("a") as file:
        file.write('{"v":1,"ev')
    assert list(read_events(path)) == EVENTS[:1]

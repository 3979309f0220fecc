from __future__ import annotations

from pathlib import Path

import pytest

from twostroke.engine.event_sinks import JsonlEventLog, merged_events, read_events
from twostroke.errors import InvalidParameter, UnreadableEvent
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


def test_files_of_several_processes_are_merged_by_time_and_keep_their_own_order(tmp_path: Path) -> None:
    def event(at_s: float, name: str) -> RequestFinishedByCaller:
        return RequestFinishedByCaller(at_s, "p", name, FinishReason.ABORT)

    one = [event(1.0, "a"), event(4.0, "b"), event(3.0, "c")]  # a result is written when it is taken in
    two = [event(2.0, "d"), event(3.5, "e"), event(5.0, "f")]
    for name, events in (("one", one), ("two", two)):
        with JsonlEventLog(tmp_path / name) as log:
            for each in events:
                log.append(each)
    merged = list(merged_events([tmp_path / "one", tmp_path / "two"]))
    assert merged == [one[0], two[0], two[1], one[1], one[2], two[2]]
    assert list(merged_events([tmp_path / "one"])) == one


@pytest.mark.parametrize(
    "path", ["/", "/proc/none/events.jsonl", "/dev/null/events.jsonl", "events\0.jsonl"], ids=ascii
)
def test_a_path_that_cannot_be_written_is_refused(path: str) -> None:
    with pytest.raises(InvalidParameter, match="cannot be written") as refusal:
        JsonlEventLog(Path(path))
    assert refusal.value.name == "event_log"
    assert refusal.value.remedy


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(InvalidParameter, match="cannot be read"):
            list(read_events(path))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\n")
    with pytest.raises(UnreadableEvent, match="UTF-8"):
        list(read_events(tmp_path / "binary"))

"""Reading of the event logs that commands take. A file of another kind is refused with the command that reads it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from twostroke.engine.event_sinks import merged_events, one_history
from twostroke.errors import ClientError, InvalidParameter, UnreadableEvent
from twostroke.event_codec import from_json
from twostroke.events import Event, StepCommitted
from twostroke.simulation.trace import is_trace
from twostroke.simulation.whole import check_readable, check_times

_RUN_FIRST = "Give the file that --event-log wrote, once its engine has answered requests."


def check_source(paths: Sequence[Path], url: str | None, with_a_file: str) -> None:
    """Refuse a command that names neither logs nor a server, or both.

    Args:
        paths: logs that were given.
        url: the server that was given.
        with_a_file: how the command is called with a file.

    Raises:
        ClientError: none or both are given.
        InvalidParameter: the address is none.
    """
    if not paths and url is None:
        raise ClientError(f"there is no run to read: {with_a_file}, or --url of a server that runs.")
    if paths and url is not None:
        raise ClientError(f"{_named(paths)} and --url {url} are two runs: give a file or a server, not both.")
    if url is not None and not url.startswith(("http://", "https://")):
        raise InvalidParameter("url", url, "must begin with http:// or https://", "Such as http://127.0.0.1:8000.")


def read_logs(paths: Sequence[Path], name: str = "event_log") -> list[Event]:
    """Return the events of logs, by their times.

    Args:
        paths: one file per process.
        name: the parameter as the caller spells it.

    Raises:
        InvalidParameter: a file cannot be read, or is a trace, or no file holds an event, or one is before the clock
            began.
        UnreadableEvent: a line is no event, or one of another version.
    """
    refuse_traces(paths, name)
    try:
        events = list(merged_events(paths))
    except InvalidParameter as error:
        if error.name != "event_log":
            raise
        raise InvalidParameter(name, error.value, error.limit, error.remedy) from error
    if not events:
        raise InvalidParameter(name, _named(paths), "holds no event", _RUN_FIRST)
    with one_history(paths, name):
        check_times(events)
    return events


def read_run(paths: Sequence[Path], name: str = "event_log") -> list[Event]:
    """Return the events of the logs of a run in which steps ended.

    Args:
        paths: each of one process.
        name: the parameter, as the caller spells it.

    Raises:
        InvalidParameter: as `read_logs` raises, or no step ever ended, or events are missing.
        UnreadableEvent: a line is no event, or one of another version.
    """
    events = read_logs(paths, name)
    if not any(isinstance(event, StepCommitted) for event in events):
        raise InvalidParameter(name, _named(paths), "holds no finished step", _RUN_FIRST)
    with one_history(paths, name):
        check_readable(events)
    return events


def _named(paths: Sequence[Path]) -> str:
    return ", ".join(map(str, paths))


def refuse_traces(paths: Sequence[Path], name: str = "event_log") -> None:
    """Refuse a Mooncake trace: it holds requests but no run.

    Raises:
        InvalidParameter: one of the files is a trace.
    """
    for path in paths:
        if is_trace(path):
            limit = "is a Mooncake trace, and no event log"
            raise InvalidParameter(name, str(path), limit, f"Run it with `twostroke replay {path} --model MODEL`.")


def events_of_text(text: str, source: str) -> list[Event]:
    """Return the events of a dump that a server sent.

    Args:
        text: one line per event.
        source: origin of the text, for messages.

    Raises:
        UnreadableEvent: a line is no event, or one of another version.
    """
    try:
        return [from_json(line) for line in text.splitlines() if line]
    except UnreadableEvent as error:
        raise UnreadableEvent(f"{source}: {error}") from error

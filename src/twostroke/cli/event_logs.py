"""Reading of the event logs that commands take. The error for another kind of file names the command that reads it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from twostroke.engine.event_sinks import consistent_events, merged_events
from twostroke.errors import ClientError, InvalidParameter, UnreadableEvent
from twostroke.event_codec import from_json
from twostroke.events import Event, StepCommitted
from twostroke.simulation.complete import check_times, check_usable
from twostroke.simulation.trace import is_trace

_EMPTY_LOG_REMEDY = "Give the file that --event-log wrote, once its engine has answered requests."


def check_source(paths: Sequence[Path], url: str | None, with_a_file: str) -> None:
    """Raise unless exactly one of logs and a server is given.

    Args:
        paths: logs that were given.
        url: address of the server that was given.
        with_a_file: how to call the command with a file, for messages.

    Raises:
        ClientError: none or both are given.
        InvalidParameter: the address is not an HTTP URL.
    """
    if not paths and url is None:
        raise ClientError(f"no run is given: use {with_a_file}, or --url with the address of a running server.")
    if paths and url is not None:
        raise ClientError(f"{_named(paths)} and --url {url} are two runs: give a file or a server, not both.")
    if url is not None and not url.startswith(("http://", "https://")):
        raise InvalidParameter("url", url, "must begin with http:// or https://", "For example http://127.0.0.1:8000.")


def read_logs(paths: Sequence[Path], name: str = "event_log") -> list[Event]:
    """Return the events of logs, ordered by time.

    Args:
        paths: one file per process.
        name: the parameter as the caller spells it.

    Raises:
        InvalidParameter: a file cannot be read or is a trace, no file has an event, or an event has a time before the
            clock began.
        UnreadableEvent: a line is not an event, or its version is not supported.
    """
    refuse_traces(paths, name)
    try:
        events = list(merged_events(paths))
    except InvalidParameter as error:
        if error.name != "event_log":
            raise
        raise InvalidParameter(name, error.value, error.limit, error.remedy) from error
    if not events:
        raise InvalidParameter(name, _named(paths), "holds no event", _EMPTY_LOG_REMEDY)
    with consistent_events(paths, name):
        check_times(events)
    return events


def read_run(paths: Sequence[Path], name: str = "event_log") -> list[Event]:
    """Return the events of a run's logs; require at least one finished step.

    Args:
        paths: one file per process.
        name: the parameter as the caller spells it.

    Raises:
        InvalidParameter: for the reasons of `read_logs`; no step finished; or events are missing.
        UnreadableEvent: a line is not an event, or its version is not supported.
    """
    events = read_logs(paths, name)
    if not any(isinstance(event, StepCommitted) for event in events):
        raise InvalidParameter(name, _named(paths), "holds no finished step", _EMPTY_LOG_REMEDY)
    with consistent_events(paths, name):
        check_usable(events)
    return events


def _named(paths: Sequence[Path]) -> str:
    return ", ".join(map(str, paths))


def refuse_traces(paths: Sequence[Path], name: str = "event_log") -> None:
    """Raise if a file is a Mooncake trace, which has requests but no run.

    Raises:
        InvalidParameter: one of the files is a trace.
    """
    for path in paths:
        if is_trace(path):
            limit = "is a Mooncake trace, not an event log"
            raise InvalidParameter(name, str(path), limit, f"Run it with `twostroke replay {path} --model MODEL`.")


def events_of_text(text: str, source: str) -> list[Event]:
    """Return the events of a dump that a server sent.

    Args:
        text: one line per event.
        source: origin of the text, for messages.

    Raises:
        UnreadableEvent: a line is not an event, or its version is not supported.
    """
    try:
        return [from_json(line) for line in text.splitlines() if line]
    except UnreadableEvent as error:
        raise UnreadableEvent(f"{source}: {error}") from error

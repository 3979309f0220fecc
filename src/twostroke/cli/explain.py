"""`twostroke explain ID`: where the time of a request went, from an event log."""

from __future__ import annotations

import json
from pathlib import Path

from twostroke.cli.flags import JsonFlag
from twostroke.engine.event_sinks import read_events
from twostroke.errors import InvalidParameter
from twostroke.events import Event
from twostroke.explain.text import timeline_text
from twostroke.explain.timeline import timeline_of
from twostroke.explain.trace import trace_of


def explain(
    request_id: str,
    *,
    event_log: Path,
    json_output: JsonFlag = False,
    trace: Path | None = None,
) -> None:
    """Explain a request: every millisecond of it, what it went into, and why.

    Parameters
    ----------
    request_id
        Its name; of several requests with this name the last, or `name#number` for a certain one.
    event_log
        A file that --event-log wrote, or the dump of a server's flight recorder.
    json_output
        One JSON object instead of a table.
    trace
        A file to write the whole log to as a Chrome trace, for Perfetto.
    """
    events = list(read_events(event_log))
    timeline = timeline_of(events, request_id)
    if trace is not None:
        _write_trace(trace, events)
    if json_output:
        print(json.dumps(timeline.to_dict(), indent=2))
    else:
        print(timeline_text(timeline), end="")


def _write_trace(path: Path, events: list[Event]) -> None:
    try:
        path.write_text(json.dumps(trace_of(events)), encoding="utf-8")
    except OSError as error:
        limit = f"cannot be written ({error.strerror or error})"
        raise InvalidParameter("trace", str(path), limit, "Name a file in a folder that you may write to.") from error

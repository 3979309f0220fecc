"""`twostroke doctor`: an engine's bottleneck and its remedies, from a log, a dump or a running server."""

from __future__ import annotations

import json
from pathlib import Path

from twostroke.cli.event_logs import check_source, events_of_text, read_run
from twostroke.cli.flags import JsonFlag
from twostroke.engine.event_sinks import consistent_events
from twostroke.events import Event


def doctor(
    *event_log: Path,
    url: str | None = None,
    api_key: str | None = None,
    link_bytes_per_s: float | None = None,
    json_output: JsonFlag = False,
) -> None:
    """Find an engine's bottleneck, with the evidence, changes with their predicted gains, and faults.

    The command only reads; a running server is not affected. A change is listed if the run has at least 10 requests,
    the predicted gain is at least 10 %, and simulating the recorded run is off by at most 25 %.

    Parameters
    ----------
    event_log
        A file that --event-log wrote, or the dump of a server's flight recorder; for a server with --prefill and
        --decode the files of all its processes. If a file has several runs, the last one is read.
    url
        Address of a running server, such as http://127.0.0.1:8000, instead of a file; it provides its last minutes.
    api_key
        The server's key, if it has one.
    link_bytes_per_s
        Speed of the link to a second machine like this one; used to predict the gain of a prefill pool there.
    json_output
        Print one JSON object instead of text.
    """
    from twostroke.planner.doctor import diagnose
    from twostroke.planner.show_doctor import diagnosis_json, print_diagnosis

    check_source(event_log, url, "twostroke doctor FILE")
    events = read_run(event_log) if url is None else _recorded(url, api_key)
    with consistent_events(event_log) if url is None else consistent_events((url,), "url"):
        found = diagnose(events, link_bytes_per_s=link_bytes_per_s)
    if json_output:
        print(json.dumps(diagnosis_json(found)))
    else:
        print_diagnosis(found)


def _recorded(url: str, api_key: str | None) -> list[Event]:
    from twostroke.cli.explain import Server  # urllib takes 0.1 s to load

    return events_of_text(Server(url, api_key).get("/flight_recorder"), url)

"""`twostroke doctor`: what binds an engine, and which lever to pull; from a log, a dump, or a server that runs."""

from __future__ import annotations

import json
from pathlib import Path

from twostroke.cli.event_logs import check_source, events_of_text, read_run
from twostroke.cli.flags import JsonFlag
from twostroke.engine.event_sinks import one_history
from twostroke.events import Event


def doctor(
    *event_log: Path,
    url: str | None = None,
    api_key: str | None = None,
    link_bytes_per_s: float | None = None,
    json_output: JsonFlag = False,
) -> None:
    """Name what binds an engine, with the evidence, levers with their predicted gains, and faults.

    It only looks: nothing that serves is touched. No lever is offered that is predicted to bring less than 10 %, from
    fewer than 10 requests, or where simulating the run as it was recorded is off by more than 25 %.

    Parameters
    ----------
    event_log
        A file that --event-log wrote, or the dump of a server's flight recorder; of a server with --prefill and
        --decode the files of its processes. Of several runs in a file the last is meant.
    url
        A server that runs, such as http://127.0.0.1:8000, instead of a file; it knows its last minutes.
    api_key
        The server's key, if it has one.
    link_bytes_per_s
        Of the link to a second machine like this one: a prefill pool there is tried with it, where that is a lever.
    json_output
        One JSON object instead of text.
    """
    from twostroke.planner.doctor import diagnose
    from twostroke.planner.show_doctor import diagnosis_json, print_diagnosis

    check_source(event_log, url, "twostroke doctor FILE")
    events = read_run(event_log) if url is None else _recorded(url, api_key)
    with one_history(event_log) if url is None else one_history((url,), "url"):
        found = diagnose(events, link_bytes_per_s=link_bytes_per_s)
    if json_output:
        print(json.dumps(diagnosis_json(found)))
    else:
        print_diagnosis(found)


def _recorded(url: str, api_key: str | None) -> list[Event]:
    from twostroke.cli.explain import Server  # a client of HTTP takes a tenth of a second to load

    return events_of_text(Server(url, api_key).get("/flight_recorder"), url)

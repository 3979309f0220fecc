"""The last run of a history: a log file that several starts have written to holds one run behind the other.

A start begins another run where a process of that name, or an engine that is one process, has started before. One that
died is started again in the same run, and whoever starts it says that it died (`EngineLost`).
"""

from __future__ import annotations

from collections.abc import Sequence

from twostroke.events import EngineLost, EngineStarted, Event
from twostroke.explain.names import ENGINE, place_of


def last_run(events: Sequence[Event]) -> tuple[Sequence[Event], int]:
    """Return the events of the last run, and how many runs there are."""
    begin, num_runs, begun = 0, 1, set[str]()
    for i, event in enumerate(events):
        if isinstance(event, EngineStarted):
            name = _name(event.process)
            if name in begun:
                begin, num_runs, begun = i, num_runs + 1, set[str]()
            begun.add(name)
        elif isinstance(event, EngineLost):
            begun.discard(_name(event.process))
    return events[begin:], num_runs


def _name(process: str) -> str:
    """Return what starts once in a run: a process of a pool, or the engine that is one process, whatever its pid."""
    place = place_of(process)
    return place if place == ENGINE else process

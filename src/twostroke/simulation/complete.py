"""Checks that an event log is complete: a replay of one with gaps would wrongly blame the scheduler."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from twostroke.errors import InvalidParameter
from twostroke.events import (
    UNNAMED_LOG,
    EngineStarted,
    Event,
    EventsDropped,
    RequestArrived,
    StepCommitted,
    StepScheduled,
    gap_error,
)

_AS_WRITTEN = "Give a file that --event-log wrote, as it was written."


def check_complete(events: Iterable[Event]) -> None:
    """Raise if an event must be missing from a log.

    Steps are numbered without gaps. Each result belongs to the oldest step without one. Every running request has
    arrived. Events missing after the last one cannot be detected.

    Raises:
        InvalidParameter: an event is missing; the message says where the first gap is.
    """
    counted = _CompletenessCheck()
    for event in events:
        counted.take(event)


def check_times(events: Iterable[Event]) -> None:
    """Raise if an event is older than the engine's clock, which counts from 0.

    Raises:
        InvalidParameter: an event has a time below 0.
    """
    earliest_s = min((event.time_s for event in events), default=0.0)
    if earliest_s < 0:
        limit = f"must hold times from 0 s on, where an engine's clock begins; the earliest is {earliest_s:.3f} s"
        raise InvalidParameter("event_log", UNNAMED_LOG, limit, _AS_WRITTEN)


def check_usable(events: Sequence[Event]) -> None:
    """Raise if a history lacks the start of an engine, has impossible times, or has gaps that it does not announce.

    A flight recorder drops its oldest events and records that (EventsDropped); such a history only has to contain
    the start of each engine. Any other history must be complete for each process.

    Raises:
        InvalidParameter: an event is missing (the message says where), or times are impossible.
    """
    check_times(events)
    has_gap = any(isinstance(event, EventsDropped) for event in events)
    working = {event.process for event in events if isinstance(event, StepScheduled | StepCommitted)}
    counted = {process: _CompletenessCheck() for process in working}
    begun: set[str] = set()
    for event in events:
        if event.process not in working or isinstance(event, EventsDropped):
            continue
        if not has_gap:
            counted[event.process].take(event)
        elif isinstance(event, EngineStarted):
            begun.add(event.process)
        elif event.process not in begun:
            raise _gap(event.time_s, "the start of the engine")
    times_s = [event.time_s for event in events if isinstance(event, StepScheduled | StepCommitted)]
    if times_s and min(times_s) == max(times_s):
        limit = f"must hold steps that took time; all of them are at {times_s[0]:.3f} s"
        raise InvalidParameter("event_log", UNNAMED_LOG, limit, _AS_WRITTEN)


class _CompletenessCheck:
    def __init__(self) -> None:
        self._has_begun = False
        self._next_step = 0
        self._in_flight: deque[int] = deque()
        self._decided_s: deque[float] = deque()
        """Decision times of the steps in flight."""
        self._arrived: set[str] = set()

    def take(self, event: Event) -> None:
        if isinstance(event, EventsDropped):
            raise gap_error(event)
        if not self._has_begun and not isinstance(event, EngineStarted):
            raise _gap(event.time_s, "the start of the engine")
        match event:
            case EngineStarted():
                self._has_begun = True
                self._next_step, self._in_flight, self._arrived = 0, deque(), set()
                self._decided_s.clear()
            case RequestArrived():
                self._arrived.add(event.request_id)
            case StepScheduled():
                self._scheduled(event)
            case StepCommitted():
                self._committed(event)
            case _:
                pass

    def _scheduled(self, event: StepScheduled) -> None:
        batch = event.batch
        if batch.step != self._next_step:
            raise _gap(event.time_s, f"step {self._next_step}")
        strangers = [r.request_id for r in batch.requests if r.request_id not in self._arrived]
        if strangers:
            raise _gap(event.time_s, f"the arrival of request {strangers[0]!r}")
        self._next_step += 1
        if not batch.is_empty:
            self._in_flight.append(batch.step)
            self._decided_s.append(event.time_s)

    def _committed(self, event: StepCommitted) -> None:
        if not self._in_flight or self._in_flight[0] != event.step:
            step = self._in_flight[0] if self._in_flight else event.step
            raise _gap(event.time_s, f"the result of step {step}" if self._in_flight else f"step {step}")
        self._in_flight.popleft()
        decided_s = self._decided_s.popleft()
        if event.time_s < decided_s:
            limit = f"must hold results after their decisions; that of step {event.step} is at {event.time_s:.3f} s, "
            limit += f"decided at {decided_s:.3f} s"
            raise InvalidParameter("event_log", UNNAMED_LOG, limit, _AS_WRITTEN)


def _gap(time_s: float, missing: str) -> InvalidParameter:
    limit = f"must hold every event from the engine's start; it lacks {missing} before {time_s:.3f} s"
    return InvalidParameter("event_log", UNNAMED_LOG, limit, _AS_WRITTEN)

"""Whether a log is whole: a replay of one with holes would decide something else, and say that the scheduler had."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from twostroke.errors import InvalidParameter
from twostroke.events import (
    EngineStarted,
    Event,
    EventsDropped,
    RequestArrived,
    StepCommitted,
    StepScheduled,
    event_log_with_a_gap,
)


def check_whole(events: Iterable[Event]) -> None:
    """Refuses a log in which an event must be missing.

    Steps are numbered without gaps, each result is of the oldest step whose result is to come, and whoever runs has
    arrived. What is missing behind the last event, nobody can know.

    Raises:
        InvalidParameter: where the first hole is.
    """
    counted = _Counted()
    for event in events:
        counted.take(event)


class _Counted:
    def __init__(self) -> None:
        self._has_begun = False
        self._next_step = 0
        self._in_flight: deque[int] = deque()
        self._arrived: set[str] = set()

    def take(self, event: Event) -> None:
        if isinstance(event, EventsDropped):
            raise event_log_with_a_gap(event)
        if not self._has_begun and not isinstance(event, EngineStarted):
            raise _hole(event.time_s, "the start of the engine")
        match event:
            case EngineStarted():
                self._has_begun = True
                self._next_step, self._in_flight, self._arrived = 0, deque(), set()
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
            raise _hole(event.time_s, f"step {self._next_step}")
        strangers = [r.request_id for r in batch.requests if r.request_id not in self._arrived]
        if strangers:
            raise _hole(event.time_s, f"the arrival of request {strangers[0]!r}")
        self._next_step += 1
        if not batch.is_empty:
            self._in_flight.append(batch.step)

    def _committed(self, event: StepCommitted) -> None:
        if not self._in_flight or self._in_flight[0] != event.step:
            step = self._in_flight[0] if self._in_flight else event.step
            raise _hole(event.time_s, f"the result of step {step}" if self._in_flight else f"step {step}")
        self._in_flight.popleft()


def _hole(time_s: float, missing: str) -> InvalidParameter:
    return InvalidParameter(
        "event_log",
        f"a log that lacks {missing} before {time_s:.3f} s",
        "must hold every event from the engine's start",
        "Give a file that --event-log wrote, as it was written.",
    )

"""Requests as a simulation replays them: what the scheduler sees, and their known outcomes."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from twostroke.errors import InvalidParameter
from twostroke.events import (
    UNNAMED_LOG,
    EngineStarted,
    Event,
    EventsDropped,
    KVBlockChecked,
    KVImportBegan,
    MeasurementBegan,
    RequestArrived,
    RequestFinishedByCaller,
    StepCommitted,
    gap_error,
)
from twostroke.request import Arrival, FinishReason

_WHOLE = "Give a file that --event-log wrote, as it was written."


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """Request with a known outcome: it generates the same tokens under any schedule."""

    arrival: Arrival
    num_outputs: int
    """Tokens until its end; 0 if the caller ended it before the first one."""
    finish_reason: FinishReason = FinishReason.LENGTH
    output_hashes: tuple[bytes, ...] = ()
    """Hashes of the blocks that its outputs fill, for prefix cache lookups; default: none is looked up."""
    ended_after_s: float | None = None
    """Seconds from its arrival until its caller aborted it; None: it ends by its tokens."""

    def block_hash(self, index: int) -> bytes:
        """Return the hash of a full block of the prompt and output."""
        known = self.arrival.block_hashes
        if index < len(known):
            return known[index]
        behind = index - len(known)
        if behind < len(self.output_hashes):
            return self.output_hashes[behind]
        return struct.pack("<I", index) + self.arrival.request_id.encode()


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """One run of an engine as recorded in an event log."""

    started: EngineStarted
    requests: tuple[SimulatedRequest, ...]
    """Requests in order of arrival; times count from the first arrival."""
    unfinished: int
    """Number of requests that had not ended when the log did; they are assumed to end with the tokens they had."""


@dataclass(slots=True)
class _RecordedRequest:
    arrival: Arrival
    num_outputs: int = 0
    output_hashes: list[bytes] = field(default_factory=list[bytes])
    finish_reason: FinishReason | None = None
    ended_after_s: float | None = None


def read_recording(events: Iterable[Event]) -> RecordedRun:
    """Read the last run of a log, without the warm-up before its measurement began.

    Raises:
        InvalidParameter: the log has a gap, contains no engine start or no request, or comes from a pool of several
        engines.
    """
    reader = _Reader()
    for event in events:
        reader.take(event)
    return reader.recording()


class _Reader:
    def __init__(self) -> None:
        self._started: EngineStarted | None = None
        self._recorded: dict[str, _RecordedRequest] = {}
        self._live: dict[str, _RecordedRequest] = {}
        self._names = 0

    def take(self, event: Event) -> None:
        match event:
            case EngineStarted():
                self._started, self._recorded, self._live = event, {}, {}
            case MeasurementBegan():
                self._recorded, self._live = {}, {}
            case RequestArrived():
                self._arrived(event)
            case StepCommitted():
                self._committed(event)
            case RequestFinishedByCaller():
                self._end(event.request_id, event.reason, event.time_s)
            case KVBlockChecked():
                for request_id in event.suspects.ended:
                    self._end(request_id, FinishReason.ERROR, event.time_s)
            case EventsDropped():
                raise gap_error(event)
            case KVImportBegan():
                limit = "is that of an engine in a pool; one that ran by itself can be simulated from its log"
                raise InvalidParameter("event_log", event.process, limit)
            case _:
                pass

    def recording(self) -> RecordedRun:
        if self._started is None:
            raise InvalidParameter("event_log", UNNAMED_LOG, "must begin with the start of an engine", _WHOLE)
        if not self._recorded:
            raise InvalidParameter("event_log", UNNAMED_LOG, "must hold a request", _WHOLE)
        watched = sorted(self._recorded.values(), key=lambda one: one.arrival.arrival_time_s)
        begin_s = watched[0].arrival.arrival_time_s
        unfinished = sum(one.finish_reason is None for one in watched)
        return RecordedRun(self._started, tuple(_simulated(one, begin_s) for one in watched), unfinished)

    def _arrived(self, event: RequestArrived) -> None:
        self._names += 1  # an id may be used again once its request has ended
        watched = _RecordedRequest(replace(event.arrival, request_id=f"{self._names}:{event.request_id}"))
        self._recorded[watched.arrival.request_id] = self._live[event.request_id] = watched

    def _committed(self, event: StepCommitted) -> None:
        for commit in event.commits:
            watched = self._live.get(commit.request_id)
            if watched is None:
                continue
            watched.num_outputs += commit.num_tokens
            watched.output_hashes += commit.block_hashes
            if commit.finish_reason is not None:
                self._end(commit.request_id, commit.finish_reason, None)

    def _end(self, request_id: str, reason: FinishReason, time_s: float | None) -> None:
        watched = self._live.pop(request_id, None)
        if watched is not None:
            watched.finish_reason = reason
            if time_s is not None:
                watched.ended_after_s = max(0.0, time_s - watched.arrival.arrival_time_s)


def _simulated(watched: _RecordedRequest, begin_s: float) -> SimulatedRequest:
    arrival = watched.arrival
    # a request aborted midway is taken to generate as many tokens under any schedule
    by_tokens = watched.num_outputs > 0
    return SimulatedRequest(
        replace(arrival, arrival_time_s=arrival.arrival_time_s - begin_s, lend_as=None, import_id=None),
        watched.num_outputs,
        watched.finish_reason or FinishReason.ABORT,
        tuple(watched.output_hashes),
        None if by_tokens or watched.ended_after_s is None else watched.ended_after_s,
    )


def sped_up(requests: Sequence[SimulatedRequest], factor: float) -> tuple[SimulatedRequest, ...]:
    """Return the requests with all arrival times divided by the factor."""
    return tuple(
        replace(one, arrival=replace(one.arrival, arrival_time_s=one.arrival.arrival_time_s / factor))
        for one in requests
    )

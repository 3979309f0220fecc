"""Explains requests from the event log: where every millisecond of one went, and why."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Set

from twostroke.errors import InvalidParameter
from twostroke.events import (
    EngineLost,
    EngineStarted,
    Event,
    EventsDropped,
    KVBlockChecked,
    RequestArrived,
    RequestFinishedByCaller,
    StepCommitted,
    StepScheduled,
)
from twostroke.explain.engine_view import DecidedStep, EngineView
from twostroke.explain.lane import LaneBuilder
from twostroke.explain.segments import Lane, Timeline

_SEQUENCE_ID = re.compile(r"(?P<name>.*)#(?P<number>\d+)\.(?P<index>\d+)", re.DOTALL)
"""What OutputProcessor.add makes of a caller's name; other users of the engine have ids of their own."""


def request_of(sequence_id: str) -> str:
    """What the sequences of one request have in common.

    >>> request_of("my name#12.0"), request_of("plain")
    ('my name#12', 'plain')
    """
    match = _SEQUENCE_ID.fullmatch(sequence_id)
    return sequence_id if match is None else f"{match['name']}#{match['number']}"


def name_of(sequence_id: str) -> str:
    """What the caller named the request.

    >>> name_of("my name#12.0"), name_of("plain")
    ('my name', 'plain')
    """
    match = _SEQUENCE_ID.fullmatch(sequence_id)
    return sequence_id if match is None else match["name"]


class LaneReader:
    """Follows some of an engine's sequences through its events.

    Args:
        follows: whether a sequence, by its id, is one of them.
    """

    def __init__(self, follows: Callable[[str], bool]) -> None:
        self._follows = follows
        self._view = EngineView()
        self._live: dict[str, LaneBuilder] = {}
        self._began_at_start = False

    def take(self, event: Event) -> list[Lane]:
        """One event, in order; the lanes that end with it."""
        step = self._view.in_flight[0] if self._view.in_flight else None
        self._view.take(event)
        match event:
            case EngineStarted() | EngineLost():
                return self._lost(event)
            case EventsDropped():
                self._began_at_start = False
            case RequestArrived():
                self._arrived(event)
            case StepScheduled():
                self._scheduled(event)
            case StepCommitted():
                self._committed(event, step)
                return self._ended(event.time_s)
            case RequestFinishedByCaller():
                return self._finished_by_caller(event)
            case KVBlockChecked():
                for lane in self._live.values():
                    lane.kv_checked(event, self._view)
                return self._ended(event.time_s)
            case _:
                pass
        return []

    def living(self) -> list[Lane]:
        """Those that have not ended, up to the last event."""
        return [lane.lane(self._view.time_s) for lane in self._live.values()]

    def _lost(self, event: EngineStarted | EngineLost) -> list[Lane]:
        """Whoever is still there was run by an engine that died."""
        self._began_at_start = self._began_at_start or isinstance(event, EngineStarted)
        for lane in self._live.values():
            lane.lost(event.time_s, "the engine died")
        return self._ended(event.time_s)

    def _arrived(self, event: RequestArrived) -> None:
        if self._follows(event.request_id):
            lane = LaneBuilder(event.request_id, event.arrival.arrival_time_s, has_arrival=True)
            lane.arrived(event, self._view)
            self._live[event.request_id] = lane

    def _scheduled(self, event: StepScheduled) -> None:
        if not self._began_at_start:
            for share in event.batch.requests:
                if share.request_id not in self._live and self._follows(share.request_id):
                    self._live[share.request_id] = LaneBuilder(share.request_id, event.time_s, has_arrival=False)
        for lane in self._live.values():
            lane.scheduled(event, self._view)

    def _finished_by_caller(self, event: RequestFinishedByCaller) -> list[Lane]:
        self._known_by_their_end(event, [event.request_id])
        if event.request_id in self._live:
            self._live[event.request_id].finished_by_caller(event)
        return self._ended(event.time_s)

    def _committed(self, event: StepCommitted, running: DecidedStep | None) -> None:
        commits = {commit.request_id: commit for commit in event.commits}
        self._known_by_their_end(event, [i for i, c in commits.items() if c.finish_reason is not None])
        step = running if running is not None and running.batch.step == event.step else None
        for request_id, lane in self._live.items():
            lane.committed(event, step, commits.get(request_id))

    def _known_by_their_end(self, event: Event, request_ids: list[str]) -> None:
        """Of a sequence whose steps were all decided before the history begins, the end may be all that is left."""
        if not self._began_at_start:
            for request_id in request_ids:
                if request_id not in self._live and self._follows(request_id):
                    self._live[request_id] = LaneBuilder(request_id, event.time_s, has_arrival=False)

    def _ended(self, time_s: float) -> list[Lane]:
        ended = [lane for lane in self._live.values() if lane.is_finished]
        for lane in ended:
            del self._live[lane.sequence_id]
        return [lane.lane(time_s) for lane in ended]


def timeline_of(events: Iterable[Event], request_id: str, among: Set[str] | None = None) -> Timeline:
    """Explains one request.

    Args:
        events: of one engine, in order; they may begin in the middle of things.
        request_id: the caller's name for it, of which the last one is meant if there were several; or, as the event log
            has it, `name#number` for a certain one, or the id of a single sequence.
        among: sequences that can be meant; None: all.

    Raises:
        InvalidParameter: the events know no such request.
    """

    def is_meant(sequence_id: str) -> bool:
        is_known = among is None or sequence_id in among
        return is_known and request_id in (name_of(sequence_id), request_of(sequence_id), sequence_id)

    reader, begin_s = LaneReader(is_meant), None
    lanes: list[Lane] = []
    for event in events:
        begin_s = event.time_s if begin_s is None else begin_s
        lanes.extend(reader.take(event))
    lanes.extend(reader.living())
    if not lanes:
        since = "there are none" if begin_s is None else f"the first of them is of {begin_s:.3f} s"
        remedy = "Ask sooner, or keep more: an engine with --event-log keeps everything."
        raise InvalidParameter("request_id", request_id, f"is in none of these events; {since}", remedy)
    last = max(lanes, key=lambda lane: lane.begin_s).sequence_id
    of_last = {lane.sequence_id: lane for lane in lanes if request_of(lane.sequence_id) == request_of(last)}
    return Timeline(name_of(last), tuple(of_last[sequence_id] for sequence_id in sorted(of_last, key=_index)))


def _index(sequence_id: str) -> int:
    match = _SEQUENCE_ID.fullmatch(sequence_id)
    return 0 if match is None else int(match["index"])

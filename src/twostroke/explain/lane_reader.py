"""Follows sequences through the events of one process or of several, whose events come one between the other.

    at a process ──► between two ──► at another ──► … ──► ended

A sequence is at one process at a time: `RequestArrived` says where. It is between two when its prompt is computed and
another is to go on with it, or when the process that ran it is gone. Names carry all of that: names.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from twostroke.events import (
    EngineLost,
    EngineStarted,
    Event,
    EventsDropped,
    KVBlockChecked,
    KVImportBegan,
    KVImportEnded,
    RequestArrived,
    RequestFinishedByCaller,
    RequestRouted,
    StepCommitted,
    StepScheduled,
)
from twostroke.explain.causes import KVWay, of_resuming
from twostroke.explain.engine_view import DecidedStep, EngineView
from twostroke.explain.lane import LaneBuilder
from twostroke.explain.names import GATEWAY, is_of_pool, place_of, sequence_of
from twostroke.explain.remembered import Remembered
from twostroke.explain.segments import Lane
from twostroke.request import FinishReason


@dataclass(slots=True, eq=False)
class _Engine:
    """A place of which one process after the other runs sequences."""

    view: EngineView = field(default_factory=EngineView)
    live: dict[str, LaneBuilder] = field(default_factory=dict[str, LaneBuilder])
    """Who is there, by the name that it has there."""
    began_at_start: bool = False
    """The history knows it from its start on."""


class LaneReader:
    """Follows some sequences through the events.

    Args:
        follows: whether a sequence, by its id, is one of them.
    """

    def __init__(self, follows: Callable[[str], bool]) -> None:
        self._follows = follows
        self._engines: dict[str, _Engine] = {}
        self._between: dict[str, LaneBuilder] = {}
        """By sequence."""
        self._ways = Remembered[int, KVWay]()
        """Paths of prefixes that are being fetched, or that wait for their sequence; by import."""
        self._routes = Remembered[str, str]()
        """Why an attempt runs where it does, by its name there, until it has arrived."""
        self._told = Remembered[str, RequestFinishedByCaller]()
        """Ends of sequences that nobody has seen yet."""
        self._over = Remembered[str, bool]()
        """Sequences that ended between two processes: the second may not know when it takes one in."""
        self._loss = "the process that ran it is gone"
        self._time_s = float("-inf")

    def take(self, event: Event) -> list[Lane]:
        """One event, in order; the lanes that end with it."""
        self._time_s = max(self._time_s, event.time_s)
        if event.process == GATEWAY and not isinstance(event, EventsDropped):
            return self._gateway(event)
        engine = self._engines.setdefault(place_of(event.process), _Engine())
        step = engine.view.in_flight[0] if engine.view.in_flight else None
        engine.view.take(event)
        match event:
            case EngineStarted() | EngineLost():
                return self._lost(engine, event)
            case RequestArrived():
                self._arrived(engine, event)
                return []
            case StepScheduled():
                self._scheduled(engine, event)
                return []
            case StepCommitted():
                self._committed(engine, event, step)
            case RequestFinishedByCaller():
                self._finished_by_caller(engine, event)
            case KVBlockChecked():
                for lane in engine.live.values():
                    lane.kv_checked(event, engine.view)
            case _:
                self._note(event, engine.view)
                return []
        return self._moved(engine, event.time_s)

    def living(self) -> list[Lane]:
        """Those that have not ended, up to the last event."""
        here = [lane for engine in self._engines.values() for lane in engine.live.values()]
        return [lane.lane(self._time_s) for lane in (*here, *self._between.values())]

    # ------------------------------------------------------------------ what befalls a process

    def _lost(self, engine: _Engine, event: EngineStarted | EngineLost) -> list[Lane]:
        """Whoever is still there was run by a process that died."""
        engine.began_at_start = engine.began_at_start or isinstance(event, EngineStarted)
        if is_of_pool(event.process):
            return self._lost_of_pool(engine, event)
        for lane in engine.live.values():
            lane.lost(event.time_s, "the engine died")
        return self._moved(engine, event.time_s)

    def _lost_of_pool(self, engine: _Engine, event: EngineStarted | EngineLost) -> list[Lane]:
        """They go on elsewhere, and so do those that were to come here."""
        if isinstance(event, EngineLost):
            self._loss = event.cause
        here, lanes = place_of(event.process), list[Lane]()
        to_come = {import_id for import_id, way in self._ways.items() if way.place == here}
        for import_id in to_come:
            del self._ways[import_id]
        cause = of_resuming(self._loss)
        for other in self._engines.values():
            for lane in other.live.values():
                if other is engine or lane.lend_as in to_come:
                    lane.left(event.time_s, cause)
        for lane in self._between.values():
            if lane.lend_as in to_come:
                lane.left(event.time_s, cause)
        for other in self._engines.values():
            lanes += self._moved(other, event.time_s)
        return lanes

    def _note(self, event: Event, view: EngineView) -> None:
        """What is of use later."""
        match event:
            case EventsDropped():
                for engine in self._engines.values():
                    engine.began_at_start = False
            case KVImportBegan():
                way = KVWay(
                    place_of(event.process),
                    event.time_s,
                    dict(view.num_tokens_held),
                    view.last_step,
                    view.last_result_s,
                )
                self._ways.put(event.import_id, way)
            case KVImportEnded():
                way = self._ways.get(event.import_id, KVWay(place_of(event.process)))
                self._ways.put(event.import_id, replace(way, ended=event))
            case _:
                pass

    def _scheduled(self, engine: _Engine, event: StepScheduled) -> None:
        if not engine.began_at_start:
            for share in event.batch.requests:
                self._begin_in_the_middle(engine, share.request_id, event)
        for lane in engine.live.values():
            lane.scheduled(event, engine.view)

    def _committed(self, engine: _Engine, event: StepCommitted, running: DecidedStep | None) -> None:
        commits = {commit.request_id: commit for commit in event.commits}
        if not engine.began_at_start:  # of one whose steps were all decided before, the end may be all that is left
            for commit in event.commits:
                if commit.finish_reason is not None:
                    self._begin_in_the_middle(engine, commit.request_id, event)
        step = running if running is not None and running.batch.step == event.step else None
        for name, lane in engine.live.items():
            lane.committed(event, step, commits.get(name))

    # ------------------------------------------------------------------ what befalls a sequence

    def _arrived(self, engine: _Engine, event: RequestArrived) -> None:
        name, arrival = event.request_id, event.arrival
        sequence_id = sequence_of(name)
        if sequence_id in self._over or not self._follows(sequence_id):
            return
        import_id = arrival.import_id
        lane = self._between.pop(sequence_id, None) or self._taken_from_another(name)
        if lane is not None:
            way = None if import_id is None else self._ways.get(import_id)
            lane.goes_on(event, engine.view, way, self._loss)
        elif import_id is not None or (name != sequence_id and not engine.began_at_start):
            lane = LaneBuilder(name, event.time_s, event.process, has_arrival=False)
            lane.arrived(event, engine.view)
        else:
            lane = LaneBuilder(name, arrival.arrival_time_s, event.process, has_arrival=True)
            lane.arrived(event, engine.view)
        lane.routed(self._routes.pop(name, ""))
        if import_id is not None:
            self._ways.pop(import_id, None)
        lane.told = self._told.pop(sequence_id, lane.told)
        engine.live[name] = lane

    def _taken_from_another(self, name: str) -> LaneBuilder | None:
        """Of a new attempt: what another process has not ended yet, and is not to go on with."""
        if name == sequence_of(name):
            return None
        for engine in self._engines.values():
            for there, lane in engine.live.items():
                if lane.sequence_id == sequence_of(name) and there != name:
                    return engine.live.pop(there)
        return None

    def _finished_by_caller(self, engine: _Engine, event: RequestFinishedByCaller) -> None:
        if not engine.began_at_start:
            self._begin_in_the_middle(engine, event.request_id, event)
        lane = engine.live.get(event.request_id)
        if lane is None:
            return
        is_told = lane.told is not None or event.reason is not FinishReason.ABORT
        if is_told or not is_of_pool(event.process):
            lane.finished_by_caller(event)
        else:  # the gateway would have said so before, if nobody were to go on with it
            lane.left(event.time_s, of_resuming(self._loss), is_withdrawn=True)

    def _gateway(self, event: Event) -> list[Lane]:
        """A sequence has a place, or has ended, wherever it is; a process that runs it says when."""
        if isinstance(event, RequestRouted) and self._follows(sequence_of(event.request_id)):
            self._routes.put(event.request_id, event.reason)
        if not isinstance(event, RequestFinishedByCaller) or not self._follows(event.request_id):
            return []
        sequence_id = event.request_id
        lane = self._between.pop(sequence_id, None)
        if lane is not None:
            lane.finished_by_caller(event)
            self._over.put(sequence_id, True)
            return [lane.lane(event.time_s)]
        for engine in self._engines.values():
            for lane in engine.live.values():
                if lane.sequence_id == sequence_id:
                    lane.told = event
                    return []
        self._told.put(sequence_id, event)
        return []

    def _begin_in_the_middle(self, engine: _Engine, name: str, event: Event) -> None:
        """The history begins later than the sequence."""
        sequence_id = sequence_of(name)
        is_known = name in engine.live or sequence_id in self._between or sequence_id in self._over
        if not is_known and self._follows(sequence_id):
            engine.live[name] = LaneBuilder(name, event.time_s, event.process, has_arrival=False)

    def _moved(self, engine: _Engine, time_s: float) -> list[Lane]:
        """Lanes that have ended; who is between two processes now is no longer here."""
        ended: list[Lane] = []
        for name, lane in list(engine.live.items()):
            if lane.is_between and lane.told is not None:
                lane.finished_by_caller(lane.told)
            if lane.is_finished:
                ended.append(lane.lane(time_s))
            elif lane.is_between:
                self._between[lane.sequence_id] = lane
            else:
                continue
            del engine.live[name]
        return ended

"""Reader that follows sequences through the interleaved events of one or more processes.

    at a process ──► between two ──► at another ──► … ──► ended

A sequence is at one process at a time, which `RequestArrived` names. It is between two processes when its prompt is
computed and another process is to continue it, or when the process that ran it is gone. Its names tell these
attempts apart: names.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from twostroke.events import (
    EngineLost,
    EngineStarted,
    Event,
    KVBlockChecked,
    KVImportBegan,
    KVImportEnded,
    RequestArrived,
    RequestFinishedByCaller,
    RequestRouted,
    StepCommitted,
    StepScheduled,
)
from twostroke.explain.bounded_dict import BoundedDict
from twostroke.explain.causes import KVTransferPath, resume_cause
from twostroke.explain.lane import LaneBuilder
from twostroke.explain.names import GATEWAY, is_pool_process, sequence_of
from twostroke.explain.run_state import EventChanges, PlaceState, RunState
from twostroke.explain.segments import Lane
from twostroke.request import FinishReason


class LaneReader:
    """Reader that builds the lanes of selected sequences.

    Args:
        follows: returns whether a sequence, by its id, is selected.
    """

    def __init__(self, follows: Callable[[str], bool]) -> None:
        self._follows = follows
        self._run = RunState()
        self._lanes: dict[str, LaneBuilder] = {}
        """Sequences that have not ended, by id."""
        self._transfer_paths = BoundedDict[int, KVTransferPath]()
        """Paths of prefixes that are being fetched or that wait for their sequence, by import."""
        self._routes = BoundedDict[str, str]()
        """Routing reason of an attempt, by its name there, until it has arrived."""
        self._loss = "the process that ran it is gone"
        self._time_s = float("-inf")

    def take(self, event: Event) -> list[Lane]:
        """Process one event, in order, and return the lanes that end with it."""
        self._time_s = max(self._time_s, event.time_s)
        taken = self._run.take(event)
        place = taken.place
        match event:
            case EngineStarted() | EngineLost():
                self._lost(place, event)
            case RequestArrived():
                self._arrived(place, event)
            case StepScheduled():
                self._scheduled(place, event)
                return []
            case StepCommitted():
                self._committed(event, taken)
            case RequestFinishedByCaller():
                self._finished_by_caller(place, event)
            case KVBlockChecked():
                for lane in self._here(place):
                    lane.kv_checked(event, place)
            case _:
                self._note(event, place)
        return self._ended(event.time_s)

    def living(self) -> list[Lane]:
        """Return the lanes of sequences that have not ended, up to the last event."""
        return [lane.lane(self._time_s) for lane in self._lanes.values()]

    def _here(self, place: PlaceState) -> list[LaneBuilder]:
        return [lane for lane in self._lanes.values() if lane.place is place and not lane.is_in_transit]

    # ------------------------------------------------------------------ what befalls a process

    def _lost(self, place: PlaceState, event: EngineStarted | EngineLost) -> None:
        """Handle sequences at, or on their way to, a process that died; those of a pool go on elsewhere."""
        if not is_pool_process(event.process):
            for lane in self._here(place):
                lane.lost(event.time_s, "the engine died")
            return
        if isinstance(event, EngineLost):
            self._loss = event.cause
        to_come = {import_id for import_id, way in self._transfer_paths.items() if way.place == place.name}
        for import_id in to_come:
            del self._transfer_paths[import_id]
        for lane in self._lanes.values():
            if lane.lend_as in to_come or (lane.place is place and not lane.is_in_transit):
                lane.left(event.time_s, resume_cause(self._loss))

    def _note(self, event: Event, place: PlaceState) -> None:
        """Keep information for later events."""
        match event:
            case RequestRouted() if self._follows(sequence_of(event.request_id)):
                self._routes.put(event.request_id, event.reason)
            case KVImportBegan():
                held, step, stepped_s = place.num_tokens_held, place.last_step, place.last_result_s
                self._transfer_paths.put(
                    event.import_id, KVTransferPath(place.name, event.time_s, held, step, stepped_s)
                )
            case KVImportEnded():
                way = self._transfer_paths.get(event.import_id, KVTransferPath(place.name))
                self._transfer_paths.put(event.import_id, replace(way, ended=event))
            case _:
                pass

    def _scheduled(self, place: PlaceState, event: StepScheduled) -> None:
        self._start_unknown_lanes(place, (share.request_id for share in event.batch.requests), event)
        for lane in self._here(place):
            lane.scheduled(event, place)

    def _committed(self, event: StepCommitted, taken: EventChanges) -> None:
        commits = {commit.request_id: commit for commit in event.commits}
        # a sequence whose steps were all decided before the history begins may appear only with its end
        ended = (commit.request_id for commit in event.commits if commit.finish_reason is not None)
        self._start_unknown_lanes(taken.place, ended, event)
        for lane in self._here(taken.place):
            lane.committed(event, taken.step, commits.get(lane.current_name))

    # ------------------------------------------------------------------ what befalls a sequence

    def _arrived(self, place: PlaceState, event: RequestArrived) -> None:
        name, arrival = event.request_id, event.arrival
        sequence_id = sequence_of(name)
        if self._run.is_over(sequence_id) or not self._follows(sequence_id):
            return
        import_id = arrival.import_id
        goes_on = import_id is not None or name != sequence_id
        lane = self._lanes.get(sequence_id)
        if lane is not None and (lane.is_in_transit or goes_on):
            way = None if import_id is None else self._transfer_paths.get(import_id)
            lane.goes_on(event, place, way, self._loss)
        else:
            is_known = import_id is None and (name == sequence_id or place.is_whole)
            begin_s = arrival.arrival_time_s if is_known else event.time_s
            lane = self._lanes[sequence_id] = LaneBuilder(name, begin_s, event.process, place, has_arrival=is_known)
            lane.arrived(event, place)
        lane.told = place.requests[name].told
        lane.routed(self._routes.pop(name, ""))
        if import_id is not None:
            self._transfer_paths.pop(import_id, None)

    def _finished_by_caller(self, place: PlaceState, event: RequestFinishedByCaller) -> None:
        """End a sequence: the process that runs it reports its end; between two processes the gateway does."""
        is_gateway = place.name == GATEWAY
        if not is_gateway:
            self._start_unknown_lanes(place, [event.request_id], event)
        lane = self._lanes.get(sequence_of(event.request_id))
        if lane is None:
            return
        if is_gateway and not lane.is_in_transit:
            lane.told = event
        elif is_gateway:
            lane.finished_by_caller(event)
        elif lane.place is place and lane.current_name == event.request_id and not lane.is_in_transit:
            if lane.told is not None or event.reason is not FinishReason.ABORT or not is_pool_process(event.process):
                lane.finished_by_caller(event)
            else:  # the gateway reports an abort first, unless another process is to continue the sequence
                lane.left(event.time_s, resume_cause(self._loss), is_withdrawn=True)

    def _start_unknown_lanes(self, place: PlaceState, names: Iterable[str], event: Event) -> None:
        """Start lanes for sequences that began before the history."""
        if place.is_whole:
            return
        for name in names:
            sequence_id = sequence_of(name)
            if sequence_id not in self._lanes and not self._run.is_over(sequence_id) and self._follows(sequence_id):
                lane = LaneBuilder(name, event.time_s, event.process, place, has_arrival=False)
                self._lanes[sequence_id] = lane

    def _ended(self, time_s: float) -> list[Lane]:
        """Remove and return the lanes that have ended."""
        ended: list[LaneBuilder] = []
        for lane in self._lanes.values():
            if lane.is_in_transit and lane.told is not None:
                lane.finished_by_caller(lane.told)
            if lane.is_finished:
                ended.append(lane)
        for lane in ended:
            del self._lanes[lane.sequence_id]
        return [lane.lane(time_s) for lane in ended]

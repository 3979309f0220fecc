"""Chrome trace of the engine's steps, for Perfetto and chrome://tracing.

    process "steps"      one slice per step; counters: tokens, queue, KV blocks; with pools, one process per place
    process "requests"   one track per sequence: the segments of its timeline with their reasons

The format is Google's "Trace Event Format" (2016): "X" are complete slices, "C" counters, "M" names; times are
microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from twostroke.events import EngineStarted, Event, StepCommitted, StepScheduled
from twostroke.explain.lane_reader import LaneReader
from twostroke.explain.names import ENGINE, GATEWAY, place_of
from twostroke.explain.segments import Lane
from twostroke.plain_words import counted

_STEPS, _REQUESTS = 1, 2
"""Process ids in the trace."""


def trace_of(events: Iterable[Event]) -> dict[str, Any]:
    """Return the events as one JSON object in the trace format.

    Args:
        events: events of an engine and all of its processes, in order; they may begin in the middle of a run.
    """
    by_place, reader = {ENGINE: _Steps(_STEPS)}, LaneReader(lambda _: True)
    lanes: list[Lane] = []
    for event in events:
        place = place_of(event.process)
        if place != GATEWAY:
            if place not in by_place:
                by_place[place] = _Steps(_REQUESTS + len(by_place))
            by_place[place].take(event)
        lanes.extend(reader.take(event))
    lanes.extend(reader.living())
    steps = [record for place in by_place.values() for record in place.records]
    begin_s = min([lane.begin_s for lane in lanes] + [r["ts"] for r in steps], default=0.0)
    records = [*_names(by_place), *steps]
    for thread, lane in enumerate(sorted(lanes, key=lambda lane: (lane.begin_s, lane.sequence_id)), start=1):
        records += _lane_records(lane, thread)
    return {"displayTimeUnit": "ms", "traceEvents": [_in_microseconds(record, begin_s) for record in records]}


class _Steps:
    """Slices and counters of the steps of one place; times still in seconds."""

    def __init__(self, process: int) -> None:
        self.process = process
        self.records: list[dict[str, Any]] = []
        self._decided: dict[int, StepScheduled] = {}
        self._num_blocks: int | None = None
        self._last_result_s = float("-inf")

    def take(self, event: Event) -> None:
        match event:
            case EngineStarted():
                self._decided.clear()
                self._num_blocks = event.num_blocks
            case StepScheduled():
                self._scheduled(event)
            case StepCommitted() if event.step in self._decided:
                self._committed(self._decided.pop(event.step), event)
            case _:
                pass

    def _scheduled(self, event: StepScheduled) -> None:
        batch = event.batch
        if not batch.is_empty:
            self._decided[batch.step] = event
        tokens = {"prefill": batch.num_prefill_tokens, "decode": batch.num_decode_tokens}
        self._count("tokens", event.time_s, tokens)
        self._count("queue", event.time_s, {"waiting": batch.num_waiting, "running": batch.num_running})
        blocks = {"free": batch.num_free_blocks}
        if self._num_blocks is not None:
            blocks = {"used": self._num_blocks - batch.num_free_blocks, **blocks}
        self._count("KV blocks", event.time_s, blocks)

    def _committed(self, decided: StepScheduled, event: StepCommitted) -> None:
        # a step that was decided while another ran began when that one ended
        start_s = max(decided.time_s, self._last_result_s)
        self._last_result_s = event.time_s
        batch = decided.batch
        args: dict[str, Any] = {
            "prefill tokens": batch.num_prefill_tokens,
            "decode tokens": batch.num_decode_tokens,
            "requests": len(batch.requests),
            "limited by": str(batch.limited_by),
            "operators ms": event.operator_time_s * 1e3,
        }
        if batch.wait_reason:
            args["head of the queue"] = f"{batch.head_request_id}: {batch.wait_reason}"
        if batch.preemptions:
            args["preempted"] = [f"{p.request_id} for {p.by_request_id}" for p in batch.preemptions]
        if batch.drafts is not None:
            args["drafting"] = str(batch.drafts.reason)
        if decided.cost is not None:
            args["bound by"] = decided.cost.bound
        self.records.append(_slice(self.process, 1, f"step {batch.step}", start_s, event.time_s, args))

    def _count(self, name: str, time_s: float, values: dict[str, int]) -> None:
        self.records.append({"ph": "C", "pid": self.process, "name": name, "ts": time_s, "args": values})


def _names(by_place: Mapping[str, _Steps]) -> list[dict[str, Any]]:
    of_pools = [
        _name("process_name", steps.process, 0, f"steps of {place}")
        for place, steps in sorted(by_place.items())
        if place != ENGINE
    ]
    first = [_name("process_name", _STEPS, 0, "steps")] if by_place[ENGINE].records or not of_pools else []
    return [*first, _name("process_name", _REQUESTS, 0, "requests"), *of_pools]


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": kind, "args": {"name": name}}


def _lane_records(lane: Lane, thread: int) -> list[dict[str, Any]]:
    records = [_name("thread_name", _REQUESTS, thread, lane.sequence_id)]
    for segment in lane.segments:
        args: dict[str, Any] = {"why": segment.reason}
        if segment.process:
            args["process"] = segment.process
        args |= {culprit.request_id: counted(culprit.num_tokens, "token") for culprit in segment.because_of}
        records.append(_slice(_REQUESTS, thread, str(segment.label), segment.start_s, segment.end_s, args))
    return records


def _slice(process: int, thread: int, name: str, start_s: float, end_s: float, args: dict[str, Any]) -> dict[str, Any]:
    where = {"ph": "X", "pid": process, "tid": thread, "name": name}
    return {**where, "ts": start_s, "dur": end_s - start_s, "args": args}


def _in_microseconds(record: dict[str, Any], begin_s: float) -> dict[str, Any]:
    scaled = dict(record)
    if "ts" in scaled:
        scaled["ts"] = (scaled["ts"] - begin_s) * 1e6
    if "dur" in scaled:
        scaled["dur"] *= 1e6
    return scaled

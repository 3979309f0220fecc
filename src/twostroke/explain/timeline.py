"""Explains requests from the event log: where every millisecond of one went, and why."""

from __future__ import annotations

from collections.abc import Iterable, Set

from twostroke.errors import InvalidParameter
from twostroke.events import Event
from twostroke.explain.lane_reader import LaneReader
from twostroke.explain.names import index_of, name_of, request_of
from twostroke.explain.segments import Lane, Timeline


def timeline_of(events: Iterable[Event], request_id: str, among: Set[str] | None = None) -> Timeline:
    """Explains one request.

    Args:
        events: of an engine, of all of its processes, in order; they may begin in the middle of things.
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
        remedy = (
            "Ask sooner, or keep more: an engine with --event-log keeps everything. Answers to several prompts are "
            "known one by one: ID-0, ID-1."
        )
        raise InvalidParameter("request_id", request_id, f"is in none of these events; {since}", remedy)
    last = max(lanes, key=lambda lane: lane.begin_s).sequence_id
    of_last = {lane.sequence_id: lane for lane in lanes if request_of(lane.sequence_id) == request_of(last)}
    return Timeline(name_of(last), tuple(of_last[sequence_id] for sequence_id in sorted(of_last, key=index_of)))

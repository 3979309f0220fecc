"""Explanation of requests from the event log: where every millisecond went, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Set

from twostroke.errors import InvalidParameter
from twostroke.events import Event, RequestArrived
from twostroke.explain.lane_reader import LaneReader
from twostroke.explain.names import index_of, name_of, request_of, sequence_of
from twostroke.explain.segments import Culprit, Lane, Segment, Timeline


def timeline_of(events: Iterable[Event], request_id: str, among: Set[str] | None = None) -> Timeline:
    """Return the timeline of one request.

    Args:
        events: events of an engine and all of its processes, in order; they may begin in the middle of a run.
        request_id: the caller's name, of which the last request counts if several share it; or, as in the event log,
        `name#number` for a certain request, or the id of a single sequence.
        among: ids of sequences to consider; None: all.

    Raises:
        InvalidParameter: the request is in none of the events.
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


# ---------------------------------------------------------------------- as a tenant may see it


MASKED_REQUEST = "another tenant's request"


def timeline_for_tenant(events: Iterable[Event], request_id: str, tenant: str) -> Timeline:
    """Return the timeline of a request for the tenant that owns it; ids of other tenants' requests are masked.

    Args:
        events: events of one engine, in order.
        request_id: as for timeline_of; if several tenants have used the name, the tenant's own request counts.
        tenant: tenant that asks.

    Raises:
        InvalidParameter: the tenant has no such request; the error is that of an unknown request.
    """
    kept = list(events)
    arrivals = [event for event in kept if isinstance(event, RequestArrived)]
    mine = [event.request_id for event in arrivals if event.arrival.tenant == tenant]
    own = {*mine, *map(sequence_of, mine)}
    others = {event.request_id for event in arrivals} - own
    timeline = timeline_of(kept, request_id, own)
    lanes = tuple(
        dataclasses.replace(lane, segments=tuple(_masked(segment, own, others) for segment in lane.segments))
        for lane in timeline.lanes
    )
    return dataclasses.replace(timeline, lanes=lanes)


def _masked(segment: Segment, own: Set[str], others: Set[str]) -> Segment:
    culprits = tuple(c if c.request_id in own else Culprit(MASKED_REQUEST, c.num_tokens) for c in segment.because_of)
    reason = segment.reason
    for culprit in segment.because_of:
        if culprit.request_id not in own:
            reason = reason.replace(culprit.request_id, MASKED_REQUEST)
    if any(sequence_id in reason for sequence_id in others):
        reason = f"{segment.label}, because of {MASKED_REQUEST}"
    return dataclasses.replace(segment, reason=reason, because_of=culprits)

"""A timeline as one tenant may see it: its own requests only, and nobody else's by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Set

from twostroke.events import Event, RequestArrived
from twostroke.explain.names import sequence_of
from twostroke.explain.segments import Culprit, Segment, Timeline
from twostroke.explain.timeline import timeline_of

SOMEBODY = "another tenant's request"


def timeline_for_tenant(events: Iterable[Event], request_id: str, tenant: str) -> Timeline:
    """Explains a request to the tenant whose it is.

    Args:
        events: of one engine, in order.
        request_id: as for timeline_of; where several tenants have used the name, the tenant's own is meant.
        tenant: who asks.

    Raises:
        InvalidParameter: the tenant has no such request; the same as where nobody has.
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
    culprits = tuple(c if c.request_id in own else Culprit(SOMEBODY, c.num_tokens) for c in segment.because_of)
    reason = segment.reason
    for culprit in segment.because_of:
        if culprit.request_id not in own:
            reason = reason.replace(culprit.request_id, SOMEBODY)
    if any(sequence_id in reason for sequence_id in others):
        reason = f"{segment.label}, because of {SOMEBODY}"
    return dataclasses.replace(segment, reason=reason, because_of=culprits)

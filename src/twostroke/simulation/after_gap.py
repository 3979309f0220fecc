"""The part of a history after its gap, with synthetic arrivals for requests that were already there.

A flight recorder drops its oldest events, so the arrivals of requests that run or wait at the gap are lost. Each of
them appears in a later batch. It then gets an arrival at the time of the gap, with the tokens that it had:

    dropped … | EngineStarted  EventsDropped  | step 812: a, b decode | … | step 840: admits c | …
                                 ^ a, b and c arrive here

A simulation computes the prefixes of a and b once more, and a back-test shows how much that matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twostroke.batch import ScheduledRequest, Stroke
from twostroke.events import (
    EngineStarted,
    Event,
    EventsDropped,
    RequestArrived,
    RequestFinishedByCaller,
    StepCommitted,
    StepScheduled,
)
from twostroke.request import Arrival


def after_gap(events: Sequence[Event]) -> list[Event]:
    """Return the events with arrivals in place of the last gap; unchanged if there is no gap."""
    place = max((i for i, event in enumerate(events) if isinstance(event, EventsDropped)), default=None)
    if place is None:
        return list(events)
    head = [event for event in events[:place] if isinstance(event, EngineStarted)]
    gap, behind = events[place], events[place + 1 :]
    strangers = _UnknownRequests()
    for event in behind:
        strangers.take(event)
    arrivals = (one.arrival(request_id, gap.time_s, gap.process) for request_id, one in strangers.found.items())
    whole = [event for event in behind if not (isinstance(event, StepCommitted) and event.step in strangers.undecided)]
    return [*head, *arrivals, *whole]


@dataclass(slots=True)
class _UnknownRequest:
    """A request that arrived before the gap."""

    num_tokens: int
    """Number of its tokens that are known when it first appears."""
    num_outputs: int = 0
    """Number of its output tokens after the gap."""

    def arrival(self, request_id: str, time_s: float, process: str) -> RequestArrived:
        arrival = Arrival(request_id, time_s, self.num_tokens, max(1, self.num_outputs))
        return RequestArrived(time_s, process, request_id, arrival)


class _UnknownRequests:
    """Finder of the requests that appear without an arrival."""

    def __init__(self) -> None:
        self.found: dict[str, _UnknownRequest] = {}
        """Strangers in the order of their first appearance."""
        self.undecided: set[int] = set()
        """Steps whose decision was lost in the gap."""
        self._arrived: set[str] = set()
        self._gone: set[str] = set()
        self._decided: set[int] = set()

    def take(self, event: Event) -> None:
        match event:
            case RequestArrived():
                self._arrived.add(event.request_id)
            case RequestFinishedByCaller():
                self._end(event.request_id)
            case StepScheduled():
                self._scheduled(event)
            case StepCommitted():
                self._committed(event)
            case _:
                pass

    def _scheduled(self, event: StepScheduled) -> None:
        batch = event.batch
        self._decided.add(batch.step)
        brought = {one.request_id: one.num_tokens for one in batch.admitted}
        for share in batch.requests:
            if share.request_id not in self._arrived and share.request_id not in self.found:
                num_tokens = brought.get(share.request_id, _num_tokens(share))
                self.found[share.request_id] = _UnknownRequest(num_tokens)

    def _committed(self, event: StepCommitted) -> None:
        if event.step not in self._decided:
            self.undecided.add(event.step)
            return
        for commit in event.commits:
            stranger = self.found.get(commit.request_id)
            if stranger is not None and commit.request_id not in self._gone:
                stranger.num_outputs += commit.num_tokens
            if commit.finish_reason is not None:
                self._end(commit.request_id)

    def _end(self, request_id: str) -> None:
        if request_id in self.found:
            self._gone.add(request_id)


def _num_tokens(share: ScheduledRequest) -> int:
    """Return the known tokens of a request that runs at the gap: the prefix, and the tokens that this step computes."""
    num_new = share.num_scheduled_tokens if share.stroke is Stroke.PREFILL else 1
    return share.num_computed_tokens + num_new

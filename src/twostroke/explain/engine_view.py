"""What the events say of the engine as a whole: who runs, who holds how many tokens, which steps are in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from twostroke.batch import Stroke
from twostroke.events import (
    EngineLost,
    EngineStarted,
    Event,
    KVBlockChecked,
    RequestArrived,
    RequestFinishedByCaller,
    StepCommitted,
    StepScheduled,
)
from twostroke.request import Arrival


class DecidedStep:
    """A step, with its shares by request and what its lanes ask of it."""

    __slots__ = ("batch", "num_tokens", "prefills", "shares", "time_s")

    def __init__(self, event: StepScheduled) -> None:
        self.time_s = event.time_s
        self.batch = event.batch
        self.shares = {share.request_id: share for share in self.batch.requests}
        self.num_tokens = self.batch.num_tokens
        self.prefills: Mapping[str, int] = {
            share.request_id: share.num_scheduled_tokens
            for share in self.batch.requests
            if share.stroke is Stroke.PREFILL
        }
        """Prompt tokens that it computes, by request."""

    def prefills_of_others(self, request_id: str) -> Mapping[str, int]:
        """Prompt tokens that it computes for anybody else."""
        if request_id not in self.prefills:
            return self.prefills
        return {other: num_tokens for other, num_tokens in self.prefills.items() if other != request_id}


class EngineView:
    """Follows an engine, event by event."""

    def __init__(self) -> None:
        self.arrivals: dict[str, Arrival] = {}
        """Of requests that have not ended, as far as the history knows them."""
        self.num_tokens_held: dict[str, int] = {}
        """Of running requests: tokens that have a place in KV memory."""
        self.in_flight: deque[DecidedStep] = deque()
        """Decided, results to come; the first is running."""
        self.last_step: DecidedStep | None = None
        """The last one that gave its result."""
        self.last_result_s = float("-inf")
        self.time_s = float("-inf")
        """Of the last event."""

    def take(self, event: Event) -> None:
        """One event, in order."""
        self.time_s = max(self.time_s, event.time_s)
        match event:
            case EngineStarted() | EngineLost():
                self.arrivals.clear()
                self.num_tokens_held.clear()
                self.in_flight.clear()
            case RequestArrived():
                self.arrivals[event.request_id] = event.arrival
            case StepScheduled():
                self._scheduled(event)
            case StepCommitted():
                self._committed(event)
            case RequestFinishedByCaller():
                self._forget(event.request_id)
            case KVBlockChecked():
                for request_id in event.suspects.started_over:
                    self.num_tokens_held.pop(request_id, None)
                for request_id in event.suspects.ended:
                    self._forget(request_id)
            case _:
                pass

    def step_running_at(self, time_s: float) -> DecidedStep | None:
        """The step that was running at a moment that is not long ago."""
        if self.in_flight:
            return self.in_flight[0]
        return self.last_step if self.last_result_s > time_s else None

    def _scheduled(self, event: StepScheduled) -> None:
        batch = event.batch
        for preemption in batch.preemptions:
            self.num_tokens_held.pop(preemption.request_id, None)
        for share in batch.requests:
            self.num_tokens_held[share.request_id] = share.num_computed_tokens + share.num_scheduled_tokens
        if not batch.is_empty:
            self.in_flight.append(DecidedStep(event))

    def _committed(self, event: StepCommitted) -> None:
        while self.in_flight and self.in_flight[0].batch.step <= event.step:
            self.last_step = self.in_flight.popleft()
            self.last_result_s = event.time_s
        for commit in event.commits:
            if commit.finish_reason is not None:
                self._forget(commit.request_id)

    def _forget(self, request_id: str) -> None:
        self.arrivals.pop(request_id, None)
        self.num_tokens_held.pop(request_id, None)

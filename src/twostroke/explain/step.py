"""A step as the event log describes it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from twostroke.batch import ScheduledRequest, Stroke
from twostroke.events import StepScheduled


class DecidedStep:
    """A decided step and the figures of its result."""

    def __init__(self, event: StepScheduled) -> None:
        self.time_s = event.time_s
        self.batch = event.batch
        self.cost = event.cost
        self.done_s: float | None = None
        """Time of its result."""
        self.num_generated = 0
        """Tokens of its result."""

    @property
    def floor_s(self) -> float | None:
        """Return the least time that the step could take.

        A step faster than its limits allow raises them: its floor is then the time that it took.
        """
        if self.cost is None:
            return None
        return self.cost.seconds if self.done_s is None else min(self.cost.seconds, self.done_s - self.time_s)

    @cached_property
    def shares(self) -> Mapping[str, ScheduledRequest]:
        """Scheduled requests by id."""
        return {share.request_id: share for share in self.batch.requests}

    @cached_property
    def num_tokens(self) -> int:
        """Number of query tokens."""
        return self.batch.num_tokens

    @cached_property
    def prefills(self) -> Mapping[str, int]:
        """Prompt tokens that the step computes, by request."""
        shares = (share for share in self.batch.requests if share.stroke is Stroke.PREFILL)
        return {share.request_id: share.num_scheduled_tokens for share in shares}

    def prefills_of_others(self, request_id: str) -> Mapping[str, int]:
        """Return the prompt tokens that the step computes for other requests, by request."""
        if request_id not in self.prefills:
            return self.prefills
        return {other: num_tokens for other, num_tokens in self.prefills.items() if other != request_id}

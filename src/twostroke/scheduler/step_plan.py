"""A step while it is being decided: shares are taken, sometimes taken back, and finally become a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from twostroke.batch import (
    AdmittedRequest,
    BlockTableUpdate,
    Commit,
    DraftDecision,
    KVMoves,
    Limit,
    Preemption,
    ScheduledBatch,
    ScheduledRequest,
    StepDurations,
    Stroke,
)
from twostroke.kv_cache.prefix_cache import CachedPrefix
from twostroke.kv_check import KVCheck
from twostroke.request import Request
from twostroke.scheduler.policy import QueueOrder


class TokenBudget:
    """Query tokens that a step may still take."""

    __slots__ = ("limit", "num_prefills", "remaining")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.remaining = limit
        """Tokens left; below zero after a whole prompt that is longer than the budget."""
        self.num_prefills = 0
        """Number of prefills that draw on the budget."""


@dataclass(frozen=True, slots=True)
class AdmissionRefusal:
    """Reason why the head of the queue waits."""

    limit: Limit
    reason: str


class ChunkedPrefill:
    """Rule that takes as many prompt tokens as the budget has left: no step exceeds it, so decodes are never delayed
    longer."""

    def __init__(self, max_num_batched_tokens: int) -> None:
        self._limit = max_num_batched_tokens

    def num_tokens_now(self, num_tokens_left: int, budget: TokenBudget) -> int:
        """Return the rest of the prompt or of the budget, whichever is shorter; at 0 the request waits."""
        return min(num_tokens_left, budget.remaining)

    def max_tokens_per_step(self, num_tokens: int) -> int:
        """Return the most tokens that one step may take of a request of `num_tokens`."""
        return min(num_tokens, self._limit)


@dataclass(frozen=True, slots=True)
class AdmissionPlan:
    """Terms on which the head of the queue starts."""

    cached: CachedPrefix
    num_promised_blocks: int
    num_tokens: int
    """Tokens computed in its first step."""


class StepShare(NamedTuple):
    """A request's share of a step; kept until the step's outcome is known."""

    request: Request
    scheduled: ScheduledRequest
    num_preemptions: int
    """Preemptions of the request so far. If there are more later, the blocks of this share are no longer the
    request's."""

    def check(self, commit: Commit) -> None:
        """Check that a request that continues has got what its share promised, and has tokens left to generate."""
        request, scheduled, _ = self
        fewest, most = (1, 1 + scheduled.num_draft_tokens) if scheduled.samples_token else (0, 0)
        assert fewest <= commit.num_tokens <= most, f"{request.request_id}: {commit.num_tokens} tokens of {scheduled}"
        assert request.num_output_tokens < request.arrival.max_tokens, (
            f"{request.request_id} has its {request.arrival.max_tokens} tokens and no finish reason"
        )


class StepPlan:
    """Shares of a step, and the reasons that kept requests out of it.

    A share counts as computed from the moment it is taken: the next step is decided before this one's outcome is known.
    """

    __slots__ = (
        "admitted",
        "budget",
        "drafts",
        "is_cut",
        "is_short",
        "kv_checks",
        "kv_moves",
        "order",
        "preemptions",
        "refusal",
        "shares",
    )

    def __init__(self, token_budget: int, order: QueueOrder) -> None:
        self.order = order
        """Tier that is being scheduled: the foreground, then the background."""
        self.budget = TokenBudget(token_budget)
        self.shares: dict[str, StepShare] = {}
        self.admitted: list[AdmittedRequest] = []
        self.preemptions: list[Preemption] = []
        self.refusal: AdmissionRefusal | None = None
        """Reason why the head of the queue was not admitted."""
        self.is_cut = False
        """Whether the budget cut a prefill short."""
        self.is_short = False
        """Whether a request was preempted for another of its tier: there is not enough KV even for them."""
        self.drafts: DraftDecision | None = None
        self.kv_checks: tuple[KVCheck, ...] = ()
        self.kv_moves: KVMoves | None = None

    def take(self, request: Request, stroke: Stroke, num_tokens: int, updates: tuple[BlockTableUpdate, ...]) -> None:
        """Give a request the next `num_tokens` of its tokens; its blocks reach that far already."""
        start = request.num_computed_tokens
        end = start + num_tokens
        num_drafts = num_tokens - 1 if stroke is Stroke.DECODE else 0
        samples = end - num_drafts == request.num_tokens + request.num_pending_tokens
        scheduled = ScheduledRequest(request.request_id, stroke, start, num_tokens, num_drafts, samples, updates)
        self.shares[request.request_id] = StepShare(request, scheduled, request.num_preemptions)
        self.budget.remaining -= num_tokens
        self.budget.num_prefills += stroke is Stroke.PREFILL
        request.num_pending_tokens += samples
        request.num_computed_tokens = end

    def take_back(self, request: Request) -> None:
        """Undo `take`, if it happened, for a request that is preempted."""
        share = self.shares.pop(request.request_id, None)
        if share is not None:
            self.budget.remaining += share.scheduled.num_scheduled_tokens
            self.budget.num_prefills -= share.scheduled.stroke is Stroke.PREFILL
            request.num_pending_tokens -= share.scheduled.samples_token
            # in a fair queue, a request admitted in this step may be preempted for a prefill in progress
            self.admitted = [admitted for admitted in self.admitted if admitted.request_id != request.request_id]
            request.num_computed_tokens = share.scheduled.num_computed_tokens
            if share.scheduled.num_draft_tokens:
                request.num_draft_tokens = 0

    def preempted(self) -> AdmissionRefusal | None:
        """Return a refusal in a step that had to preempt: an admission would take the blocks that were just missing."""
        if not self.is_short:
            return None
        return AdmissionRefusal(Limit.KV, f"kv: no block was left, preempted {len(self.preemptions)}")


class SchedulerPart:
    """A feature's part of the scheduler's loop. A plain scheduler has none; each part overrides what it needs."""

    def on_step_start(self) -> None:
        """Handle the moment before a step is decided, or after the last one is accounted for."""

    def on_admission(self, request: Request) -> None:
        """Handle the admission of a request, which holds its cached prefix."""

    def on_plan_closing(self, plan: StepPlan) -> None:
        """Handle a step whose shares are all taken, before it becomes a batch."""

    def on_batch(self, batch: ScheduledBatch) -> None:
        """Handle the batch that a step became."""

    def learn(
        self, step: int, requests: Sequence[ScheduledRequest], commits: Sequence[Commit], seconds: StepDurations
    ) -> None:
        """Handle the outcome of a step, before it is accounted for."""

    def on_request_end(self, request: Request) -> None:
        """Handle the end of a request, which may never have run."""

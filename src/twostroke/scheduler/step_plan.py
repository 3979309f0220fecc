"""A step while it is being decided: shares are taken, now and then one is taken back, then it becomes a batch."""

from __future__ import annotations

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
    Stroke,
)
from twostroke.kv_check import KVCheck
from twostroke.request import Request
from twostroke.scheduler.admission import Refusal
from twostroke.scheduler.budget import TokenBudget
from twostroke.scheduler.policy import Order


class Share(NamedTuple):
    """What a request was given in a step; kept until the step's outcome is known."""

    request: Request
    scheduled: ScheduledRequest
    num_preemptions: int
    """Then. A preemption since means that the blocks of this share are no longer the request's."""

    def check(self, commit: Commit) -> None:
        """A request that goes on has got what its share promised, and has something left to generate."""
        request, scheduled, _ = self
        fewest, most = (1, 1 + scheduled.num_draft_tokens) if scheduled.samples_token else (0, 0)
        assert fewest <= commit.num_tokens <= most, f"{request.request_id}: {commit.num_tokens} tokens of {scheduled}"
        assert request.num_output_tokens < request.arrival.max_tokens, (
            f"{request.request_id} has its {request.arrival.max_tokens} tokens and no finish reason"
        )


class Queues(NamedTuple):
    """Where everybody is once a step is decided."""

    num_waiting: int
    head_request_id: str | None
    num_running: int
    num_free_blocks: int


class StepPlan:
    """The shares of a step, and what kept others out of it.

    A share counts in its request's account from the moment it is taken: the next step is decided before this one's
    outcome is known.
    """

    __slots__ = (
        "_keeps_computed_kv",
        "admitted",
        "budget",
        "drafts",
        "is_cut",
        "is_short",
        "order",
        "preemptions",
        "refusal",
        "shares",
    )

    def __init__(self, max_num_batched_tokens: int, keeps_computed_kv: bool, order: Order) -> None:
        self._keeps_computed_kv = keeps_computed_kv
        self.order = order
        """Whose turn it is: the foreground's, then the background's."""
        self.budget = TokenBudget(max_num_batched_tokens)
        self.shares: dict[str, Share] = {}
        self.admitted: list[AdmittedRequest] = []
        self.preemptions: list[Preemption] = []
        self.refusal: Refusal | None = None
        """Why the head of the queue was not admitted."""
        self.is_cut = False
        """Whether the budget cut a prefill short."""
        self.is_short = False
        """Whether somebody had to give way to an equal: there is not enough KV even for them."""
        self.drafts: DraftDecision | None = None

    def take(self, request: Request, stroke: Stroke, num_tokens: int, updates: tuple[BlockTableUpdate, ...]) -> None:
        """Gives a request the next `num_tokens` of its tokens; its blocks reach that far already."""
        start = request.num_computed_tokens
        end = start + num_tokens
        num_drafts = num_tokens - 1 if stroke is Stroke.DECODE else 0
        samples = end - num_drafts == request.num_tokens + request.num_pending_tokens
        scheduled = ScheduledRequest(request.request_id, stroke, start, num_tokens, num_drafts, samples, updates)
        self.shares[request.request_id] = Share(request, scheduled, request.num_preemptions)
        self.budget.remaining -= num_tokens
        self.budget.num_prefills += stroke is Stroke.PREFILL
        request.num_pending_tokens += samples
        request.num_computed_tokens = end if self._keeps_computed_kv else 0

    def take_back(self, request: Request) -> None:
        """Undoes `take`, if there was one, for a request that gives its blocks away."""
        share = self.shares.pop(request.request_id, None)
        if share is not None:
            self.budget.remaining += share.scheduled.num_scheduled_tokens
            self.budget.num_prefills -= share.scheduled.stroke is Stroke.PREFILL
            request.num_pending_tokens -= share.scheduled.samples_token
            # in a fair queue somebody admitted in this very step may have to give way to a prefill that goes on
            self.admitted = [admitted for admitted in self.admitted if admitted.request_id != request.request_id]
            request.num_computed_tokens = share.scheduled.num_computed_tokens
            if share.scheduled.num_draft_tokens:
                request.num_draft_tokens = 0

    def preempted(self) -> Refusal | None:
        """Nobody is admitted in a step that had to preempt: it would only take the blocks that were just missing."""
        if not self.is_short:
            return None
        return Refusal(Limit.KV, f"kv: no block was left, preempted {len(self.preemptions)}")

    def batch(
        self,
        step: int,
        finished_ids: tuple[str, ...],
        queues: Queues,
        kv_checks: tuple[KVCheck, ...],
        kv_moves: KVMoves | None,
    ) -> ScheduledBatch:
        """The decision, as data."""
        refusal = self.refusal or self.preempted()
        unrefused = Limit.TOKENS if self.is_cut else Limit.NONE
        return ScheduledBatch(
            step=step,
            requests=tuple([share.scheduled for share in self.shares.values()]),
            limited_by=refusal.limit if refusal is not None else unrefused,
            preemptions=tuple(self.preemptions),
            finished_request_ids=finished_ids,
            num_waiting=queues.num_waiting,
            wait_reason=refusal.reason if refusal is not None else "",
            head_request_id=queues.head_request_id,
            admitted=tuple(self.admitted),
            num_running=queues.num_running,
            num_free_blocks=queues.num_free_blocks,
            kv_checks=kv_checks,
            drafts=self.drafts,
            kv_moves=kv_moves,
            token_budget=self.budget.limit,
        )

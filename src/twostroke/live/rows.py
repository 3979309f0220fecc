"""The columns of what the page shows in tables: requests and steps, as arrays, with their names told once."""

from __future__ import annotations

import msgspec

from twostroke.batch import ScheduledBatch, Stroke
from twostroke.cost.step_cost import StepCost


class SequenceRow(msgspec.Struct, frozen=True, array_like=True):
    """A sequence; times in seconds on the engine's clock."""

    id: str
    state: str
    """waiting, running, preempted or ended."""
    stroke: str
    """Of the last step that computed anything of it; empty before."""
    tenant_is_other: bool
    """The id is none that anybody could use: it is another tenant's."""
    arrival_s: float | None
    scheduled_s: float | None
    first_token_s: float | None
    last_token_s: float | None
    finish_s: float | None
    finish: str
    """stop, length, abort, error, moved: it goes on in another process, or lost: its process died, and where others
    can take over, it goes on there. Empty while it lives."""
    num_prompt: int
    num_cached: int
    num_computed: int
    num_output: int
    max_tokens: int
    itl_ms: float | None
    """The last gap between tokens."""
    num_preemptions: int
    priority: int
    background: bool


class StepRow(msgspec.Struct, frozen=True, array_like=True):
    """A step."""

    step: int
    at_s: float
    """When it was decided."""
    ms: float | None
    """From the decision to its result; None while it runs."""
    floor_ms: float | None
    """The shortest time in which this machine can do it; None where nobody knows."""
    bound: str
    """By what: compute or memory."""
    decode: int
    """Query tokens: of decodes without drafts, of prefills, of drafts."""
    prefill: int
    drafts: int
    cached: int
    """Tokens of the requests that it admitted which it need not compute."""
    limit: str
    """What kept it from being larger: tokens, seqs, kv or none."""
    wait: str
    """Why the head of the queue was not admitted."""
    head: str
    """That head."""
    num_running: int
    num_waiting: int
    preempted: tuple[str, ...]
    budget: int
    """Tokens that it might have had; 0: not told."""


FIELDS = {"request": list(SequenceRow.__struct_fields__), "step": list(StepRow.__struct_fields__)}
"""As State.fields tells them."""


class LiveStep:
    """A step that was decided lately."""

    __slots__ = ("batch", "cost", "done_s", "num_generated", "stamp", "time_s")

    def __init__(self, time_s: float, batch: ScheduledBatch, cost: StepCost | None, stamp: int) -> None:
        self.time_s = time_s
        self.batch = batch
        self.cost = cost
        self.done_s: float | None = None
        self.num_generated = 0
        self.stamp = stamp
        """Which event changed it last."""

    @property
    def floor_s(self) -> float | None:
        """Return the least time that the step could take.

        A step faster than its limits allow raises them: its floor is then the time that it took.
        """
        if self.cost is None:
            return None
        return self.cost.seconds if self.done_s is None else min(self.cost.seconds, self.done_s - self.time_s)

    def row(self) -> StepRow:
        """As it is shown."""
        batch, cost, floor_s = self.batch, self.cost, self.floor_s
        num_tokens = num_prefill = num_drafts = 0
        for share in batch.requests:  # once for all: a frame has many steps, and a step many shares
            num_tokens += share.num_scheduled_tokens
            num_drafts += share.num_draft_tokens
            if share.stroke is Stroke.PREFILL:
                num_prefill += share.num_scheduled_tokens
        return StepRow(
            step=batch.step,
            at_s=self.time_s,
            ms=None if self.done_s is None else (self.done_s - self.time_s) * 1e3,
            floor_ms=None if floor_s is None else floor_s * 1e3,
            bound="" if cost is None else cost.bound,
            decode=num_tokens - num_prefill - num_drafts,
            prefill=num_prefill,
            drafts=num_drafts,
            cached=sum(admitted.num_cached_tokens for admitted in batch.admitted),
            limit=str(batch.limited_by),
            wait=batch.wait_reason,
            head=batch.head_request_id or "",
            num_running=batch.num_running,
            num_waiting=batch.num_waiting,
            preempted=batch.preempted_request_ids,
            budget=batch.token_budget,
        )

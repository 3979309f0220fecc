"""Baselines for comparison with the scheduler, and the function that chooses among them."""

from __future__ import annotations

from typing import NamedTuple

from twostroke.batch import BlockTableUpdate, Limit, Stroke
from twostroke.config.scheduler import SchedulerConfig
from twostroke.errors import InvalidParameter
from twostroke.request import Request
from twostroke.scheduler.step_plan import AdmissionRefusal, ChunkedPrefill, SchedulerPart, StepPlan, TokenBudget


class StaticGate(SchedulerPart):
    """Static batching: a batch forms when nothing runs, and the next one when all of it has ended.

    A batch forms over several steps as long as only the token budget limits it. It is complete when the queue, the
    slots or the blocks are exhausted. Requests that ended leave their slot empty; no dead rows are computed.
    """

    def __init__(self) -> None:
        self._is_forming = False

    def refusal(self, num_running: int) -> AdmissionRefusal | None:
        """Refuse admission while a complete batch runs."""
        self._is_forming = self._is_forming or num_running == 0
        if self._is_forming:
            return None
        return AdmissionRefusal(Limit.SEQS, f"seqs: static batch, {num_running} of it still running")

    def on_plan_closing(self, plan: StepPlan) -> None:
        """Complete the batch unless the budget cut it short."""
        self._is_forming = self._is_forming and plan.refusal is not None and plan.refusal.limit is Limit.TOKENS


class WholePrefill(ChunkedPrefill):
    """Rule that computes a prompt in one step.

    A prompt that exceeds the remaining budget waits for the next step. A prompt that exceeds every budget is the only
    prompt of its step, in addition to the decodes, which go into every step. This is the stall that chunks avoid.
    """

    def num_tokens_now(self, num_tokens_left: int, budget: TokenBudget) -> int:
        """Return all remaining tokens, or 0."""
        fits = num_tokens_left <= budget.remaining
        never_fits = num_tokens_left > budget.limit
        return num_tokens_left if fits or (never_fits and not budget.num_prefills) else 0

    def max_tokens_per_step(self, num_tokens: int) -> int:
        return num_tokens


class UncachedPlan(StepPlan):
    """Plan without a KV cache: every step of a request begins at its first token again."""

    __slots__ = ()

    def take(self, request: Request, stroke: Stroke, num_tokens: int, updates: tuple[BlockTableUpdate, ...]) -> None:
        """Take the share without counting its tokens as computed."""
        super().take(request, stroke, num_tokens, updates)
        request.num_computed_tokens = 0


class Variant(NamedTuple):
    """Parts of the scheduler that the settings ask for, or of one of its baselines."""

    chunk_rule: ChunkedPrefill
    plan: type[StepPlan]
    gate: StaticGate | None


def variant_of(config: SchedulerConfig, keeps_computed_kv: bool) -> Variant:
    """Choose between the scheduler and its baselines.

    Raises:
        InvalidParameter: chunked prefill without a KV cache, which would lose the earlier chunks.
    """
    if config.enable_chunked_prefill and not keeps_computed_kv:
        remedy = "Switch it off as well (--no-enable-chunked-prefill)."
        raise InvalidParameter("enable_chunked_prefill", True, "needs the KV cache", remedy)
    rule = ChunkedPrefill if config.enable_chunked_prefill else WholePrefill
    return Variant(
        rule(config.max_num_batched_tokens),
        StepPlan if keeps_computed_kv else UncachedPlan,
        StaticGate() if config.batching == "static" else None,
    )

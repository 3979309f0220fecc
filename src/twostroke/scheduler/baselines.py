"""The baselines that the scheduler is compared with, and the one place that chooses among them."""

from __future__ import annotations

from typing import NamedTuple

from twostroke.batch import BlockTableUpdate, Limit, Stroke
from twostroke.config.scheduler import SchedulerConfig
from twostroke.errors import InvalidParameter
from twostroke.request import Request
from twostroke.scheduler.step_plan import ChunkedPrefill, HeadRefusal, SchedulerPart, StepPlan, TokenBudget


class StaticGate(SchedulerPart):
    """Static batching: a batch forms when nobody runs, and the next one when all of it has ended.

    Forming goes on over several steps while only the token budget holds it up; it ends with the queue, the slots or
    the blocks. Requests that ended leave their slot empty, no dead rows are computed.
    """

    def __init__(self) -> None:
        self._is_forming = False

    def refusal(self, num_running: int) -> HeadRefusal | None:
        """Refuse while a formed batch runs."""
        self._is_forming = self._is_forming or num_running == 0
        if self._is_forming:
            return None
        return HeadRefusal(Limit.SEQS, f"seqs: static batch, {num_running} of it still running")

    def closing(self, plan: StepPlan) -> None:
        """The batch is formed unless the budget cut it short."""
        self._is_forming = self._is_forming and plan.refusal is not None and plan.refusal.limit is Limit.TOKENS


class WholePrefill(ChunkedPrefill):
    """A prompt is computed in one step.

    One that does not fit into what is left waits for the next step; one that fits into no step at all is the only
    prompt of its step and exceeds the budget, beside the decodes that go into every step. This is the stall that
    chunks avoid.
    """

    def num_tokens_now(self, num_tokens_left: int, budget: TokenBudget) -> int:
        """All or nothing."""
        fits = num_tokens_left <= budget.remaining
        never_fits = num_tokens_left > budget.limit
        return num_tokens_left if fits or (never_fits and not budget.num_prefills) else 0

    def max_tokens_per_step(self, num_tokens: int) -> int:
        """All of them."""
        return num_tokens


class ForgetfulPlan(StepPlan):
    """No KV cache: every step of a request begins at its first token again."""

    __slots__ = ()

    def take(self, request: Request, stroke: Stroke, num_tokens: int, updates: tuple[BlockTableUpdate, ...]) -> None:
        """Take the share; nothing of it stays computed."""
        super().take(request, stroke, num_tokens, updates)
        request.num_computed_tokens = 0


class Variant(NamedTuple):
    """The scheduler that the settings ask for, or a baseline of it."""

    chunk_rule: ChunkedPrefill
    plan: type[StepPlan]
    gate: StaticGate | None


def variant_of(config: SchedulerConfig, keeps_computed_kv: bool) -> Variant:
    """Choose between the scheduler and its baselines.

    Raises:
        InvalidParameter: chunks of a prompt whose earlier chunks nobody keeps.
    """
    if config.enable_chunked_prefill and not keeps_computed_kv:
        remedy = "Switch it off as well (--no-enable-chunked-prefill)."
        raise InvalidParameter("enable_chunked_prefill", True, "needs the KV cache", remedy)
    rule = ChunkedPrefill if config.enable_chunked_prefill else WholePrefill
    return Variant(
        rule(config.max_num_batched_tokens),
        StepPlan if keeps_computed_kv else ForgetfulPlan,
        StaticGate() if config.batching == "static" else None,
    )

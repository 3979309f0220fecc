"""Phases of a step's scheduling: decodes, prefills, admissions, and preemption when blocks run out.

Prefill and decode draw on one token budget. Decodes come first; prompts get the rest:

    budget 1,024    |dddd… 32 decodes|######## 992 prompt tokens ########|

So a prompt of 8,192 tokens takes 8 steps when it runs alone and 9 with 32 decodes (9 x 992 >= 8,192 > 8 x 992). The
alternative, a budget for prompt tokens only, would let the length of a step depend on the number of decodes.

KV memory is promised before it is used. A request is admitted when the blocks for everything it has to compute fit
in addition to what the running prefills were promised and have not taken yet:

    free blocks   |  promised to prefills, not taken  |  needed by the head  |  spare  |

So no prefill is admitted only to be preempted for lack of its own prompt's blocks. The future output of running
requests is not promised; when blocks for it run out, the least urgent request is preempted.

(A chunk takes the whole remaining budget, so a step that reaches admission has no unfinished prefill, unless the order
lets the head of the queue go before it. The promise prevents overcommitment in that case, and under a rule with smaller
chunks.)

If the head cannot start, no request behind it does: small requests cannot starve a large one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import repeat

from twostroke.batch import AdmittedRequest, BlockTableUpdate, CacheEnd, Limit, Preemption, Stroke
from twostroke.config.scheduler import SchedulerConfig
from twostroke.errors import DoesNotFit, EngineError
from twostroke.kv_cache.manager import KVCacheManager
from twostroke.kv_cache.prefix_cache import CachedPrefix
from twostroke.request import Request, RequestStatus
from twostroke.scheduler.background import TieredOrder
from twostroke.scheduler.baselines import StaticGate, variant_of
from twostroke.scheduler.drafts import DraftScheduling
from twostroke.scheduler.offload import Offload
from twostroke.scheduler.policy import make_order
from twostroke.scheduler.step_budget import SloBudget
from twostroke.scheduler.step_plan import (
    AdmissionPlan,
    AdmissionRefusal,
    ChunkedPrefill,
    SchedulerPart,
    StepPlan,
    TokenBudget,
)

_Phase = Callable[[StepPlan], None]
FIRST_GUESS = 512
"""Assumed prompt length before the first request arrives."""
_LEARNED = 0.1
"""Weight of the latest prompt in the typical one."""


class StepPhases:
    """Queues, and the phases in which a step is decided.

    Args:
        config: the scheduler's settings.
        kv: the KV cache's accounts.

    Raises:
        InvalidParameter: chunked prefill without a KV cache.
    """

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager) -> None:
        self._kv = kv
        self._most_tokens = config.max_num_batched_tokens
        self._chunk_rule, self._plan_type, gate = variant_of(config, kv.keeps_computed_kv)
        # Every running request can have a token in every step.
        max_num_running = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._admission = AdmissionControl(kv, self._chunk_rule, max_num_running, gate)
        self._foreground = self._order = make_order(config)
        self._waiting, self._running = self._order.waiting, self._order.running
        decodes, prefills = (self._schedule_decodes,), (self._schedule_prefills, self._admit)
        self._rounds: tuple[tuple[_Phase, ...], ...] = (
            (decodes + prefills,) if config.mixing == "mixed" else (prefills, decodes)
        )
        self._typical_prompt = float(FIRST_GUESS)
        """Tokens that a foreground request has to compute when it is admitted: a moving average."""
        self._parts: list[SchedulerPart] = [] if gate is None else [gate]
        """Enabled features beyond the plain loop, in the order in which they are called."""
        self._slo_budget: SloBudget | None = None
        self._drafts: DraftScheduling | None = None
        self._offload: Offload | None = None
        self._tiers: TieredOrder | None = None

    def _token_budget(self, now_s: float) -> int:
        """Return the token budget of the next step."""
        if self._slo_budget is None:
            return self._most_tokens
        waiting = self._foreground.waiting
        return self._slo_budget.tokens(now_s, self._foreground.running, waiting.first if len(waiting) else None)

    def _schedule_background(self, plan: StepPlan, tiers: TieredOrder) -> None:
        """Schedule background work in the budget that the foreground leaves."""
        plan.order = tiers.background
        taken = [share.scheduled for share in plan.shares.values()]
        room = tiers.room.tokens(taken, plan.order, self._typical_prompt)
        plan.budget.remaining = min(plan.budget.remaining, room)
        self._schedule_tier(plan)

    def _schedule_tier(self, plan: StepPlan) -> None:
        """Run the rounds of phases until one schedules anything."""
        for phases in self._rounds:
            for phase in phases:
                phase(plan)
            if plan.shares:
                return

    def _schedule_decodes(self, plan: StepPlan) -> None:
        """Take a token for every decoding request, and drafts for those in the foreground."""
        decoding = [
            request
            for request in plan.order.running.snapshot()
            if request.num_computed_tokens >= request.num_prefill_tokens and not waits_for_update(request)
        ]
        drafts = self._drafts if plan.order is self._foreground else None
        num_drafts = repeat(0) if drafts is None else drafts.of(plan, decoding)
        for request, num in zip(decoding, num_drafts, strict=False):
            # skip requests that were just preempted; the background may have room for only some decodes
            if request.status is RequestStatus.RUNNING and plan.budget.remaining > 0:
                self._schedule_decode(plan, request, num)

    def _schedule_decode(self, plan: StepPlan, request: Request, num_drafts: int) -> None:
        start = request.num_computed_tokens
        updates = self._kv.try_allocate(request.request_id, start, start + 1 + num_drafts)
        if updates is None:
            # No request is preempted for drafts.
            num_drafts = 0
            updates = self._allocate_by_preempting(plan, request, start + 1)
            if updates is None:
                return
        request.num_draft_tokens = num_drafts
        plan.take(request, Stroke.DECODE, 1 + num_drafts, updates)

    def _schedule_prefills(self, plan: StepPlan) -> None:
        """Take the next chunk of every admitted request that has not computed all that was known at admission."""
        waiting = plan.order.waiting
        for request in plan.order.running.snapshot():
            if request.num_computed_tokens >= request.num_prefill_tokens or waits_for_update(request):
                continue
            while plan.refusal is None and len(waiting) and plan.order.may_overtake(waiting.first, request):
                plan.refusal = self._try_admit(plan, waiting.first)
            if request.status is not RequestStatus.RUNNING:
                continue  # it was just preempted
            num_left = request.num_tokens + request.num_pending_tokens - request.num_computed_tokens
            num_now = self._chunk_rule.num_tokens_now(num_left, plan.budget)
            plan.is_cut = plan.is_cut or num_now < num_left
            if num_now == 0:
                return
            updates = self._allocate_by_preempting(plan, request, request.num_computed_tokens + num_now)
            if updates is not None:
                plan.take(request, Stroke.PREFILL, num_now, updates)

    def _admit(self, plan: StepPlan) -> None:
        """Admit from the head of the queue, as long as slots, budget and blocks last."""
        while len(plan.order.waiting) and plan.refusal is None:
            plan.refusal = self._try_admit(plan, plan.order.waiting.first)

    def _try_admit(self, plan: StepPlan, request: Request) -> AdmissionRefusal | None:
        refusal = plan.preempted()
        if refusal is not None:
            return refusal
        while isinstance(verdict := self._consider(plan, request), AdmissionRefusal):
            in_vain = plan.is_short or waits_for_update(request)
            victim = None if in_vain else self._order.find_displaced(request, verdict.limit)
            if victim is None:
                return verdict
            self._preempt(plan, victim, by=request)
        if self._offload is not None:
            verdict = self._offload.load_offloaded(plan, request, verdict)
            if isinstance(verdict, AdmissionRefusal):
                return verdict
        cached = verdict.cached
        self._waiting.remove(request)
        self._running.add(request)
        self._kv.admit(request.request_id, cached, verdict.num_promised_blocks)
        for part in self._parts:
            part.on_admission(request)
        if request.status is RequestStatus.WAITING:
            request.num_cached_tokens = cached.num_tokens
            num_to_compute = request.num_tokens - cached.num_tokens
            self._order.charge(request, num_prompt_tokens=num_to_compute)
            if not request.arrival.background:
                self._typical_prompt += _LEARNED * (num_to_compute - self._typical_prompt)
        request.move_to(RequestStatus.RUNNING)
        request.num_computed_tokens = cached.num_tokens
        request.num_prefill_tokens = request.num_tokens + request.num_pending_tokens
        cache_end = cached.end if request.arrival.reads_prefix_cache else CacheEnd.NOT_READ
        plan.admitted.append(
            AdmittedRequest(request.request_id, request.num_prefill_tokens, cached.num_tokens, cache_end)
        )
        end = request.num_computed_tokens + verdict.num_tokens
        plan.is_cut = plan.is_cut or end < request.num_prefill_tokens
        updates = self._kv.try_allocate(request.request_id, request.num_computed_tokens, end)
        assert updates is not None, f"{request.request_id} was admitted and has no room for its first {end} tokens"
        plan.take(request, Stroke.PREFILL, verdict.num_tokens, updates)
        return None

    def _consider(self, plan: StepPlan, request: Request) -> AdmissionPlan | AdmissionRefusal:
        return self._admission.consider(request, plan.budget, len(self._running), self._prefills())

    def _prefills(self) -> list[Request]:
        """Return the running requests that have not computed all that they had at admission."""
        return [request for request in self._running if request.num_computed_tokens < request.num_prefill_tokens]

    def _allocate_by_preempting(
        self, plan: StepPlan, request: Request, end: int
    ) -> tuple[BlockTableUpdate, ...] | None:
        """Return blocks up to token `end`, preempting the least urgent requests if needed; None if that is the request
        itself."""
        start = request.num_computed_tokens
        while (updates := self._kv.try_allocate(request.request_id, start, end)) is None:
            victim = self._running.last
            self._preempt(plan, victim, by=request)
            if victim is request:
                return None
        return updates

    def _preempt(self, plan: StepPlan, request: Request, *, by: Request) -> None:
        """Free a request's blocks for `by`; it will recompute its tokens, output included.

        Recomputing replaces copying out: a prefill of known tokens is cheap compared with generating them, and what is
        still in the prefix cache by then is not recomputed. A share that it got in this very step is taken back.
        """
        request_id = request.request_id
        plan.take_back(request)
        plan.is_short = plan.is_short or request.arrival.background == by.arrival.background
        self._leave_running(request)
        self._waiting.add(request)
        request.move_to(RequestStatus.PREEMPTED)
        request.num_preemptions += 1
        request.num_computed_tokens = 0
        plan.preemptions.append(Preemption(request_id, by.request_id))

    def _leave_running(self, request: Request) -> None:
        self._running.remove(request)
        self._kv.free(request.request_id)


class AdmissionControl:
    """Admission control: checks slots, budget and blocks, in this order.

    Args:
        kv: the KV cache's accounts.
        chunk_rule: how much of a prompt a step computes.
        max_num_running: slots.
        gate: of static batching; None: requests may join at any time.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        chunk_rule: ChunkedPrefill,
        max_num_running: int,
        gate: StaticGate | None,
    ) -> None:
        self._kv = kv
        self._chunk_rule = chunk_rule
        self._gate = gate
        self._max_num_running = max_num_running

    def consider(
        self, request: Request, budget: TokenBudget, num_running: int, prefills: Iterable[Request]
    ) -> AdmissionPlan | AdmissionRefusal:
        """Return how the head of the queue starts now, or why it does not.

        Args:
            request: the head of the queue.
            budget: what is left of the step's tokens.
            num_running: requests admitted already.
            prefills: those of them that have not computed all they had at admission.
        """
        refusal = self._slot_refusal(budget, num_running)
        if refusal is not None:
            return refusal
        if waits_for_update(request):
            return AdmissionRefusal(Limit.KV, "kv: preempted, and the result of its last step is not known yet")
        num_tokens = request.num_tokens + request.num_pending_tokens
        cached = self._find_cached(request)
        num_promised = self._kv.num_blocks_to_compute(num_tokens, self._chunk_rule.max_tokens_per_step(num_tokens))
        num_needed = self._kv.num_blocks_to_admit(cached, num_promised)
        num_free = self._kv.num_free_blocks - sum(self._kv.num_blocks_outstanding(r.request_id) for r in prefills)
        if num_needed > num_free:
            return AdmissionRefusal(Limit.KV, f"kv: needs {num_needed} blocks, {max(0, num_free)} are free")
        num_left = num_tokens - cached.num_tokens
        num_now = self._chunk_rule.num_tokens_now(num_left, budget)
        if num_now == 0:
            return AdmissionRefusal(Limit.TOKENS, f"tokens: needs {num_left} at once, {budget.remaining} are left")
        return AdmissionPlan(cached, num_promised, num_now)

    def _find_cached(self, request: Request) -> CachedPrefix:
        num_tokens = request.num_tokens + request.num_pending_tokens
        return self._kv.find_cached(request.block_hashes if request.arrival.reads_prefix_cache else (), num_tokens)

    def _slot_refusal(self, budget: TokenBudget, num_running: int) -> AdmissionRefusal | None:
        if budget.remaining <= 0:
            return AdmissionRefusal(Limit.TOKENS, f"tokens: the budget of {budget.limit} is used up")
        if num_running >= self._max_num_running:
            return AdmissionRefusal(Limit.SEQS, f"seqs: {num_running} of {self._max_num_running} running")
        return None if self._gate is None else self._gate.refusal(num_running)


def waits_for_update(request: Request) -> bool:
    """Return whether a request can only be scheduled after the result of a step in flight.

    Either its last token is in flight, or drafts are, whose acceptance is unknown.
    """
    if not request.num_pending_tokens:
        return False
    is_last = request.num_output_tokens + request.num_pending_tokens >= request.arrival.max_tokens
    return is_last or request.num_draft_tokens > 0


def check_longest_fits(kv: KVCacheManager, chunk_rule: ChunkedPrefill, max_model_len: int) -> int:
    """Return the blocks of one request of the greatest length; check that the pool has as many.

    Raises:
        DoesNotFit: there are too few.
    """
    needed = kv.num_blocks_to_compute(max_model_len, chunk_rule.max_tokens_per_step(max_model_len))
    if needed > kv.num_blocks:
        raise DoesNotFit(
            f"max_model_len={max_model_len} needs {needed} KV blocks of {kv.layout.block_description}, "
            f"and there are {kv.num_blocks}. Lower max_model_len, or give the KV cache "
            f"{needed * kv.layout.bytes_per_block:,} bytes or more."
        )
    return needed


def check_longest_still_fits(kv: KVCacheManager, needed: int, max_model_len: int) -> None:
    """Check that the longest request still fits after blocks were taken out of use.

    Raises:
        EngineError: there are too few blocks, so a request could wait forever.
    """
    if needed > kv.num_usable_blocks:
        raise EngineError(
            f"{kv.num_blocks - kv.num_usable_blocks} of {kv.num_blocks} KV blocks were found corrupt and are out of "
            f"use; a request of max_model_len={max_model_len} tokens needs {needed}. This memory is failing: test it, "
            "and restart the engine."
        )

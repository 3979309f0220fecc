"""Whether the head of the queue may start.

KV memory is promised before it is used. A request is admitted when the blocks for everything it has to compute fit
beside what the running prefills were promised and have not taken yet:

    free blocks   |  promised to prefills, not taken  |  needed by the head  |  spare  |

so that no prefill is admitted only to be preempted for want of its own prompt's blocks. What running requests will
generate is not promised; when that runs out, the least urgent one is preempted.

(A chunk takes all of the budget that is left, so with today's chunk rules a step that gets as far as admission has no
unfinished prefill. The promise is what keeps a rule with smaller chunks from overcommitting.)

If the head cannot start, nobody behind it does: a small request never slips past a large one for ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from twostroke.batch import AdmittedRequest, CacheEnd, Limit
from twostroke.errors import DoesNotFit, EngineError
from twostroke.kv_cache.manager import KVCacheManager
from twostroke.kv_cache.prefix_cache import CachedPrefix
from twostroke.request import Request
from twostroke.scheduler.budget import ChunkRule, TokenBudget


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the head of the queue waits."""

    limit: Limit
    reason: str


@dataclass(frozen=True, slots=True)
class Admittance:
    """How the head of the queue starts."""

    cached: CachedPrefix
    num_promised_blocks: int
    num_tokens: int
    """Computed in its first step."""

    def record(self, request: Request) -> AdmittedRequest:
        """For the batch."""
        num_tokens = request.num_tokens + request.num_pending_tokens
        cache_end = self.cached.end if request.arrival.reads_prefix_cache else CacheEnd.NOT_READ
        return AdmittedRequest(request.request_id, num_tokens, self.cached.num_tokens, cache_end)


class Gate(Protocol):
    """When requests may join at all."""

    def refusal(self, num_running: int) -> Refusal | None:
        """Why nobody may join now; None when somebody may."""
        ...

    def end_of_step(self, refusal: Refusal | None) -> None:
        """Admission is over for this step: `refusal` kept the head out, None if nobody is left waiting."""
        ...


class ContinuousGate:
    """Always open: a slot is given on in the very next step."""

    def refusal(self, num_running: int) -> Refusal | None:
        """None."""
        del num_running
        return None

    def end_of_step(self, refusal: Refusal | None) -> None:
        """Nothing to remember."""


class StaticGate:
    """The baseline: a batch forms when nobody runs, and the next one when all of it has ended.

    Forming goes on over several steps while only the token budget holds it up; it ends with the queue, the slots or
    the blocks. Requests that ended leave their slot empty, no dead rows are computed.
    """

    def __init__(self) -> None:
        self._is_forming = False

    def refusal(self, num_running: int) -> Refusal | None:
        """Refuses while a formed batch runs."""
        self._is_forming = self._is_forming or num_running == 0
        if self._is_forming:
            return None
        return Refusal(Limit.SEQS, f"seqs: static batch, {num_running} of it still running")

    def end_of_step(self, refusal: Refusal | None) -> None:
        """The batch is formed unless the budget cut it short."""
        self._is_forming = self._is_forming and refusal is not None and refusal.limit is Limit.TOKENS


class Admission:
    """Puts the question to slots, budget and blocks, in this order."""

    def __init__(self, kv: KVCacheManager, chunk_rule: ChunkRule, gate: Gate, max_num_running: int) -> None:
        self._kv = kv
        self._chunk_rule = chunk_rule
        self._gate = gate
        self._max_num_running = max_num_running

    def consider(
        self, request: Request, budget: TokenBudget, num_running: int, prefills: Iterable[Request]
    ) -> Admittance | Refusal:
        """How the head of the queue starts now, or why it does not.

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
            return Refusal(Limit.KV, "kv: preempted, and the result of its last step is not known yet")
        num_tokens = request.num_tokens + request.num_pending_tokens
        cached = self._find_cached(request)
        num_promised = self._kv.num_blocks_to_compute(num_tokens, self._chunk_rule.max_tokens_per_step(num_tokens))
        num_needed = self._kv.num_blocks_to_admit(cached, num_promised)
        num_free = self._kv.num_free_blocks - sum(self._kv.num_blocks_outstanding(r.request_id) for r in prefills)
        if num_needed > num_free:
            return Refusal(Limit.KV, f"kv: needs {num_needed} blocks, {max(0, num_free)} are free")
        num_left = num_tokens - cached.num_tokens
        num_now = self._chunk_rule.num_tokens_now(num_left, budget)
        if num_now == 0:
            return Refusal(Limit.TOKENS, f"tokens: needs {num_left} at once, {budget.remaining} are left")
        return Admittance(cached, num_promised, num_now)

    def with_loaded(self, request: Request, admittance: Admittance) -> Admittance:
        """The same when what was in host memory has blocks: all else is as it was."""
        cached = self._find_cached(request)
        assert (cached.num_tokens, cached.offloaded) == (admittance.cached.num_tokens, []), f"{cached}, {admittance}"
        return replace(admittance, cached=cached)

    def _find_cached(self, request: Request) -> CachedPrefix:
        num_tokens = request.num_tokens + request.num_pending_tokens
        return self._kv.find_cached(request.block_hashes if request.arrival.reads_prefix_cache else (), num_tokens)

    def end_of_step(self, refusal: Refusal | None) -> None:
        """Admission is over for this step."""
        self._gate.end_of_step(refusal)

    def _slot_refusal(self, budget: TokenBudget, num_running: int) -> Refusal | None:
        if budget.remaining <= 0:
            return Refusal(Limit.TOKENS, f"tokens: the budget of {budget.limit} is used up")
        if num_running >= self._max_num_running:
            return Refusal(Limit.SEQS, f"seqs: {num_running} of {self._max_num_running} running")
        return self._gate.refusal(num_running)


def waits_for_update(request: Request) -> bool:
    """Nothing can be scheduled for it before the result of a step in flight is known.

    Either its last token is in flight, or drafts are, and nobody knows how many of them will stand.
    """
    if not request.num_pending_tokens:
        return False
    is_last = request.num_output_tokens + request.num_pending_tokens >= request.arrival.max_tokens
    return is_last or request.num_draft_tokens > 0


def check_that_one_fits(kv: KVCacheManager, chunk_rule: ChunkRule, max_model_len: int) -> None:
    """One request of the greatest length, alone, must have room for all its blocks.

    Raises:
        DoesNotFit: there are too few.
    """
    needed = kv.num_blocks_to_compute(max_model_len, chunk_rule.max_tokens_per_step(max_model_len))
    if needed > kv.num_blocks:
        raise DoesNotFit(
            f"max_model_len={max_model_len} needs {needed} KV blocks of {kv.layout.block_words}, "
            f"{kv.num_blocks} are there. Lower max_model_len, or give the KV cache "
            f"{needed * kv.layout.bytes_per_block:,} bytes or more."
        )


def check_that_one_still_fits(kv: KVCacheManager, chunk_rule: ChunkRule, max_model_len: int) -> None:
    """The same of the blocks that are left when some were taken out of use.

    Raises:
        EngineError: there are too few, so that a request could wait for ever.
    """
    needed = kv.num_blocks_to_compute(max_model_len, chunk_rule.max_tokens_per_step(max_model_len))
    if needed > kv.num_usable_blocks:
        raise EngineError(
            f"{kv.num_blocks - kv.num_usable_blocks} of {kv.num_blocks} KV blocks were found corrupt and are out of "
            f"use; a request of max_model_len={max_model_len} tokens needs {needed}. This memory is failing: test it, "
            "and start the engine again."
        )

"""Why time passed: the rules, each in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from twostroke.batch import AdmittedRequest, CacheEnd, Limit, Preemption, ScheduledBatch, Stroke
from twostroke.events import KVBlockChecked
from twostroke.explain.engine_view import DecidedStep, EngineView
from twostroke.explain.segments import Label
from twostroke.explain.words import counted
from twostroke.kv_check import Verdict

STALL_SHARE = 0.5
"""A step stalls those who decode in it when prompts of others are at least this share of its query tokens: without them
it would have been the short pass over a few tokens that a decode is."""

_WAITS = {Limit.SEQS: Label.WAIT_SLOTS, Limit.TOKENS: Label.WAIT_TOKENS, Limit.KV: Label.WAIT_KV}


@dataclass(frozen=True, slots=True)
class Cause:
    """What a span of time goes into, and who has to do with it."""

    label: Label
    reason: str
    because_of: Mapping[str, int] = field(default_factory=dict[str, int])
    """Request to tokens; see Culprit."""


_DECODED = Cause(Label.DECODE, "")


def of_preparing(*, knows_handover: bool) -> Cause:
    """From the arrival on."""
    if knows_handover:
        return Cause(Label.PREPARE, "template, tokenizer, checks")
    return Cause(Label.PREPARE, "template, tokenizer, checks, and the end of a step that was running")


def of_joining(request_id: str, since_s: float, view: EngineView) -> Cause:
    """Of a request that is ready, until the next step is decided."""
    return of_waiting_for(view.step_running_at(since_s), request_id)


def of_waiting_for(step: DecidedStep | None, request_id: str) -> Cause:
    """Of one that can do nothing before a step that runs has ended."""
    if step is None:
        return Cause(Label.WAIT_STEP, "for the next step to be decided")
    prefills = step.prefills_of_others(request_id)
    if prefills:
        reason = f"a step was running that computed {counted(sum(prefills.values()), 'prompt token')} of others"
        return Cause(Label.WAIT_STEP, reason, prefills)
    return Cause(Label.WAIT_STEP, f"a step was running that decoded for {len(step.shares)}")


def of_queueing(request_id: str, batch: ScheduledBatch, view: EngineView) -> Cause:
    """Of a request that the step `batch` has left in the queue.

    It waits for what the head of the queue waits for, with one exception: while a request that came later and is more
    urgent heads the queue, or has the slot or blocks or tokens in question, it waits for priority.
    """
    overtakers = _overtakers(request_id, batch, view)
    head = batch.head_request_id
    reason = batch.wait_reason.partition(": ")[2] or batch.wait_reason  # the label says "slots", "tokens" or "kv"
    if overtakers:
        told = f"{len(overtakers)} more urgent that came later went first; {reason}"
        return Cause(Label.WAIT_PRIORITY, told, overtakers)
    if head is not None and head != request_id:
        reason = f"behind {head} in the queue: {reason}"
    if batch.limited_by is Limit.KV:
        return Cause(Label.WAIT_KV, reason, dict(view.num_tokens_held))
    shares = {share.request_id: share.num_scheduled_tokens for share in batch.requests}
    return Cause(_WAITS.get(batch.limited_by, Label.WAIT_STEP), reason, shares)


def of_preemption(preemption: Preemption) -> Cause:
    """From then on until it is admitted again."""
    by = preemption.by_request_id
    if by == preemption.request_id:
        return Cause(Label.PREEMPTED, "no block was left for its next token, and nobody was less urgent")
    return Cause(Label.PREEMPTED, f"{by} needed a block, and nobody was less urgent", {by: 0})


def of_kv_check(event: KVBlockChecked) -> Cause:
    """Of everybody who runs, while a cached block was computed again."""
    found = {
        Verdict.EXACT: "as stored",
        Verdict.NUMERICS: "other by roundings",
        Verdict.CORRUPTION: "gone bad, and out of use now",
    }
    told = f"block {event.entry} of the cached prefix of {event.request_id} was computed again; {found[event.verdict]}"
    return Cause(Label.KV_CHECK, told, {event.request_id: 0})


def of_starting_over(event: KVBlockChecked) -> Cause:
    """From then on until the next decision."""
    return Cause(Label.WAIT_STEP, f"starts over: block {event.entry} of its cached prefix had gone bad")


def of_sitting_out(request_id: str, has_output: bool, step: DecidedStep) -> Cause:
    """Of a running request that a step computes nothing for."""
    prefills = step.prefills_of_others(request_id)
    if has_output and prefills:
        return Cause(Label.STALLED, "prompts went first", prefills)
    if has_output:
        return of_waiting_for(step, request_id)
    shares = {share.request_id: share.num_scheduled_tokens for share in step.batch.requests}
    return Cause(Label.WAIT_TOKENS, "the step's token budget went to others", shares)


def of_decoding(request_id: str, step: DecidedStep) -> Cause:
    """Of a step that gave a request its next tokens."""
    prefills = step.prefills_of_others(request_id)
    if sum(prefills.values()) >= STALL_SHARE * step.num_tokens:
        return Cause(Label.STALLED, "", prefills)
    return _DECODED


def cached_in_words(admitted: AdmittedRequest) -> str:
    """How much of a prompt was cached, and why no more."""
    found = f"{admitted.num_cached_tokens} of {admitted.num_tokens} tokens cached"
    match admitted.cache_end:
        case CacheEnd.COMPLETE if not admitted.num_cached_tokens:
            return "none cached: it has no whole block before its last token"
        case CacheEnd.COMPLETE:
            return f"{found}, all that can be (only whole blocks are; the last token is computed in any case)"
        case CacheEnd.UNKNOWN if admitted.num_cached_tokens:
            return f"{found}; from token {admitted.num_cached_tokens} on it differs from what was computed lately"
        case CacheEnd.UNKNOWN:
            return "none cached: nobody computed a prompt with this beginning lately"
        case CacheEnd.EVICTED:
            return f"{found}; the block behind them was evicted, its memory was needed"
        case CacheEnd.NOT_READ:
            return "cache not read: prompt log-probabilities need every token computed"
        case CacheEnd.DISABLED:
            return "none cached: prefix caching is off"


def _overtakers(request_id: str, batch: ScheduledBatch, view: EngineView) -> dict[str, int]:
    """Requests in its way that arrived later and have a smaller priority number; their tokens in this step."""
    me = view.arrivals.get(request_id)
    if me is None:
        return {}
    shares = {share.request_id: share for share in batch.requests}
    if batch.limited_by is Limit.TOKENS:
        in_the_way = {i for i, share in shares.items() if share.stroke is Stroke.PREFILL}
    else:
        in_the_way = set(view.num_tokens_held)
    if batch.head_request_id is not None:
        in_the_way.add(batch.head_request_id)
    overtakers: dict[str, int] = {}
    for other in sorted(in_the_way - {request_id}):
        arrival = view.arrivals.get(other)
        if arrival is None or arrival.priority >= me.priority or arrival.arrival_time_s <= me.arrival_time_s:
            continue
        overtakers[other] = shares[other].num_scheduled_tokens if other in shares else 0
    return overtakers

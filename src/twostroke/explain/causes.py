"""Rules that name the cause of each span of a request's time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import inf

from twostroke.batch import AdmittedRequest, CacheEnd, Limit, Preemption, ScheduledBatch, Stroke
from twostroke.events import KVBlockChecked, KVImportEnded
from twostroke.explain.run_state import PlaceState
from twostroke.explain.segments import Label
from twostroke.explain.step import DecidedStep
from twostroke.kv_check import Verdict
from twostroke.plain_words import counted, exact_ms, significant

STALL_SHARE = 0.5
"""Smallest share of a step's query tokens at which the prefills of other requests count as a stall of its decodes.

Without those prefills the step would have been a short pass over a few decode tokens.
"""

_WAITS = {Limit.SEQS: Label.WAIT_SLOTS, Limit.TOKENS: Label.WAIT_TOKENS, Limit.KV: Label.WAIT_KV}


@dataclass(frozen=True, slots=True)
class Cause:
    """Label, reason and responsible requests of a span of time."""

    label: Label
    reason: str
    because_of: Mapping[str, int] = field(default_factory=dict[str, int])
    """Tokens by responsible request; see Culprit."""


_DECODED = Cause(Label.DECODE, "")


def preparation_cause(*, knows_handover: bool) -> Cause:
    """Return the cause of the time after the arrival, until the engine has the request."""
    if knows_handover:
        return Cause(Label.PREPARE, "template, tokenizer, checks")
    return Cause(Label.PREPARE, "template, tokenizer, checks, and the end of a step that was running")


def arrival_wait_cause(request_id: str, since_s: float, place: PlaceState) -> Cause:
    """Return the cause of the time from when a request is ready until the next step is decided."""
    return step_wait_cause(place.step_running_at(since_s), request_id)


def step_wait_cause(step: DecidedStep | None, request_id: str) -> Cause:
    """Return the cause of waiting for the end of `step`, the running step; None: no step runs."""
    if step is None:
        return Cause(Label.WAIT_STEP, "for the next step to be decided")
    prefills = step.prefills_of_others(request_id)
    if prefills:
        reason = f"a step was running that computed {counted(sum(prefills.values()), 'prompt token')} of other requests"
        return Cause(Label.WAIT_STEP, reason, prefills)
    return Cause(Label.WAIT_STEP, f"a step was running that decoded {counted(len(step.shares), 'request')}")


def queue_cause(request_id: str, batch: ScheduledBatch, place: PlaceState) -> Cause:
    """Return the cause of waiting for a request that the step `batch` has left in the queue.

    It waits for what the head of the queue waits for, with one exception. While a request that arrived later and is
    more urgent heads the queue, or has the slot, blocks or tokens in question, it waits for priority.
    """
    overtakers = _more_urgent_later_arrivals(request_id, batch, place)
    head = batch.head_request_id
    reason = batch.wait_reason.partition(": ")[2] or batch.wait_reason  # the label says "slots", "tokens" or "kv"
    if overtakers:
        told = f"{counted(len(overtakers), 'more urgent request')} that arrived later went first; {reason}"
        return Cause(Label.WAIT_PRIORITY, told, overtakers)
    if head is not None and head != request_id:
        reason = f"behind {head} in the queue: {reason}"
    if batch.limited_by is Limit.KV:
        return Cause(Label.WAIT_KV, reason, place.num_tokens_held)
    shares = {share.request_id: share.num_scheduled_tokens for share in batch.requests}
    return Cause(_WAITS.get(batch.limited_by, Label.WAIT_STEP), reason, shares)


def preemption_cause(preemption: Preemption) -> Cause:
    """Return the cause of the time from a preemption until the next admission."""
    by = preemption.by_request_id
    if by == preemption.request_id:
        return Cause(Label.PREEMPTED, "no block was left for its next token, and no request was less urgent")
    return Cause(Label.PREEMPTED, f"{by} needed a block, and no request was less urgent", {by: 0})


def kv_check_cause(event: KVBlockChecked) -> Cause:
    """Return the cause of the time in which running requests waited for a KV check."""
    found = {
        Verdict.EXACT: "as stored",
        Verdict.NUMERICS: "differs by rounding",
        Verdict.CORRUPTION: "corrupt, and out of use now",
    }
    told = f"block {event.entry} of the cached prefix of {event.request_id} was computed again; {found[event.verdict]}"
    return Cause(Label.KV_CHECK, told, {event.request_id: 0})


def restart_cause(event: KVBlockChecked) -> Cause:
    """Return the cause of the time from a restart until the next decision."""
    return Cause(Label.WAIT_STEP, f"starts over: block {event.entry} of its cached prefix was corrupt")


def skipped_step_cause(request_id: str, has_output: bool, step: DecidedStep) -> Cause:
    """Return the cause of a step in which a running request computes nothing."""
    prefills = step.prefills_of_others(request_id)
    if has_output and prefills:
        return Cause(Label.STALLED, "prompts went first", prefills)
    if has_output:
        return step_wait_cause(step, request_id)
    shares = {share.request_id: share.num_scheduled_tokens for share in step.batch.requests}
    return Cause(Label.WAIT_TOKENS, "the step's token budget went to other requests", shares)


def decode_cause(request_id: str, step: DecidedStep) -> Cause:
    """Return the cause of a step that gave a request its next tokens."""
    prefills = step.prefills_of_others(request_id)
    if sum(prefills.values()) >= STALL_SHARE * step.num_tokens:
        return Cause(Label.STALLED, "", prefills)
    return _DECODED


def cached_in_words(admitted: AdmittedRequest) -> str:
    """Return how much of a prompt was cached, and why no more, in words."""
    found = f"{admitted.num_cached_tokens} of {admitted.num_tokens} tokens cached"
    match admitted.cache_end:
        case CacheEnd.COMPLETE if not admitted.num_cached_tokens:
            return "none cached: it has no whole block before its last token"
        case CacheEnd.COMPLETE:
            return f"{found}, all that can be (only whole blocks are cached; the last token is always computed)"
        case CacheEnd.UNKNOWN if admitted.num_cached_tokens:
            return f"{found}; from token {admitted.num_cached_tokens} on no recently computed prompt matches"
        case CacheEnd.UNKNOWN:
            return "none cached: no recently computed prompt begins like this one"
        case CacheEnd.EVICTED:
            return f"{found}; the block behind them was evicted, its memory was needed"
        case CacheEnd.NOT_READ:
            return "cache not read: prompt log-probabilities need every token computed"
        case CacheEnd.DISABLED:
            return "none cached: prefix caching is off"


def _more_urgent_later_arrivals(request_id: str, batch: ScheduledBatch, place: PlaceState) -> dict[str, int]:
    """Return the tokens in this step of requests in its way that arrived later and are more urgent, by request."""
    me = place.arrival_of(request_id)
    if me is None:
        return {}
    shares = {share.request_id: share for share in batch.requests}
    if batch.limited_by is Limit.TOKENS:
        in_the_way = {i for i, share in shares.items() if share.stroke is Stroke.PREFILL}
    else:
        in_the_way = set(place.num_tokens_held)
    if batch.head_request_id is not None:
        in_the_way.add(batch.head_request_id)
    overtakers: dict[str, int] = {}
    for other in sorted(in_the_way - {request_id}):
        arrival = place.arrival_of(other)
        if arrival is None or arrival.priority >= me.priority or arrival.arrival_time_s <= me.arrival_time_s:
            continue
        overtakers[other] = shares[other].num_scheduled_tokens if other in shares else 0
    return overtakers


# ---------------------------------------------------------------------- between two processes
#
#     prompt computed        room for its KV       last byte                                arrival at the receiver
#          | wait: step | wait: kv  |     transfer     | transfer (word of it) | wait: step     |
#
# The receiver handles messages between two steps. While a step runs there, a sequence whose KV is complete waits for
# it; so does a sequence whose fetch has not begun. Pieces that take no time are left out.


@dataclass(frozen=True, slots=True)
class KVTransferPath:
    """The path of a prefix to the receiver, as far as the history knows it."""

    place: str
    """Name of the receiver."""
    room_s: float = -inf
    """Time at which blocks were allocated there."""
    holders: Mapping[str, int] = field(default_factory=dict[str, int])
    """Requests that held blocks there at that time, with their tokens."""
    step_before: DecidedStep | None = None
    """The step there that ended last before that, at `stepped_s`."""
    stepped_s: float = -inf
    ended: KVImportEnded | None = None
    """The end of the fetch; None while it is in progress."""


def handover_causes(
    source: str, prefilled_s: float, arrival_s: float, way: KVTransferPath | None, receiver: PlaceState
) -> Iterator[tuple[Cause, float]]:
    """Yield each cause of the time between two processes, and its end; the last one ends with the arrival.

    Args:
        source: the process that computed the prompt.
        prefilled_s: time at which the prompt was computed.
        arrival_s: time at which the receiver admitted the sequence.
        way: path of its KV; None: not known.
        receiver: state of the receiver at the arrival.
    """
    fetched = None if way is None else way.ended
    transfer = transfer_cause(source, prefilled_s, fetched)
    if way is not None and fetched is not None:
        if min(way.stepped_s, fetched.begin_s) > prefilled_s:
            is_known = way.step_before is not None and way.step_before.time_s < fetched.begin_s
            step = way.step_before if is_known else None
            yield _at(fetched.process, step_wait_cause(step, "")), fetched.begin_s
        if way.stepped_s > fetched.begin_s:
            yield Cause(Label.WAIT_KV, f"for blocks at {fetched.process}", way.holders), way.room_s
        step, there_s = receiver.last_step, max(prefilled_s, fetched.done_s)
        if step is not None and receiver.last_result_s > there_s:
            yield transfer, max(there_s, step.time_s)
            yield _at(fetched.process, step_wait_cause(step, "")), arrival_s
            return
    yield transfer, arrival_s


def _at(process: str, cause: Cause) -> Cause:
    """Return the cause with the process in its reason."""
    return Cause(cause.label, f"at {process} {cause.reason}", cause.because_of)


def pending_transfer_cause(process: str) -> Cause:
    """Return the cause of the time until another process takes in a request whose prompt `process` has computed."""
    return Cause(Label.TRANSFER, f"from {process}, not taken in yet")


def transfer_cause(source: str, prefilled_s: float, fetched: KVImportEnded | None) -> Cause:
    """Return the cause of the transfer to a process that has taken the request in.

    Args:
        source: the process that computed its prompt.
        prefilled_s: time at which the prompt was computed.
        fetched: how its KV arrived; None: not known.
    """
    if fetched is None:
        return Cause(Label.TRANSFER, f"from {source}")
    if fetched.problem:
        gone = f" after {_amount(fetched.num_bytes)}" if fetched.num_bytes else ""
        return Cause(Label.TRANSFER, f"from {source}, failed{gone}: {fetched.problem}")
    if not fetched.num_bytes:
        return Cause(Label.TRANSFER, f"from {source}; no KV had to be fetched")
    duration_s = fetched.done_s - fetched.first_byte_s
    told = f"{_amount(fetched.num_bytes)} from {source} in {exact_ms(duration_s)} ms"
    if duration_s <= 0:
        return Cause(Label.TRANSFER, told)
    hidden_s = min(max(prefilled_s - fetched.first_byte_s, 0.0), duration_s)
    drift = f"; numerics differ: {fetched.drift}" if fetched.drift else ""
    busy_s = fetched.busy_s or duration_s  # layers are sent as they are computed; between them the link is idle
    rate = f"{significant(fetched.num_bytes / busy_s / 1e9)} GB/s while bytes came"
    return Cause(Label.TRANSFER, f"{told} ({rate}), {hidden_s / duration_s:.0%} of it during the prefill{drift}")


def resume_cause(cause: str) -> Cause:
    """Return the cause of the time until another process resumes a request.

    The process that ran it is gone, or it was to be handed over to a process that is gone.
    """
    return Cause(Label.RESUME, f"{cause.rstrip('.')}; it goes on from what was delivered")


def _amount(num_bytes: int) -> str:
    """Return an amount in megabytes, in words.

    >>> _amount(999), _amount(2_500_000)
    ('0.001 MB', '2.500 MB')
    """
    return f"{num_bytes / 1e6:,.3f} MB"

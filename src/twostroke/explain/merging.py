"""Merging of spans into readable segments: equal neighbours become one segment with its reason in words.

The drafts of several steps, and the gate's decisions about them, are merged in the same way.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from twostroke.batch import Commit, DraftDecision, DraftReason, Stroke
from twostroke.explain.causes import Cause
from twostroke.explain.segments import Culprit, Label, Segment
from twostroke.explain.step import DecidedStep
from twostroke.outputs import num_accepted
from twostroke.plain_words import counted, multiple


@dataclass(frozen=True, slots=True)
class StepDrafts:
    """Drafts of one request in one step."""

    num_draft_tokens: int = 0
    """Verified drafts."""
    num_accepted_tokens: int = 0
    """Accepted drafts."""
    num_places: int = 0
    """Query tokens scheduled for drafts before they were proposed."""
    decision: DraftDecision | None = None
    """The gate's decision for the whole step; None: nothing was decided by measurement."""
    num_requests: int | None = None
    """Number of requests that the decision covers; None: unknown, as one of them was preempted."""


NO_DRAFTS = StepDrafts()


def drafts_of(request_id: str, step: DecidedStep, commit: Commit | None) -> StepDrafts:
    """Return the drafts of a request in a decode step; `commit` None: no result was taken in."""
    num_places = step.shares[request_id].num_draft_tokens
    decision = step.batch.drafts
    if not num_places and decision is None:
        return NO_DRAFTS
    verified, accepted = 0, 0
    if commit is not None:
        verified, accepted = commit.num_draft_tokens, num_accepted(commit.num_tokens, commit.num_draft_tokens)
    num_requests = sum(share.stroke is Stroke.DECODE for share in step.batch.requests)
    return StepDrafts(verified, accepted, num_places, decision, None if step.batch.preemptions else num_requests)


def drafts_in_words(steps: Sequence[StepDrafts]) -> str:
    """Return clauses about drafts to append, each after a semicolon; empty without drafts.

    >>> decision = DraftDecision(DraftReason.DOES_NOT_PAY, 0, 1.2, 0.027, 0.02)
    >>> drafts_in_words([StepDrafts(4, 2, 4), StepDrafts(decision=decision, num_requests=1)])
    '; 2 of 4 drafts accepted; drafting did not pay in 1 step (1.20 tokens expected for 1.35x the time)'
    """
    num_drafts = sum(step.num_draft_tokens for step in steps)
    clauses: list[str] = []
    if num_drafts:
        num_stood = sum(step.num_accepted_tokens for step in steps)
        clauses.append(f"{num_stood:,} of {counted(num_drafts, 'draft')} accepted")
    said = [*_paid(steps), *_did_not_pay(steps), *_others(steps)]
    if said:
        clauses.append("drafting " + ", ".join(said))
    return "".join(f"; {clause}" for clause in clauses)


def _paid(steps: Sequence[StepDrafts]) -> list[str]:
    paid = [step for step in steps if step.decision is not None and step.decision.reason is DraftReason.PAYS]
    if not paid:
        return []
    num_without = sum(not step.num_places for step in paid)
    told = f" ({num_without:,} with none of its own)" if num_without else ""
    return [f"paid in {counted(len(paid), 'step')}{told}"]


def _did_not_pay(steps: Sequence[StepDrafts]) -> list[str]:
    """Describe steps in which drafting did not pay, including those that probed only other requests' drafts."""
    found = [
        step
        for step in steps
        if step.decision is not None
        and (
            step.decision.reason is DraftReason.DOES_NOT_PAY
            or (step.decision.reason is DraftReason.PROBE and not step.num_places)
        )
    ]
    if not found:
        return []
    return [f"did not pay in {counted(len(found), 'step')}{_figures(found[-1])}"]


def _figures(step: StepDrafts) -> str:
    """Return the expected figures of the best drafts, in words."""
    assert step.decision is not None, step
    decision = step.decision
    if not step.num_requests or not decision.plain_s:
        return ""
    tokens = decision.expected_tokens / step.num_requests
    if tokens <= 1:
        return " (none was expected to be accepted)"
    return f" ({multiple(tokens)} tokens expected for {multiple(decision.expected_s / decision.plain_s)}x the time)"


def _others(steps: Sequence[StepDrafts]) -> list[str]:
    reasons = [(step.decision.reason, step.num_places > 0) for step in steps if step.decision is not None]
    num_tried = reasons.count((DraftReason.PROBE, True))
    num_owing = sum(reason is DraftReason.OWES for reason, _ in reasons)
    num_unknown = sum(reason is DraftReason.UNKNOWN for reason, _ in reasons)
    said: list[str] = []
    if num_tried:
        said.append(f"was tried in {counted(num_tried, 'step')}")
    if num_owing:
        said.append(f"was off in {counted(num_owing, 'step')} to make up for time that it had cost")
    if num_unknown:
        said.append(f"waited for {counted(num_unknown, 'step')} to be timed without it")
    return said


# ---------------------------------------------------------------------- spans and segments


MAX_CULPRITS = 4
"""Maximum number of culprits named in a segment; the rest is counted."""

_CHUNKS = (Label.PREFILL, Label.RECOMPUTE)
_QUEUED = (Label.WAIT_SLOTS, Label.WAIT_TOKENS, Label.WAIT_KV, Label.WAIT_PRIORITY, Label.PREEMPTED)


@dataclass(frozen=True, slots=True)
class Work:
    """Work of a step for the sequence."""

    num_steps: int = 0
    num_tokens: int = 0
    """Tokens computed in a chunk, or generated in a decode."""
    admission: int = 0
    """For chunks: number of the admission that the chunk belongs to."""
    is_last: bool = False
    """For chunks: whether it is the last one of the prefill."""
    drafts: StepDrafts = NO_DRAFTS
    """For decodes: drafts that the steps verified."""


NO_WORK = Work()


@dataclass(frozen=True, slots=True)
class Span:
    """Time between two cuts."""

    cause: Cause
    start_s: float
    end_s: float
    work: Work = NO_WORK
    process: str = ""


def merged(spans: Sequence[Span]) -> tuple[Segment, ...]:
    """Return the segments; they cover the same time as the spans."""
    num_chunks = {span.work.admission: i for span, i in _numbered_chunks(spans) if span.work.is_last}
    chunk_of = {id(span): i for span, i in _numbered_chunks(spans)}
    segments: list[Segment] = []
    for group in _groups(spans):
        first = group[0]
        because_of, num_culprits = _culprits(group)
        if id(first) in chunk_of:
            reason = _chunk_in_words(first, chunk_of[id(first)], num_chunks.get(first.work.admission))
        else:
            reason = _in_words(group, because_of, num_culprits)
        is_queued = first.cause.label in _QUEUED
        segments.append(
            Segment(
                label=first.cause.label,
                start_s=first.start_s,
                end_s=group[-1].end_s,
                reason=reason,
                num_steps=len(group) if is_queued else sum(span.work.num_steps for span in group),
                num_tokens=sum(span.work.num_tokens for span in group),
                because_of=because_of,
                num_culprits=num_culprits,
                process=first.process,
            )
        )
    return tuple(segments)


def _groups(spans: Sequence[Span]) -> Iterator[list[Span]]:
    group: list[Span] = []
    for span in spans:
        if group and not _belong_together(group[-1], span):
            yield group
            group = []
        group.append(span)
    if group:
        yield group


def _belong_together(before: Span, after: Span) -> bool:
    label = before.cause.label
    if label is not after.cause.label or before.process != after.process or label in _CHUNKS:
        return False
    if label is Label.KV_CHECK:
        return _finding(before) == _finding(after)
    # a prefill of another request is another stall
    return label is not Label.STALLED or _heaviest(before) == _heaviest(after)


def _finding(check: Span) -> str:
    """Return the result of a KV check: the reason without the checked block."""
    return check.cause.reason.partition("; ")[2]


def _heaviest(span: Span) -> str:
    tokens = span.cause.because_of
    return max(tokens, key=lambda request_id: (tokens[request_id], request_id), default="")


def _culprits(group: Sequence[Span]) -> tuple[tuple[Culprit, ...], int]:
    """Return the requests with most tokens, and the number of all."""
    tokens: Counter[str] = Counter()
    for i, span in enumerate(group):
        if i and span.cause is group[i - 1].cause:  # cut in the middle by an event; still the same step
            continue
        for request_id, num_tokens in span.cause.because_of.items():
            if span.cause.label is Label.WAIT_KV:  # tokens held in memory count once, in however many steps
                tokens[request_id] = max(tokens[request_id], num_tokens)
            else:
                tokens[request_id] += num_tokens
    heaviest = sorted(tokens.items(), key=lambda item: (-item[1], item[0]))[:MAX_CULPRITS]
    return tuple(itertools.starmap(Culprit, heaviest)), len(tokens)


def _numbered_chunks(spans: Sequence[Span]) -> Iterator[tuple[Span, int]]:
    """Yield each chunk with its number since the last admission, from 1."""
    counts: Counter[int] = Counter()
    for span in spans:
        if span.cause.label in _CHUNKS and span.work.num_steps:
            counts[span.work.admission] += 1
            yield span, counts[span.work.admission]


def _chunk_in_words(span: Span, number: int, num_chunks: int | None) -> str:
    of = "" if num_chunks is None else f" of {num_chunks}"
    told = f"; {span.cause.reason}" if span.cause.reason else ""
    return f"chunk {number}{of}, {counted(span.work.num_tokens, 'token')}{told}"


def _in_words(group: Sequence[Span], because_of: Sequence[Culprit], num_culprits: int) -> str:
    cause = group[-1].cause
    num_steps = sum(span.work.num_steps for span in group)
    made = f"{counted(num_steps, 'step')}, {counted(sum(span.work.num_tokens for span in group), 'token')}"
    made += drafts_in_words([span.work.drafts for span in group])
    match cause.label:
        case Label.DECODE if num_steps:
            return made
        case Label.KV_CHECK if len(group) > 1:
            return f"{len(group)} blocks of cached prefixes were computed again; {_finding(group[0])}"
        case Label.STALLED:
            others = f" and {num_culprits - 1} more" if num_culprits > 1 else ""
            longest = because_of[0]
            stalled = f"by the prefill of {longest.request_id} with {counted(longest.num_tokens, 'token')}{others}"
            return f"{stalled}; {made}" if num_steps else f"{stalled}; {cause.reason}"
        case _:
            return cause.reason

"""What became of a request's drafts over some steps, and what the gate had to say of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twostroke.batch import Commit, DraftDecision, DraftReason, Stroke
from twostroke.draft_outcomes import num_accepted
from twostroke.explain.engine_view import DecidedStep
from twostroke.explain.words import counted


@dataclass(frozen=True, slots=True)
class StepDrafts:
    """Of one request, in one step."""

    num_draft_tokens: int = 0
    """Verified."""
    num_accepted_tokens: int = 0
    """Of these, those that stood."""
    num_places: int = 0
    """Given to drafts before anybody had guessed."""
    decision: DraftDecision | None = None
    """The gate's, of the whole step; None where nothing was decided by measurement."""
    num_requests: int | None = None
    """Those that the decision is about; None where one of them had to give way and nobody can tell."""


NO_DRAFTS = StepDrafts()


def drafts_of(request_id: str, step: DecidedStep, commit: Commit | None) -> StepDrafts:
    """What a step of the second stroke did; None for a commit is one that nobody took in."""
    num_places = step.shares[request_id].num_draft_tokens
    decision = step.batch.drafts
    if not num_places and decision is None:
        return NO_DRAFTS
    verified, stood = 0, 0
    if commit is not None:
        verified, stood = commit.num_draft_tokens, num_accepted(commit.num_tokens, commit.num_draft_tokens)
    num_requests = sum(share.stroke is Stroke.DECODE for share in step.batch.requests)
    return StepDrafts(verified, stood, num_places, decision, None if step.batch.preemptions else num_requests)


def drafts_in_words(steps: Sequence[StepDrafts]) -> str:
    """Clauses to append, each behind a semicolon; nothing where nobody drafts.

    >>> decision = DraftDecision(DraftReason.DOES_NOT_PAY, 0, 1.2, 0.027, 0.02)
    >>> drafts_in_words([StepDrafts(4, 2, 4), StepDrafts(decision=decision, num_requests=1)])
    '; 2 of 4 drafts stood; drafting did not pay in 1 step (1.20 tokens expected for 1.35x the time)'
    """
    num_drafts = sum(step.num_draft_tokens for step in steps)
    clauses: list[str] = []
    if num_drafts:
        num_stood = sum(step.num_accepted_tokens for step in steps)
        clauses.append(f"{num_stood:,} of {counted(num_drafts, 'draft')} stood")
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
    """Steps that tried somebody else's drafts among them."""
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
    """Of the best that could have been drafted."""
    assert step.decision is not None, step
    decision = step.decision
    if not step.num_requests or not decision.plain_s:
        return ""
    tokens = decision.expected_tokens / step.num_requests
    if tokens <= 1:
        return " (none was expected to stand)"
    return f" ({tokens:.2f} tokens expected for {decision.expected_s / decision.plain_s:.2f}x the time)"


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

"""Drafts, counted: why there were any, how many were verified, and how many of them stood."""

from __future__ import annotations

from collections.abc import Sequence

from twostroke.batch import Commit, DraftReason, ScheduledBatch
from twostroke.draft_outcomes import num_accepted
from twostroke.metrics import families
from twostroke.metrics.instruments import Instruments


class DraftCounts:
    """Counts what became of drafts, step by step."""

    def __init__(self, instruments: Instruments) -> None:
        self._rounds = instruments.number(families.SPEC_DECODE_NUM_DRAFTS)
        self._drafted = instruments.number(families.SPEC_DECODE_NUM_DRAFT_TOKENS)
        self._accepted = instruments.number(families.SPEC_DECODE_NUM_ACCEPTED_TOKENS)
        self._accepted_at = instruments.number(families.SPEC_DECODE_NUM_ACCEPTED_TOKENS_PER_POS)

        self._decisions = instruments.number(families.SPEC_DECODE_DECISIONS)
        for reason in DraftReason:
            self._decisions.set(0, reason)

    def decided(self, batch: ScheduledBatch) -> None:
        """A step is about to run."""
        if batch.drafts is not None:
            self._decisions.add(1, batch.drafts.reason)

    def committed(self, commits: Sequence[Commit]) -> None:
        """The outcome of a step is there."""
        for commit in commits:
            if commit.num_draft_tokens:
                num_stood = num_accepted(commit.num_tokens, commit.num_draft_tokens)
                self._rounds.add(1)
                self._drafted.add(commit.num_draft_tokens)
                self._accepted.add(num_stood)
                for position in range(num_stood):
                    self._accepted_at.add(1, str(position))

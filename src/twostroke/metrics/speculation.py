"""Drafts, counted: how many were verified, and how many of them stood."""

from __future__ import annotations

from collections.abc import Sequence

from twostroke.batch import Commit, ScheduledRequest
from twostroke.metrics import families
from twostroke.metrics.instruments import Instruments


class DraftCounts:
    """Follows drafts from the decision to verify them to the outcome."""

    def __init__(self, instruments: Instruments) -> None:
        self._rounds = instruments.number(families.SPEC_DECODE_NUM_DRAFTS)
        self._drafted = instruments.number(families.SPEC_DECODE_NUM_DRAFT_TOKENS)
        self._accepted = instruments.number(families.SPEC_DECODE_NUM_ACCEPTED_TOKENS)
        self._accepted_at = instruments.number(families.SPEC_DECODE_NUM_ACCEPTED_TOKENS_PER_POS)
        self._in_flight: dict[tuple[int, str], int] = {}
        """By step and sequence."""

    def scheduled(self, step: int, requests: Sequence[ScheduledRequest]) -> None:
        """A step was decided."""
        for request in requests:
            if request.num_draft_tokens:
                self._in_flight[step, request.request_id] = request.num_draft_tokens

    def committed(self, step: int, commits: Sequence[Commit]) -> None:
        """Its outcome is there; drafts of sequences that have ended meanwhile count for nothing."""
        if not self._in_flight:  # nobody drafts
            return
        for commit in commits:
            num_drafts = self._in_flight.pop((step, commit.request_id), 0)
            if num_drafts:
                num_accepted = max(0, commit.num_tokens - 1)
                self._rounds.add(1)
                self._drafted.add(num_drafts)
                self._accepted.add(num_accepted)
                for position in range(num_accepted):
                    self._accepted_at.add(1, str(position))
        for key in [key for key in self._in_flight if key[0] <= step]:
            del self._in_flight[key]

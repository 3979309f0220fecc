"""Drafts that a model draws one after the other, for all sequences at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from twostroke.sampling.sampler import Sampler
from twostroke.speculation.draws import DraftDraws
from twostroke.speculation.proposer import DraftRequest, Drafts
from twostroke.speculation.reader import Reader, Reading


class ReadTokens(Protocol):
    """How much of each sequence the drafting layers have read: for so many tokens they have K and V."""

    def num_read(self, request: DraftRequest) -> int:
        """Of the known tokens; always less than all, as the last one's logits are needed."""
        ...

    def read(self, request: DraftRequest, drafts: Sequence[int], num_tokens: int) -> None:
        """They have read the first `num_tokens` of the known tokens and these drafts."""
        ...

    def forget(self, row: int, num_tokens: int) -> None:
        """See Proposer."""
        ...


class ReadByTarget:
    """The target's own layers draft: it has read every token but the one that was drawn last."""

    def num_read(self, request: DraftRequest) -> int:
        """All but the last."""
        return len(request.token_ids) - 1

    def read(self, request: DraftRequest, drafts: Sequence[int], num_tokens: int) -> None:
        """The target will read them itself."""

    def forget(self, row: int, num_tokens: int) -> None:
        """Nothing is kept."""


class ReadByDraftModel:
    """A model of its own: it reads prompts when it is first asked, and what it drafted it has read if that stood."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}
        """Per row, tokens read when they were known."""
        self._guessed: dict[int, tuple[int, ...]] = {}
        """Per row, drafts read behind these."""

    def num_read(self, request: DraftRequest) -> int:
        """What was known then, and the drafts behind it that have become known since."""
        row, token_ids = request.row, request.token_ids
        num_read = self._known.get(row, 0)
        for guess in self._guessed.pop(row, ()):
            if num_read >= len(token_ids) or token_ids[num_read] != guess:
                break
            num_read += 1
        self._known[row] = num_read
        return min(num_read, len(token_ids) - 1)

    def read(self, request: DraftRequest, drafts: Sequence[int], num_tokens: int) -> None:
        """Keeps it in mind."""
        self._known[request.row] = num_tokens
        self._guessed[request.row] = tuple(drafts)

    def forget(self, row: int, num_tokens: int) -> None:
        """Drafts included: what stood of them is read again."""
        known = self._known.get(row, 0)
        num_guessed = max(0, num_tokens - known)
        self._known[row] = min(known, num_tokens)
        self._guessed[row] = self._guessed.get(row, ())[:num_guessed]


class ChainProposer:
    """Draws a draft, reads it, draws the next one; each with the noise that the target will draw that position with.

    A sequence whose known tokens were not read yet has no drafts until they are: so many are read in a step that
    others do not wait long.

    Args:
        reader: the layers that draft.
        tokens: what they have read.
        sampler: the target's.
        max_tokens: most known tokens to read in one step.
    """

    def __init__(self, reader: Reader, tokens: ReadTokens, sampler: Sampler, *, max_tokens: int) -> None:
        self._reader = reader
        self._tokens = tokens
        self._sampler = sampler
        self._max_tokens = max_tokens

    def propose(self, requests: Sequence[DraftRequest]) -> list[Drafts]:
        """See Proposer."""
        readings, through, ends = self._known_tokens(requests)
        draws = DraftDraws(self._sampler, requests, through)
        while readings:
            logits = self._reader.read(readings, ends)
            if not draws.active:
                break
            draws.draw(logits)
            readings = [self._last_draft(requests[i], draws.drafts[i]) for i in draws.active]
            ends = range(len(readings))
        for i in through:
            self._tokens.read(requests[i], draws.drafts[i][:-1], len(requests[i].token_ids))
        return draws.found()

    def forget(self, row: int, num_tokens: int) -> None:
        """See Proposer."""
        self._tokens.forget(row, num_tokens)

    @staticmethod
    def _last_draft(request: DraftRequest, drafts: Sequence[int]) -> Reading:
        return Reading(request, len(request.token_ids) + len(drafts) - 1, np.array(drafts[-1:], np.int32))

    def _known_tokens(self, requests: Sequence[DraftRequest]) -> tuple[list[Reading], list[int], Sequence[int]]:
        """What is to be read first; which requests are through with their known tokens then, and as which reading."""
        num_left = self._max_tokens
        readings: list[Reading] = []
        through: list[int] = []
        ends: list[int] = []
        for i, request in enumerate(requests):
            begin = self._tokens.num_read(request)
            end = min(len(request.token_ids), begin + num_left)
            num_left -= end - begin
            if end == begin:
                continue
            if end == len(request.token_ids):
                through.append(i)
                ends.append(len(readings))
            else:
                self._tokens.read(request, (), end)
            readings.append(Reading(request, begin, request.token_ids[begin:end]))
        return readings, through, ends

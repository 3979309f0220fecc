"""Drafts that a model draws one after the other, for all sequences at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from twostroke.sampling.sampler import Sampler
from twostroke.speculation.draft_model_pass import DraftModelPass, DraftPassInput
from twostroke.speculation.draws import DraftDraws
from twostroke.speculation.proposer import DraftRequest, Drafts


class ComputedTokens(Protocol):
    """Number of tokens of each sequence that the drafting layers have computed K and V of."""

    def num_computed(self, request: DraftRequest) -> int:
        """Return how many of the known tokens were computed; always less than all, as the last one's logits are
        needed."""
        ...

    def read(self, request: DraftRequest, drafts: Sequence[int], num_tokens: int) -> None:
        """Record that the first `num_tokens` known tokens and these drafts were computed."""
        ...

    def forget(self, row: int, num_tokens: int) -> None:
        """Invalidate a row's tokens from the `num_tokens`th on (see Proposer)."""
        ...


class ComputedByTarget:
    """Drafting by the target's own layers, which have computed every token except the last."""

    def num_computed(self, request: DraftRequest) -> int:
        return len(request.token_ids) - 1

    def read(self, request: DraftRequest, drafts: Sequence[int], num_tokens: int) -> None:
        """Do nothing, because the target will compute the drafts itself."""

    def forget(self, row: int, num_tokens: int) -> None:
        """Do nothing, because nothing is kept."""


class ComputedByDraftModel:
    """Drafting by a separate model: it prefills a prompt when first asked for drafts, and keeps K and V of accepted
    drafts."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}
        """Known tokens computed, by row."""
        self._guessed: dict[int, tuple[int, ...]] = {}
        """Drafts computed after these, by row."""

    def num_computed(self, request: DraftRequest) -> int:
        """Return the known tokens computed then, plus the drafts after them that were accepted since."""
        row, token_ids = request.row, request.token_ids
        num_read = self._known.get(row, 0)
        for guess in self._guessed.pop(row, ()):
            if num_read >= len(token_ids) or token_ids[num_read] != guess:
                break
            num_read += 1
        self._known[row] = num_read
        return min(num_read, len(token_ids) - 1)

    def read(self, request: DraftRequest, drafts: Sequence[int], num_tokens: int) -> None:
        self._known[request.row] = num_tokens
        self._guessed[request.row] = tuple(drafts)

    def forget(self, row: int, num_tokens: int) -> None:
        """Invalidate tokens from the `num_tokens`th on, drafts included."""
        known = self._known.get(row, 0)
        num_guessed = max(0, num_tokens - known)
        self._known[row] = min(known, num_tokens)
        self._guessed[row] = self._guessed.get(row, ())[:num_guessed]


class ChainProposer:
    """Proposer that draws a draft, computes it, and draws the next one, with the target's noise at each position.

    A sequence gets no drafts until all its known tokens were computed. A step computes a limited number of them, so
    that other sequences do not wait long.

    Args:
        reader: the drafting layers.
        tokens: tokens they have computed.
        sampler: the target's sampler.
        max_tokens: most known tokens to compute in one step.
    """

    def __init__(self, reader: DraftModelPass, tokens: ComputedTokens, sampler: Sampler, *, max_tokens: int) -> None:
        self._reader = reader
        self._tokens = tokens
        self._sampler = sampler
        self._max_tokens = max_tokens

    def propose(self, requests: Sequence[DraftRequest]) -> list[Drafts]:
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
        self._tokens.forget(row, num_tokens)

    @staticmethod
    def _last_draft(request: DraftRequest, drafts: Sequence[int]) -> DraftPassInput:
        return DraftPassInput(request, len(request.token_ids) + len(drafts) - 1, np.array(drafts[-1:], np.int32))

    def _known_tokens(self, requests: Sequence[DraftRequest]) -> tuple[list[DraftPassInput], list[int], Sequence[int]]:
        """Return the first readings, the requests whose known tokens are then all computed, and the index of their
        readings."""
        num_left = self._max_tokens
        readings: list[DraftPassInput] = []
        through: list[int] = []
        ends: list[int] = []
        for i, request in enumerate(requests):
            begin = self._tokens.num_computed(request)
            end = min(len(request.token_ids), begin + num_left)
            num_left -= end - begin
            if end == begin:
                continue
            if end == len(request.token_ids):
                through.append(i)
                ends.append(len(readings))
            else:
                self._tokens.read(request, (), end)
            readings.append(DraftPassInput(request, begin, request.token_ids[begin:end]))
        return readings, through, ends

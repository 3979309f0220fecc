"""Draws of drafts, with the sampler, rules and noise that the target will use at the same positions."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from twostroke.sampling.sampler import Sampler
from twostroke.sampling.state import SamplingState
from twostroke.speculation.proposer import DraftRequest, Drafts


class DraftDraws:
    """Drafts of some requests, extended by one at a time.

    `active` lists the requests, by index, that the next draft is drawn for: those that can use more drafts and had no
    error.
    """

    def __init__(self, sampler: Sampler, requests: Sequence[DraftRequest], active: Sequence[int]) -> None:
        self._sampler = sampler
        self._requests = requests
        self._states: dict[int, SamplingState] = {i: requests[i].sampling.after_tokens(()) for i in active}
        self.drafts: list[list[int]] = [[] for _ in requests]
        self.active = list(active)

    def draw(self, logits: Tensor) -> list[int]:
        """Draw one more draft for each active request.

        Args:
            logits: float32 [len(active), vocab_size].

        Returns:
            Rows of these logits whose requests are still active.
        """
        token_ids, errors = self._sampler.draw(logits, [self._states[i] for i in self.active])
        kept: list[int] = []
        for place, (i, token_id) in enumerate(zip(self.active, token_ids.tolist(), strict=True)):
            if place in errors:
                continue
            self.drafts[i].append(token_id)
            if len(self.drafts[i]) < self._requests[i].num_drafts:
                self._states[i].append(token_id)
                kept.append(place)
        self.active = [self.active[place] for place in kept]
        return kept

    def found(self) -> list[Drafts]:
        """Return all drafts, by request."""
        return [Drafts(tuple(drafts)) for drafts in self.drafts]

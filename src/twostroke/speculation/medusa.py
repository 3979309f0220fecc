"""Drafts of Medusa heads: all positions at once, from the target's last hidden state; a chain, and branches where there
are slots left."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from twostroke.model.medusa import MedusaHeads
from twostroke.sampling.sampler import Sampler
from twostroke.speculation.draws import DraftDraws
from twostroke.speculation.observation_policy import ObservationPolicy
from twostroke.speculation.proposer import DraftRequest, Drafts, TargetStep

_MIN_BRANCH = 2
"""Least slots of a branch: the last known token again, and one draft."""


class MedusaProposer:
    """Proposer that keeps the hidden state from which each sequence's last known token was drawn."""

    feature_layers: tuple[int, ...] = ()
    """No layers: it needs only the final hidden state."""

    def __init__(self, heads: MedusaHeads, sampler: Sampler) -> None:
        self._heads = heads
        self._sampler = sampler
        self._hidden: dict[int, tuple[int, Tensor, int]] = {}
        """Known tokens at that time, states [some rows, hidden_size] and the index of the row's own, by row."""
        self._observation_policy = ObservationPolicy()

    def needs_step(self, reads_prompts: bool) -> bool:
        return reads_prompts or self._observation_policy.is_observing

    def observe(self, step: TargetStep) -> None:
        self._observation_policy.step_passed(step)
        reads = [read for read in step.spans if read.end == read.num_known - 1]  # a token was drawn after it
        ends = [read.first + read.num_tokens - 1 for read in reads]
        hidden = step.hidden
        if len(hidden) > len(reads):  # a copy, or a chunk's last state would keep its whole tensor alive
            hidden = hidden[torch.tensor(ends, dtype=torch.int64, device=hidden.device)]
            ends = list(range(len(reads)))
        for read, end in zip(reads, ends, strict=True):
            self._hidden[read.row] = read.num_known, hidden, end

    def propose(self, requests: Sequence[DraftRequest]) -> list[Drafts]:
        self._observation_policy.drafts_wanted()
        active = [i for i, request in enumerate(requests) if self._is_known(request)]
        draws = DraftDraws(self._sampler, requests, active)
        branches: dict[int, tuple[tuple[int, ...], ...]] = {}
        if active:
            num_heads = min(self._heads.shape.num_heads, max(requests[i].num_drafts for i in active))
            kept = [self._hidden[requests[i].row] for i in active]
            hidden = torch.stack([states[place] for _, states, place in kept])
            rows = list(range(len(active)))
            logits = self._heads.logits(hidden, num_heads)
            for of_head in logits:
                if not draws.active:
                    break
                rows = [rows[place] for place in draws.draw(of_head[rows])]
            for place, i in enumerate(active):
                branches[i] = self._branches(requests[i], draws.drafts[i], logits[:, place])
        return [drafts._replace(branches=branches.get(i, ())) for i, drafts in enumerate(draws.found())]

    def _branches(self, request: DraftRequest, chain: Sequence[int], logits: Tensor) -> tuple[tuple[int, ...], ...]:
        """Return branches for the slots that the chain leaves: second choices of the first two heads, a third of the
        first.

        Later heads do not know what the first ones chose, so a branch continues like the chain.
        """
        num_spare = request.num_drafts - len(chain)
        found: list[tuple[int, ...]] = []
        if num_spare < _MIN_BRANCH or not chain:
            return ()
        second, third = self._next_choices(request, (), logits[0], chain[0], 2)
        wanted = [(second, *chain[1:2]), (third, *chain[1:2])]
        if len(chain) > 1:
            (other,) = self._next_choices(request, chain[:1], logits[1], chain[1], 1)
            wanted.insert(1, (chain[0], other))
        for branch in wanted:
            path = branch[: num_spare - 1]
            if path and path != tuple(chain[: len(path)]):
                found.append(path)
                num_spare -= 1 + len(path)
        return tuple(found)

    def _next_choices(
        self, request: DraftRequest, behind: Sequence[int], logits: Tensor, first: int, count: int
    ) -> list[int]:
        """Return a head's next choices, with the position's own noise, if its previous ones were excluded."""
        left, state = logits.clone()[None], request.sampling.after_tokens(behind)
        found: list[int] = [first]
        while len(found) <= count:
            left[0, found[-1]] = float("-inf")
            found.append(int(self._sampler.draw(left.clone(), [state])[0]))
        return found[1:]

    def forget(self, row: int, num_tokens: int) -> None:
        """Forget a sequence; hidden states lie in no block."""
        if not num_tokens:
            self._hidden.pop(row, None)

    def _is_known(self, request: DraftRequest) -> bool:
        known = self._hidden.get(request.row)
        return known is not None and known[0] == len(request.token_ids)

"""Drafts of Medusa heads: all positions at once, from the target's last hidden state. A chain: one guess a position."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from twostroke.model.medusa import MedusaHeads
from twostroke.sampling.sampler import Sampler
from twostroke.speculation.draws import DraftDraws
from twostroke.speculation.proposer import DraftRequest, TargetStep


class MedusaProposer:
    """Keeps of each sequence the hidden state that its last known token was drawn from."""

    feature_layers: tuple[int, ...] = ()
    """The final hidden state is all it wants."""

    def __init__(self, heads: MedusaHeads, sampler: Sampler) -> None:
        self._heads = heads
        self._sampler = sampler
        self._hidden: dict[int, tuple[int, Tensor, int]] = {}
        """Per row: how many tokens were known then, states [some rows, hidden_size] and which of them is its own."""

    def observe(self, step: TargetStep) -> None:
        """See Watcher."""
        reads = [read for read in step.reads if read.end == read.num_known - 1]  # a token was drawn behind it
        ends = [read.first + read.num_tokens - 1 for read in reads]
        hidden = step.hidden
        if len(hidden) > len(reads):  # or chunks of prompts would live on with their last state
            hidden = hidden[torch.tensor(ends, dtype=torch.int64, device=hidden.device)]
            ends = list(range(len(reads)))
        for read, end in zip(reads, ends, strict=True):
            self._hidden[read.row] = read.num_known, hidden, end

    def propose(self, requests: Sequence[DraftRequest]) -> list[tuple[int, ...]]:
        """See Proposer."""
        active = [i for i, request in enumerate(requests) if self._is_known(request)]
        draws = DraftDraws(self._sampler, requests, active)
        if active:
            num_heads = min(self._heads.shape.num_heads, max(requests[i].num_drafts for i in active))
            kept = [self._hidden[requests[i].row] for i in active]
            hidden = torch.stack([states[place] for _, states, place in kept])
            rows = list(range(len(active)))
            for logits in self._heads.logits(hidden, num_heads):
                if not draws.active:
                    break
                rows = [rows[place] for place in draws.draw(logits[rows])]
        return draws.found()

    def forget(self, row: int, num_tokens: int) -> None:
        """See Proposer; hidden states lie in no block."""
        if not num_tokens:
            self._hidden.pop(row, None)

    def _is_known(self, request: DraftRequest) -> bool:
        known = self._hidden.get(request.row)
        return known is not None and known[0] == len(request.token_ids)

"""Drafts of an EAGLE-3 head: it reads along with the target, then goes on from its own guesses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twostroke.layers.attention import KVTensors
from twostroke.layers.attention_metadata import AttentionLayout, AttentionMetadata
from twostroke.model.eagle import EagleHead
from twostroke.sampling.sampler import Sampler
from twostroke.speculation.draws import DraftDraws
from twostroke.speculation.proposer import DraftRequest, TargetRead, TargetStep


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """Some consecutive positions of a sequence."""

    begin: int
    token_ids: npt.NDArray[np.int32]
    """The tokens behind them, one each."""
    block_tables: Sequence[npt.NDArray[np.int32]]


class EagleProposer:
    """Keeps of each sequence the head's last output, which the first draft is drawn from.

    Its K and V lie beside the target's, block by block, so that a prefix that is found in the cache is one for the head
    as well.

    Args:
        head: the drafting layer.
        kv: where its K and V are.
        layout: of that storage.
        group: of the target, whose block tables it goes by.
        feature_layers: see Watcher.
        sampler: the target's.
        device: where the tensors of a pass are made.
    """

    def __init__(
        self,
        head: EagleHead,
        kv: KVTensors,
        layout: AttentionLayout,
        group: int,
        feature_layers: tuple[int, ...],
        sampler: Sampler,
        device: torch.device,
    ) -> None:
        self.feature_layers = feature_layers
        self._head = head
        self._kv = kv
        self._layout = layout
        self._group = group
        self._sampler = sampler
        self._device = device
        self._operator = head.attention
        self._outputs: dict[int, tuple[int, Tensor]] = {}
        """Per row: how many tokens were known then, and y [hidden_size] of the last position but one."""

    def observe(self, step: TargetStep) -> None:
        """See Watcher: reads what the target has read, each position with the token that is known to follow it."""
        reads = [read for read in step.reads if read.num_tokens and read.end < len(read.token_ids)]
        if not reads:
            return
        rows = np.concatenate([np.arange(read.first, read.first + read.num_tokens) for read in reads])
        features = torch.cat(step.features, dim=-1)[self._tensor(rows)]
        y = self._pass(self._head.fused(features), [self._place(read) for read in reads])
        last = np.cumsum([read.num_tokens for read in reads]) - 1
        for read, output in zip(reads, y[self._tensor(last)], strict=True):
            self._outputs[read.row] = read.end + 1, output

    def propose(self, requests: Sequence[DraftRequest]) -> list[tuple[int, ...]]:
        """See Proposer."""
        active = [i for i, request in enumerate(requests) if self._is_known(request)]
        draws = DraftDraws(self._sampler, requests, active)
        if not active:
            return draws.found()
        y = torch.stack([self._outputs[requests[i].row][1] for i in active])
        while True:
            kept = draws.draw(self._head.logits(y))
            if not kept:
                return draws.found()
            places = [self._behind(requests[i], draws.drafts[i]) for i in draws.active]
            y = self._pass(y[torch.tensor(kept, device=self._device)], places)

    def forget(self, row: int, num_tokens: int) -> None:
        """See Proposer."""
        if not num_tokens:
            self._outputs.pop(row, None)

    def _is_known(self, request: DraftRequest) -> bool:
        known = self._outputs.get(request.row)
        return known is not None and known[0] == len(request.token_ids)

    @staticmethod
    def _place(read: TargetRead) -> _Place:
        return _Place(read.begin, read.token_ids[read.begin + 1 : read.end + 1], read.block_tables)

    @staticmethod
    def _behind(request: DraftRequest, drafts: Sequence[int]) -> _Place:
        """The position whose next token is the last draft."""
        begin = len(request.token_ids) + len(drafts) - 2
        return _Place(begin, np.array(drafts[-1:], np.int32), request.block_tables)

    def _pass(self, h: Tensor, places: Sequence[_Place]) -> Tensor:
        lens = np.array([len(place.token_ids) for place in places])
        query_start_loc = np.zeros(len(places) + 1, np.int32)
        np.cumsum(lens, out=query_start_loc[1:])
        seq_lens = np.array([place.begin for place in places], np.int32) + lens.astype(np.int32)
        max_blocks = -(-int(seq_lens.max()) // self._layout.block_size)
        attention = AttentionMetadata.build(
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_tables=[np.stack([place.block_tables[self._group][:max_blocks] for place in places])],
            layout=self._layout,
            operator=self._operator,
        )
        positions = np.concatenate([np.arange(place.begin, place.begin + len(place.token_ids)) for place in places])
        token_ids = np.concatenate([place.token_ids for place in places]).astype(np.int64)
        return self._head.forward(h, self._tensor(token_ids), self._tensor(positions), attention, self._kv)

    def _tensor(self, array: npt.NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self._device)

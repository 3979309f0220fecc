"""Drafts of an EAGLE-3 head, which reads the target's hidden features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twostroke.layers.attention import AttentionLayout, AttentionMetadata, KVTensors
from twostroke.model.eagle import EagleHead
from twostroke.sampling.sampler import Sampler
from twostroke.speculation.draft_model_pass import TargetTable
from twostroke.speculation.draws import DraftDraws
from twostroke.speculation.history import FeatureHistory
from twostroke.speculation.observation_policy import ObservationPolicy
from twostroke.speculation.proposer import DraftRequest, Drafts, TargetStep


class _ReadSpan(NamedTuple):
    """Consecutive positions of a sequence that the head reads."""

    start: int
    """First position whose K and V the head sees; it ignores earlier ones."""
    begin: int
    token_ids: npt.NDArray[np.int32]
    """Next token of each position."""
    block_table: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class EagleKV:
    """K and V of the head, stored in parallel to the target's pages."""

    kv: KVTensors
    num_pages: int
    layout: AttentionLayout
    table: TargetTable


class EagleProposer:
    """Proposer that reads the target's features of a sequence when drafts are wanted, then continues from its own
    drafts.

    ```
    pages           |  0  |  1  |  2  |  3  |  4  |  5  |
    target has read  ###################################            and features of the latest tokens are kept
    head has read          ==================                       contiguous, from the start of a page on
    next draft             ------------------++++++++++++           it reads the rest in one pass first
    ```

    Its K and V are stored in parallel to the target's pages, so a prefix found in the cache also serves the head, as
    far as the head has read it. It ignores positions that it has not read and whose features are gone: that makes
    drafts worse and changes no token. When it is not asked for drafts for a while, it observes only prompts; asked
    again within a text, it has to see the start of a page first.

    Args:
        head: the drafting layer.
        memory: its K and V.
        history: the target's features.
        sampler: the target's sampler.
        device: where the tensors of a pass are made.
    """

    def __init__(
        self,
        head: EagleHead,
        memory: EagleKV,
        history: FeatureHistory,
        sampler: Sampler,
        device: torch.device,
    ) -> None:
        self.feature_layers = history.layers
        self._head = head
        self._kv, self._layout, self._table = memory.kv, memory.layout, memory.table
        self._history = history
        self._sampler = sampler
        self._device = device
        self._operators = head.attention
        self._observation_policy = ObservationPolicy()
        self._has_read: dict[int, range] = {}
        """Positions whose K and V the head computed for the row's sequence, by row."""
        self._is_read = np.zeros(memory.num_pages, bool)
        """Pages of which it has read every position, since the target last wrote them."""

    def needs_step(self, reads_prompts: bool) -> bool:
        return reads_prompts or self._observation_policy.is_observing

    def observe(self, step: TargetStep) -> None:
        """Keep the features of a step; nothing is read yet."""
        self._observation_policy.step_passed(step)
        self._history.add(step)
        size, table = self._layout.block_size, step.block_tables[self._table.group_id]
        for read in step.spans:
            opened, behind = -(-read.begin // size), -(-read.end // size)
            if opened < behind:
                self._is_read[self._table.pages(table[read.row, opened:behind])] = False

    def propose(self, requests: Sequence[DraftRequest]) -> list[Drafts]:
        if not self._observation_policy.is_observing:  # pages that the target wrote meanwhile are unknown
            self._is_read[:] = False
        self._observation_policy.drafts_wanted()
        places = {i: place for i, request in enumerate(requests) if (place := self._unread(request)) is not None}
        draws = DraftDraws(self._sampler, requests, list(places))
        if not places:
            return draws.found()
        y = self._read({requests[i].row: place for i, place in places.items()})
        while True:
            kept = draws.draw(self._head.logits(y))
            if not kept:
                return draws.found()
            behind = [self._after_last_draft(requests[i], places[i].start, draws.drafts[i]) for i in draws.active]
            y = self._pass(y[torch.tensor(kept, device=self._device)], behind)

    def forget(self, row: int, num_tokens: int) -> None:
        if not num_tokens:
            self._history.forget(row)
            self._has_read.pop(row, None)
        elif row in self._has_read:
            has_read = self._has_read[row]
            self._has_read[row] = range(has_read.start, min(has_read.stop, num_tokens))

    def _unread(self, request: DraftRequest) -> _ReadSpan | None:
        """Return the positions to read before a draft, up to the last but one token; None if that is impossible."""
        span, last = self._history.span(request.row), len(request.token_ids) - 1
        if span.stop != last:
            return None
        table = self._table.pages(request.block_tables[self._table.group_id])
        has_read = self._has_read.get(request.row)
        if has_read is not None and span.start <= has_read.stop:
            start, begin = has_read.start, min(has_read.stop, last - 1)  # the last position is read for its output y
        else:
            size = self._layout.block_size
            first = -(-span.start // size)
            unread = np.flatnonzero(~self._is_read[table[:first]])
            page = int(unread[-1]) + 1 if len(unread) else 0
            start, begin = page * size, first * size
        return _ReadSpan(start, begin, request.token_ids[begin + 1 :], table) if span.start <= begin < last else None

    def _read(self, places: dict[int, _ReadSpan]) -> Tensor:
        """Read positions by row, and return outputs [len(places), hidden_size] after the last position of each."""
        ends = {row: place.begin + len(place.token_ids) for row, place in places.items()}
        features = self._history.features([(row, range(places[row].begin, end)) for row, end in ends.items()])
        y = self._pass(self._head.fused(features), list(places.values()))
        size = self._layout.block_size
        for row, place in places.items():
            self._has_read[row] = range(place.start, ends[row])
            self._is_read[place.block_table[place.begin // size : ends[row] // size]] = True
        return y[self._tensor(np.cumsum([len(place.token_ids) for place in places.values()]) - 1)]

    def _after_last_draft(self, request: DraftRequest, start: int, drafts: Sequence[int]) -> _ReadSpan:
        """Return the position whose next token is the last draft."""
        table = self._table.pages(request.block_tables[self._table.group_id])
        begin = len(request.token_ids) + len(drafts) - 2
        return _ReadSpan(start, begin, np.array(drafts[-1:], np.int32), table)

    def _pass(self, h: Tensor, places: Sequence[_ReadSpan]) -> Tensor:
        lens = np.array([len(place.token_ids) for place in places], np.int32)
        query_start_loc = np.zeros(len(places) + 1, np.int32)
        np.cumsum(lens, out=query_start_loc[1:])
        seq_lens = np.array([place.begin - place.start for place in places], np.int32) + lens
        size = self._layout.block_size
        tables = np.zeros((len(places), -(-int(seq_lens.max()) // size)), np.int32)
        for row, place in zip(tables, places, strict=True):
            blocks = place.block_table[place.start // size :][: len(row)]
            row[: len(blocks)] = blocks
        attention = AttentionMetadata.build(
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_tables=[tables],
            layout=self._layout,
            operators=self._operators,
        )
        positions = np.concatenate([np.arange(place.begin, place.begin + len(place.token_ids)) for place in places])
        token_ids = np.concatenate([place.token_ids for place in places]).astype(np.int64)
        return self._head.forward(h, self._tensor(token_ids), self._tensor(positions), attention, self._kv)

    def _tensor(self, array: npt.NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self._device)

"""Pass of a drafting model: some layers over some tokens of each sequence, and logits after the last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twostroke.kv_cache.layout import PageIds
from twostroke.layers.attention import AttentionLayout, AttentionMetadata, KVTensors
from twostroke.model.decoder import DecoderModel
from twostroke.speculation.proposer import DraftRequest


@dataclass(frozen=True, slots=True, eq=False)
class DraftPassInput:
    """Tokens of a sequence to compute."""

    request: DraftRequest
    begin: int
    """Position of the first token."""
    token_ids: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class TargetTable:
    """Block table of the target that drafting layers use."""

    group_id: int
    """KV group of the target."""
    ids: PageIds | None = None
    """Ids of the target's pages, where K and V are in a separate storage, whose pages are numbered without gaps; None
    where they are in the target's storage."""

    def pages(self, page_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Return the pages that correspond to pages of the target.

        >>> table = TargetTable(0, PageIds(per_block=2, step=3, stride=10, bytes_per_id=64))
        >>> table.pages(np.array([0, 3, 40, 43])).tolist()
        [0, 1, 8, 9]
        """
        if self.ids is None or self.ids.per_block == self.ids.stride:
            return page_ids
        return page_ids // self.ids.stride * self.ids.per_block + page_ids % self.ids.stride // self.ids.step


class DraftModelPass:
    """First layers of a model, its norm and its head.

    ```
    draft model   all layers of its own, K and V in a separate storage: page i of it goes with page i of the target
    early exit    the first layers of the target, whose K and V the target reads and writes as well
    ```

    Args:
        model: model whose layers are used.
        num_layers: number of layers, from the first on.
        kv: storage of their K and V.
        layout: layout of that storage.
        tables: the target's block table for each KV group of `layout`.
        device: where the tensors of a pass are made.
    """

    def __init__(
        self,
        model: DecoderModel,
        num_layers: int,
        kv: KVTensors,
        layout: AttentionLayout,
        tables: Sequence[TargetTable],
        device: torch.device,
    ) -> None:
        assert len(tables) == len(layout.shapes), f"{tables} for {layout}"
        self._model = model
        self._layers = range(num_layers)
        self._kv = kv
        self._layout = layout
        self._tables = tuple(tables)
        self._device = device

    @torch.inference_mode()
    def read(self, readings: Sequence[DraftPassInput], ends: Sequence[int]) -> Tensor:
        """Compute the tokens, and return logits after the last token of some readings.

        Args:
            readings: tokens to compute, at least one each.
            ends: indices of the readings whose logits are wanted.

        Returns:
            float32 [len(ends), vocab_size].
        """
        lens = np.array([len(reading.token_ids) for reading in readings])
        query_start_loc = np.zeros(len(readings) + 1, np.int32)
        np.cumsum(lens, out=query_start_loc[1:])
        seq_lens = np.array([reading.begin for reading in readings], np.int32) + lens.astype(np.int32)
        positions = np.concatenate([np.arange(r.begin, r.begin + len(r.token_ids)) for r in readings])
        token_ids = np.concatenate([reading.token_ids for reading in readings]).astype(np.int64)
        max_pages = -(-int(seq_lens.max()) // self._layout.block_size)
        attention = AttentionMetadata.build(
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_tables=[
                table.pages(
                    np.stack([reading.request.block_tables[table.group_id][:max_pages] for reading in readings])
                )
                for table in self._tables
            ],
            layout=self._layout,
            operators=self._model.attention,
        )
        at = self._tensor(positions)
        hidden = self._model.embed(self._tensor(token_ids), at)
        hidden = self._model.forward_layers(hidden, self._layers, at, attention, self._kv)
        if not ends:
            return hidden.new_empty((0, self._model.config.vocab_size), dtype=torch.float32)
        last = self._tensor(query_start_loc[1:][list(ends)].astype(np.int64) - 1)
        return self._model.compute_logits(self._model.final_norm(hidden[last]))

    def _tensor(self, array: npt.NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self._device)

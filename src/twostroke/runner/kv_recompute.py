"""Recomputation of a cached block outside the pool, and comparison with the stored one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from twostroke.kv_check import KVCheck, KVDifference
from twostroke.layers.attention import AttentionMetadata
from twostroke.model.decoder import DecoderModel
from twostroke.runner.kv_storage import KVStorage


class KVRecomputer:
    """One pass over the tokens of a page.

    The tokens have their own positions and read the preceding pages from the pool. The K and V that they write, and
    then read of each other, lie in scratch blocks, one per KV group. Nothing in the pool changes.

    Args:
        model: maths and weights.
        kv: the KV memory, with a scratch block per group.
        device: where the tensors of a pass are made.
    """

    def __init__(self, model: DecoderModel, kv: KVStorage, device: torch.device) -> None:
        assert len(kv.scratch_ids) == len(kv.layout.groups), f"{kv.scratch_ids} for {len(kv.layout.groups)} groups"
        self._model = model
        self._kv = kv
        self._device = device
        self._scratch_pages = [
            ids.of_blocks([scratch_id])[0] for ids, scratch_id in zip(kv.page_ids, kv.scratch_ids, strict=True)
        ]
        self._attention_layout = kv.attention_layout(model.num_heads)

    @torch.inference_mode()
    def differences(self, check: KVCheck, token_ids: Sequence[int]) -> tuple[KVDifference, ...]:
        """Return the differences between stored and recomputed K and V of each layer; empty if every byte is equal.

        Args:
            check: the page to check.
            token_ids: all tokens of the page.
        """
        block_size = self._kv.layout.block_size
        assert len(token_ids) == block_size, f"{len(token_ids)} tokens in a page of {block_size}"
        begin = check.entry * block_size
        contexts = zip(self._kv.page_ids, check.context, strict=True)
        rows = zip((ids.of_blocks(row)[: check.entry] for ids, row in contexts), self._scratch_pages, strict=True)
        attention = AttentionMetadata.build(
            query_start_loc=np.array([0, block_size], np.int32),
            seq_lens=np.array([begin + block_size], np.int32),
            block_tables=[np.array([(*context, scratch_page)], np.int32) for context, scratch_page in rows],
            layout=self._attention_layout,
            operators=self._model.attention,
        )
        input_ids = torch.tensor(token_ids, dtype=torch.int64, device=self._device)
        positions = torch.arange(begin, begin + block_size, device=self._device)
        self._model.forward(input_ids, positions, attention, self._kv)
        return tuple(self._compare(check))

    def _compare(self, check: KVCheck) -> Iterator[KVDifference]:
        for group_id, (block_id, scratch_page) in enumerate(zip(check.block_ids, self._scratch_pages, strict=True)):
            if block_id is None:
                continue
            group, ids = self._kv.layout.groups[group_id], self._kv.page_ids[group_id]
            page_id = ids.of_blocks([block_id])[check.entry % ids.per_block]
            pages = [self._kv.page(group_id, which) for which in (page_id, scratch_page)]
            if torch.equal(*pages):
                continue
            for index, layer_id in enumerate(group.layer_ids):
                for is_value in (False, True):
                    # uint8 [num_kv_heads, bytes per head]
                    stored, computed = (page[index, int(is_value)] for page in pages)
                    if not torch.equal(stored, computed):
                        yield self._difference(group_id, layer_id, stored, computed, values=is_value)

    def _difference(
        self, group_id: int, layer_id: int, stored: Tensor, computed: Tensor, *, values: bool
    ) -> KVDifference:
        layout, kv = self._kv.layout, self._kv.layout.groups[group_id].spec

        def read(heads: Tensor) -> Tensor:  # float32 [num_kv_heads, block_size, head_dim]
            return self._model.attention[kv].read_heads(heads, layout.kv_format, kv.head_dim, values=values)

        was, should_be = read(stored), read(computed)
        # bytes without effect may differ (a code with a scale of zero); then no number differs
        num_numbers = int((was != should_be).sum())
        largest = should_be.abs().amax(-1).clamp_min(torch.finfo(torch.float32).tiny)  # [num_kv_heads, block_size]
        relative = (was - should_be).abs().amax(-1) / largest
        return KVDifference(group_id, layer_id, num_numbers, float(relative.nan_to_num(torch.inf, torch.inf).max()))

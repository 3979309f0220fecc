"""The smallest thing that can run a model over paged KV: every request owns its blocks, physical ids are scrambled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch

from twostroke.config.kv_format import KVFormat
from twostroke.kv_cache.layout import KVLayout
from twostroke.layers.attention import AttentionMetadata
from twostroke.model.decoder import DecoderModel
from twostroke.runner.kv_storage import KVStorage


@dataclass
class DrivenRequest:
    """Token ids so far, how many of them have KV, and a block table per KV group."""

    token_ids: list[int]
    num_computed: int = 0
    block_tables: list[list[int]] = field(default_factory=list)


class PagedDriver:
    """Feeds chosen numbers of tokens of chosen requests through a model."""

    def __init__(
        self,
        model: DecoderModel,
        *,
        num_blocks: int = 256,
        block_size: int = 16,
        kv_format: KVFormat = "f32",
        seed: int = 0,
        fill: int = 0xFF,
    ) -> None:
        """`fill` is what every byte of the pool holds at first: a NaN in each format, so that a foreign read shows."""
        self.model = model
        config = model.config
        self.layout = KVLayout.of(config.kv_specs, block_size=block_size, kv_format=kv_format)
        self.kv = KVStorage(self.layout, num_blocks, torch.device("cpu"))
        self.kv.tensor.fill_(fill)
        self.attention_layout = self.kv.attention_layout(model.num_heads)
        self._free = [int(b) for b in np.random.default_rng(seed).permutation(num_blocks)]

    def add(self, token_ids: Sequence[int]) -> DrivenRequest:
        """Add a request; nothing is computed yet."""
        return DrivenRequest(list(token_ids), 0, [[] for _ in self.layout.groups])

    def free(self, request: DrivenRequest) -> None:
        """Free its blocks, with their content."""
        for table in request.block_tables:
            self._free += [block_id for block_id in table if block_id >= 0]
            table.clear()

    def step(self, work: Sequence[tuple[DrivenRequest, int]]) -> list[torch.Tensor]:
        """Compute the next n tokens of each request; return final hidden states [n, hidden_size] per request."""
        starts, ids, positions, metadata = self._inputs(work)
        hidden = self.model.forward(ids, positions, metadata, self.kv)
        return [hidden[a:b] for a, b in pairwise(starts)]

    def layer_outputs(self, request: DrivenRequest, num_tokens: int) -> list[torch.Tensor]:
        """Compute a request's next tokens layer by layer.

        Returns:
            The embeddings, the output of each layer, and the final-normed hidden states: num_layers + 2 tensors
            [num_tokens, hidden_size].
        """
        _, ids, positions, metadata = self._inputs([(request, num_tokens)])
        found = [self.model.embed(ids, positions)]
        for layer_id in range(self.model.config.num_layers):
            hidden = found[-1].clone()  # a layer may add to its input in place
            found.append(self.model.forward_layers(hidden, range(layer_id, layer_id + 1), positions, metadata, self.kv))
        size = self.model.config.hidden_size  # a model may carry more behind the residual stream
        return [*(hidden[:, :size] for hidden in found), self.model.final_norm(found[-1].clone())]

    def _inputs(
        self, work: Sequence[tuple[DrivenRequest, int]]
    ) -> tuple[list[int], torch.Tensor, torch.Tensor, AttentionMetadata]:
        """Make room for the next tokens; returns query starts, token ids, positions and the step's metadata."""
        starts, lens, ids, positions = [0], [], [], []
        for request, num_tokens in work:
            end = request.num_computed + num_tokens
            self._make_room(request, end)
            ids += request.token_ids[request.num_computed : end]
            positions += range(request.num_computed, end)
            starts.append(len(ids))
            lens.append(end)
            request.num_computed = end
        return starts, torch.tensor(ids), torch.tensor(positions), self._metadata(work, starts, lens)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, vocab_size] float32."""
        return self.model.compute_logits(hidden)

    def _make_room(self, request: DrivenRequest, end: int) -> None:
        for table, group in zip(request.block_tables, self.layout.groups, strict=True):
            while len(table) < self.layout.num_blocks_of_prefix(group, end):
                table.append(self._free.pop())
            # blocks outside of the window are freed at once, and may be overwritten in this step
            for entry in range(self.layout.first_needed_block(group, request.num_computed)):
                if table[entry] >= 0:
                    self._free.append(table[entry])
                    table[entry] = -1

    def _metadata(
        self, work: Sequence[tuple[DrivenRequest, int]], starts: list[int], lens: list[int]
    ) -> AttentionMetadata:
        tables = []
        for group, ids in enumerate(self.kv.page_ids):
            rows = [ids.of_blocks(request.block_tables[group]) for request, _ in work]
            table = np.full((len(work), max(map(len, rows)) + 1), -1, np.int32)
            for entries, row in zip(table, rows, strict=True):
                entries[: len(row)] = row
            tables.append(table)
        return AttentionMetadata.build(
            query_start_loc=np.array(starts, np.int32),
            seq_lens=np.array(lens, np.int32),
            block_tables=tables,
            layout=self.attention_layout,
            operators=self.model.attention,
        )

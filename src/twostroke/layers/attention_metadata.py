"""AttentionMetadata: where every query of a step stands and which blocks it reads; built once, read by all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from twostroke.config.kv_format import KVFormat
from twostroke.kernels.dispatch import AttentionOperator, GroupShape
from twostroke.kernels.tree_mask import TreeMasks


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    """What the layers must know of the KV storage, in plain values; the runner fills it from its KVLayout."""

    layer_slots: tuple[tuple[int, int], ...]
    """Per layer of the model: its KV group, and which of that group's layers it is inside a block."""
    windows: tuple[int | None, ...]
    """Per KV group: tokens a query sees, itself included; None sees all."""
    layers_per_block: int
    block_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_format: KVFormat

    @classmethod
    def of(
        cls,
        groups: Sequence[tuple[Sequence[int], int | None]],
        *,
        block_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        kv_format: KVFormat,
    ) -> AttentionLayout:
        """From (layer ids, window) per KV group.

        >>> AttentionLayout.of([((0, 2), None), ((1, 3), 64)], block_size=16, num_heads=4, num_kv_heads=2, head_dim=8,
        ...                    kv_format="int8")  # doctest: +ELLIPSIS
        AttentionLayout(layer_slots=((0, 0), (1, 0), (0, 1), (1, 1)), windows=(None, 64), layers_per_block=2, ...)
        """
        slots = {
            layer_id: (group, index) for group, (ids, _) in enumerate(groups) for index, layer_id in enumerate(ids)
        }
        assert sorted(slots) == list(range(len(slots))), f"layers missing from the KV groups: {sorted(slots)}"
        return cls(
            layer_slots=tuple(slots[layer_id] for layer_id in range(len(slots))),
            windows=tuple(window for _, window in groups),
            layers_per_block=len(groups[0][0]),
            block_size=block_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            kv_format=kv_format,
        )

    @property
    def shapes(self) -> tuple[GroupShape, ...]:
        """One per KV group."""
        return tuple(
            GroupShape(
                self.num_heads,
                self.num_kv_heads,
                self.head_dim,
                self.block_size,
                self.layers_per_block,
                window,
                self.kv_format,
            )
            for window in self.windows
        )


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMetadata:
    """One step, as attention sees it."""

    layout: AttentionLayout
    num_tokens: int
    operator: AttentionOperator
    plans: tuple[Any, ...]
    """One per KV group; what the backend worked out for the step."""

    @classmethod
    def build(
        cls,
        *,
        query_start_loc: npt.NDArray[np.int32],
        seq_lens: npt.NDArray[np.int32],
        block_tables: Sequence[npt.NDArray[np.int32]],
        layout: AttentionLayout,
        operator: AttentionOperator,
        tree_masks: TreeMasks | None = None,
    ) -> AttentionMetadata:
        """Plans a step.

        Args:
            query_start_loc: [num_seqs + 1]: where each request's query tokens begin in the flat batch. Every request
                has at least one.
            seq_lens: [num_seqs]: context length after this step; the queries are its last tokens.
            block_tables: per KV group [num_seqs, max_blocks] block ids. Entries before a group's window or after the
                context are never read and may hold anything.
            layout: of the storage.
            operator: the model's.
            tree_masks: for steps with draft trees; None when every query sees all before it.
        """
        assert len(query_start_loc) == len(seq_lens) + 1, (query_start_loc, seq_lens)
        assert tree_masks is None or len(tree_masks) == len(seq_lens), (tree_masks, seq_lens)
        assert len(block_tables) == len(layout.windows), (len(block_tables), layout.windows)
        plans = tuple(
            operator.plan(shape, query_start_loc, seq_lens, table, tree_masks)
            for shape, table in zip(layout.shapes, block_tables, strict=True)
        )
        return cls(layout, int(query_start_loc[-1]), operator, plans)

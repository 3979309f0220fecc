"""AttentionMetadata: where every query of a step stands and which blocks it reads; built once, read by all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from twostroke.config.kv_format import KVFormat
from twostroke.config.layer_spec import KVSpec
from twostroke.kernels.dispatch import AttentionOperator, AttentionOperators, GroupShape
from twostroke.kernels.tree_mask import TreeMasks


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    """What the layers must know of the KV storage, in plain values; the runner fills it from its KVLayout."""

    layer_slots: tuple[tuple[int, int], ...]
    """Per layer of the model that keeps KV: its KV group, and which of that group's layers it is inside a page."""
    shapes: tuple[GroupShape, ...]
    """One per KV group."""

    @property
    def block_size(self) -> int:
        """Tokens of a page."""
        return self.shapes[0].block_size

    @classmethod
    def of(
        cls,
        groups: Sequence[tuple[Sequence[int], KVSpec, int]],
        *,
        num_heads: int,
        block_size: int,
        kv_format: KVFormat,
    ) -> AttentionLayout:
        """From (layer ids, their KV, bytes from one id of a block table to the next) per KV group.

        >>> full, window = (KVSpec(num_kv_heads=2, head_dim=8, window=window) for window in (None, 64))
        >>> groups = [((0, 2), full, 1536), ((1, 3), window, 1536)]
        >>> layout = AttentionLayout.of(groups, num_heads=4, block_size=16, kv_format="int8")
        >>> layout.layer_slots, [shape.window for shape in layout.shapes]
        (((0, 0), (1, 0), (0, 1), (1, 1)), [None, 64])
        """
        slots = {
            layer_id: (group, index) for group, (ids, _, _) in enumerate(groups) for index, layer_id in enumerate(ids)
        }
        assert sorted(slots) == list(range(len(slots))), f"layers missing from the KV groups: {sorted(slots)}"
        return cls(
            tuple(slots[layer_id] for layer_id in range(len(slots))),
            tuple(GroupShape(num_heads, spec, block_size, id_bytes, kv_format) for _, spec, id_bytes in groups),
        )


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMetadata:
    """One step, as attention sees it."""

    layout: AttentionLayout
    num_tokens: int
    operators: tuple[AttentionOperator, ...]
    """One per KV group."""
    plans: tuple[Any, ...]
    """One per KV group; what its operator worked out for the step."""

    @classmethod
    def build(
        cls,
        *,
        query_start_loc: npt.NDArray[np.int32],
        seq_lens: npt.NDArray[np.int32],
        block_tables: Sequence[npt.NDArray[np.int32]],
        layout: AttentionLayout,
        operators: AttentionOperators,
        tree_masks: TreeMasks | None = None,
    ) -> AttentionMetadata:
        """Plans a step.

        Args:
            query_start_loc: [num_seqs + 1]: where each request's query tokens begin in the flat batch. Every request
                has at least one.
            seq_lens: [num_seqs]: context length after this step; the queries are its last tokens.
            block_tables: per KV group [num_seqs, max_pages] page ids (PageIds). Entries before a group's window or
                after the context are never read and may hold anything.
            layout: of the storage.
            operators: the model's.
            tree_masks: for steps with draft trees; None when every query sees all before it.
        """
        assert len(query_start_loc) == len(seq_lens) + 1, (query_start_loc, seq_lens)
        assert tree_masks is None or len(tree_masks) == len(seq_lens), (tree_masks, seq_lens)
        assert len(block_tables) == len(layout.shapes), (len(block_tables), layout.shapes)
        of_groups = tuple(operators[shape.kv] for shape in layout.shapes)
        plans = tuple(
            operator.plan(shape, query_start_loc, seq_lens, table, tree_masks)
            for operator, shape, table in zip(of_groups, layout.shapes, block_tables, strict=True)
        )
        return cls(layout, int(query_start_loc[-1]), of_groups, plans)

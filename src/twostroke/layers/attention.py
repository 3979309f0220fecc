"""Attention of one layer over the paged KV cache, and the attention metadata of a step.

Attention passes a layer's slice of the KV storage and the plan of its KV group to the operator. AttentionMetadata
holds the query positions and block tables of a step; it is built once and read by all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from twostroke.config.kv_format import KVFormat, is_quantized
from twostroke.config.layer_spec import KVSpec, LayerSpec
from twostroke.kernels.interface import (
    AttentionOperator,
    AttentionOperators,
    FusedLayer,
    GroupShape,
    Operators,
    QKNormRope,
    Scoring,
)
from twostroke.kernels.tree_mask import TreeMasks
from twostroke.layers.elementwise import RMSNorm, Rotation


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    """Plain values that describe the KV storage to the layers; the runner fills it from its KVLayout."""

    layer_slots: tuple[tuple[int, int], ...]
    """For each model layer that keeps KV: its KV group, and its index among that group's layers inside a page."""
    shapes: tuple[GroupShape, ...]
    """One shape per KV group."""

    @property
    def block_size(self) -> int:
        """Tokens per page."""
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
        """Build the layout from (layer ids, KV spec, bytes from one block table id to the next) per KV group.

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
    """Inputs of attention for one step, shared by all layers."""

    layout: AttentionLayout
    num_tokens: int
    operators: tuple[AttentionOperator, ...]
    """One operator per KV group."""
    plans: tuple[Any, ...]
    """One plan per KV group, prepared by its operator for this step."""

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
        """Build the metadata of a step, with a plan for each KV group.

        Args:
            query_start_loc: [num_seqs + 1]: where each request's query tokens begin in the flat batch. Every request
                has at least one.
            seq_lens: [num_seqs]: context length after this step; the queries are its last tokens.
            block_tables: per KV group [num_seqs, max_pages] page ids (PageIds). Entries before a group's window or
                after the context are never read and may hold anything.
            layout: layout of the KV storage.
            operators: attention operators of the model.
            tree_masks: masks for steps with draft trees; None when every query attends to all tokens before it.
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


class KVTensors(Protocol):
    """The parts of the KV storage that a layer uses."""

    @property
    def tensors(self) -> Sequence[Tensor]:
        """Per group of the attention layout: uint8 [ids, layers of a page, 2, num_kv_heads, block_size * slot bytes].

        The distance between two ids may be smaller than a page.
        """
        ...

    @property
    def layer_written(self) -> Callable[[int], object] | None:
        """Callback for each layer that has written the K and V of a step; None: no callback."""
        ...


class Attention:
    """Apply the per-head norm and rotary embedding to q and k, write K and V of the step's tokens, then attend.

    Quantized KV stores each rotated key minus the mean of all keys (`center_keys`). Rotation hardly changes some
    pairs of dimensions. There all keys share a large offset, in some models in the hundreds, and a common scale
    would leave little precision for the other dimensions. Subtracting the mean lowers all scores of a query by q ·
    mean, which does not change the softmax.

    Args:
        layer_id: index among the model's layers.
        spec: specification of the layer.
        operators: operators of the back end.
        head_norm: norm over each head of q and k, applied before rotary embedding.
        slopes: ALiBi slopes (Scoring).
        sinks: attention sinks (Scoring).
    """

    def __init__(
        self,
        layer_id: int,
        spec: LayerSpec,
        operators: Operators,
        head_norm: RMSNorm | None = None,
        slopes: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        self._layer_id, self._kv_source = layer_id, layer_id if spec.kv_source is None else spec.kv_source
        self._writes_kv = self._kv_source == layer_id
        self.scoring = Scoring(spec.softmax_scale, spec.attention_softcap, sinks, slopes)
        self._head_norm, self._rotate_heads_ = head_norm, operators.rotate_heads_
        self._key_mean: Tensor | None = None

    def center_keys(self, mean: Tensor) -> None:
        """Subtract `mean` [num_kv_heads, head_dim] from quantized keys before they are stored, from now on."""
        self._key_mean = mean

    def __call__(self, qkv: Tensor, rotation: Rotation | None, attention: AttentionMetadata, kv: KVTensors) -> Tensor:
        """Compute attention for the tokens of a step.

        Args:
            qkv: [num_tokens, num_heads + 2 * num_kv_heads, head_dim]: projected q, k and v. A layer that reads the K
            and V
                of another layer passes q alone. Modified in place.
            rotation: rotary embedding of q and k; None: no rotation.
            attention: metadata of the step.
            kv: the KV storage. The new K and V are written before anything is read, so tokens of this step and of
                earlier steps are read the same way.

        Returns:
            [num_tokens, num_heads * head_dim].
        """
        group, index = attention.layout.layer_slots[self._kv_source]
        operator, shape, qk_norm_rope = attention.operators[group], attention.layout.shapes[group], None
        num_heads, num_kv_heads = shape.num_heads, shape.kv.num_kv_heads
        found, needed = qkv.shape[1], num_heads + 2 * num_kv_heads if self._writes_kv else num_heads
        assert found == needed, f"{found} heads, {needed} for {shape}"
        key_mean = self._key_mean_for(shape)
        if rotation is not None and operator.applies_qk_norm_rope:
            qk_norm_rope = self._qk_norm_rope(rotation, key_mean)
        else:
            if rotation is not None or self._head_norm is not None:
                self._norm_and_rotate_(qkv[:, : num_heads + num_kv_heads], rotation)
            if key_mean is not None:
                qkv[:, num_heads : num_heads + num_kv_heads].sub_(key_mean)
        attended = operator(qkv, kv.tensors[group], attention.plans[group], index, self.scoring, qk_norm_rope)
        if self._writes_kv and kv.layer_written is not None:
            kv.layer_written(self._layer_id)
        return attended

    def compute_layer(
        self,
        layer: FusedLayer,
        x: Tensor,
        rotation: Rotation | None,
        attention: AttentionMetadata,
        kv: KVTensors,
    ) -> Tensor:
        """Compute the whole layer that contains this attention, [num_tokens, hidden_size]; arguments as in __call__."""
        group, index = attention.layout.layer_slots[self._kv_source]
        key_mean = self._key_mean_for(attention.layout.shapes[group])
        y = layer(x, rotation, kv.tensors[group], attention.plans[group], index, key_mean)
        if kv.layer_written is not None:
            kv.layer_written(self._layer_id)
        return y

    def _key_mean_for(self, shape: GroupShape) -> Tensor | None:
        return self._key_mean if self._key_mean is not None and is_quantized(shape.kv_format) else None

    def _qk_norm_rope(self, rotation: Rotation, key_mean: Tensor | None) -> QKNormRope:
        norm = self._head_norm
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        return QKNormRope(*rotation, weight, eps, key_mean)

    def _norm_and_rotate_(self, qk: Tensor, rotation: Rotation | None) -> None:
        """Apply norm and rotation in place, each by a separate operator."""
        if self._head_norm is not None:
            self._head_norm.apply_(qk)
        if rotation is not None:
            self._rotate_heads_(qk, *rotation)

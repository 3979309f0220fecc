"""Attention of one layer: hands the layer's share of the KV storage and of the step's plan to the operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from twostroke.config.kv_format import is_quantized
from twostroke.config.layer_spec import LayerSpec
from twostroke.kernels.dispatch import GroupShape, HeadTurn, Operators, Scoring, WholeLayer
from twostroke.layers.attention_metadata import AttentionMetadata
from twostroke.layers.norm import RMSNorm
from twostroke.layers.rotary import Rotation


class KVTensors(Protocol):
    """What a layer needs of the KV storage."""

    @property
    def tensors(self) -> Sequence[Tensor]:
        """Per group of the attention layout: uint8 [ids, layers of a page, 2, num_kv_heads, block_size * slot bytes];
        ids may be nearer to each other than a page is long."""
        ...

    @property
    def layer_written(self) -> Callable[[int], object] | None:
        """To be called behind each layer that has written the K and V of a step; None: nobody listens."""
        ...


class Attention:
    """Turns q and k, writes K and V of the step's tokens, then attends over the paged context.

    Quantized KV stores each rotated key less the mean of all keys (`center_keys`). In pairs of dimensions that rotation
    hardly moves, keys share large numbers, in some models hundreds: beside them a scale leaves little of the other
    dimensions. All scores of a query fall by q · mean, which the softmax does not see.

    Args:
        layer_id: of the model's layers.
        spec: of the layer.
        operators: of the back end.
        head_norm: over each head of q and k, before they are rotated.
        slopes: see Scoring.
    """

    def __init__(
        self,
        layer_id: int,
        spec: LayerSpec,
        operators: Operators,
        head_norm: RMSNorm | None = None,
        slopes: Tensor | None = None,
    ) -> None:
        self._layer_id, self._kv_source = layer_id, layer_id if spec.kv_source is None else spec.kv_source
        self._writes_kv = self._kv_source == layer_id
        self.scoring = Scoring(spec.softmax_scale, spec.score_cap, slopes=slopes)
        self._head_norm, self._rotate_heads_ = head_norm, operators.rotate_heads_
        self._key_mean: Tensor | None = None

    def center_keys(self, mean: Tensor) -> None:
        """Store quantized keys less `mean`, [num_kv_heads, head_dim], from now on."""
        self._key_mean = mean

    def __call__(self, qkv: Tensor, rotation: Rotation | None, attention: AttentionMetadata, kv: KVTensors) -> Tensor:
        """Attends.

        Args:
            qkv: [num_tokens, num_heads + 2 * num_kv_heads, head_dim]: q, k and v as projected; of a layer that reads
                the K and V of another one q alone. Is changed.
            rotation: of q and k; None: they are not rotated.
            attention: the step.
            kv: the storage; receives the new K and V before anything is read, so that what a step wrote and what
                earlier steps wrote is read alike.

        Returns:
            [num_tokens, num_heads * head_dim].
        """
        group, index = attention.layout.layer_slots[self._kv_source]
        operator, shape, turn = attention.operators[group], attention.layout.shapes[group], None
        num_heads, num_kv_heads = shape.num_heads, shape.kv.num_kv_heads
        found, needed = qkv.shape[1], num_heads + 2 * num_kv_heads if self._writes_kv else num_heads
        assert found == needed, f"{found} heads, {needed} for {shape}"
        key_mean = self._mean_left_out(shape)
        if rotation is not None and operator.turns_heads:
            turn = self._turn(rotation, key_mean)
        else:
            if rotation is not None or self._head_norm is not None:
                self._turn_(qkv[:, : num_heads + num_kv_heads], rotation)
            if key_mean is not None:
                qkv[:, num_heads : num_heads + num_kv_heads].sub_(key_mean)
        attended = operator(qkv, kv.tensors[group], attention.plans[group], index, self.scoring, turn)
        if self._writes_kv and kv.layer_written is not None:
            kv.layer_written(self._layer_id)
        return attended

    def within(
        self,
        layer: WholeLayer,
        x: Tensor,
        rotation: Rotation | None,
        attention: AttentionMetadata,
        kv: KVTensors,
    ) -> Tensor:
        """Compute the whole layer that this attention is part of, [num_tokens, hidden_size]; see __call__."""
        group, index = attention.layout.layer_slots[self._kv_source]
        key_mean = self._mean_left_out(attention.layout.shapes[group])
        y = layer(x, rotation, kv.tensors[group], attention.plans[group], index, key_mean)
        if kv.layer_written is not None:
            kv.layer_written(self._layer_id)
        return y

    def _mean_left_out(self, shape: GroupShape) -> Tensor | None:
        return self._key_mean if is_quantized(shape.kv_format) else None

    def _turn(self, rotation: Rotation, key_mean: Tensor | None) -> HeadTurn:
        norm = self._head_norm
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        return HeadTurn(*rotation, weight, eps, key_mean)

    def _turn_(self, qk: Tensor, rotation: Rotation | None) -> None:
        """By operators of their own, in place."""
        if self._head_norm is not None:
            self._head_norm.apply_(qk)
        if rotation is not None:
            self._rotate_heads_(qk, *rotation)

"""Attention of one layer: hands the layer's share of the KV storage and of the step's plan to the operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from twostroke.config.kv_format import is_quantized
from twostroke.config.layer_spec import LayerSpec
from twostroke.kernels.dispatch import HeadTurn, Operators, Scoring, WholeLayer
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
    def layer_written(self) -> Callable[[int], object]:
        """To be called behind each layer that has written the K and V of a step."""
        ...


class Attention:
    """Turns q and k, writes K and V of the step's tokens, then attends over the paged context.

    Quantized KV stores each rotated key less `key_bias`, [num_kv_heads, head_dim]. Some models have biases of hundreds,
    in pairs of dimensions that rotation hardly moves: beside them a scale leaves nothing of the other dimensions. All
    scores of a query fall by q · key_bias, which the softmax does not see.

    Args:
        layer_id: of the model's layers.
        spec: of the layer.
        operators: of the back end.
        head_norm: over each head of q and k, before they are rotated.
        key_bias: of the projection, where keys have one; see LayerSpec.stores_keys_less_bias.
        slopes: see Scoring.
    """

    def __init__(
        self,
        layer_id: int,
        spec: LayerSpec,
        operators: Operators,
        head_norm: RMSNorm | None = None,
        key_bias: Tensor | None = None,
        slopes: Tensor | None = None,
    ) -> None:
        self._layer_id, self._kv_source = layer_id, layer_id if spec.kv_source is None else spec.kv_source
        self._writes_kv = self._kv_source == layer_id
        self.scoring = Scoring(spec.softmax_scale, spec.score_cap, slopes=slopes)
        self._head_norm, self._rotate_heads_ = head_norm, operators.rotate_heads_
        self._key_bias = key_bias

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
        key_bias = self._key_bias if self._writes_kv and is_quantized(shape.kv_format) else None
        if rotation is not None and operator.turns_heads and key_bias is None:
            turn = self._turn(rotation)
        elif rotation is not None or self._head_norm is not None:
            self._turn_(qkv[:, : num_heads + num_kv_heads], rotation)
        if key_bias is not None:
            qkv[:, num_heads : num_heads + num_kv_heads].sub_(key_bias)
        attended = operator(qkv, kv.tensors[group], attention.plans[group], index, self.scoring, turn)
        if self._writes_kv:
            kv.layer_written(self._layer_id)
        return attended

    def within(
        self,
        layer: WholeLayer,
        x: Tensor,
        rotation: Rotation | None,
        attention: AttentionMetadata,
        kv: KVTensors,
    ) -> Tensor | None:
        """Compute the whole layer that this attention is part of, [num_tokens, hidden_size]; see __call__.

        None: not with this storage, whose keys are less their bias.
        """
        group, index = attention.layout.layer_slots[self._kv_source]
        if self._key_bias is not None and is_quantized(attention.layout.shapes[group].kv_format):
            return None
        y = layer(x, rotation, kv.tensors[group], attention.plans[group], index)
        kv.layer_written(self._layer_id)
        return y

    def _turn(self, rotation: Rotation) -> HeadTurn:
        norm = self._head_norm
        return HeadTurn(*rotation, None, 0.0) if norm is None else HeadTurn(*rotation, norm.weight, norm.eps)

    def _turn_(self, qk: Tensor, rotation: Rotation | None) -> None:
        """By operators of their own, in place."""
        if self._head_norm is not None:
            self._head_norm.apply_(qk)
        if rotation is not None:
            self._rotate_heads_(qk, *rotation)

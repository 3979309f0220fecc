"""Attention of one layer: hands the layer's share of the KV storage and of the step's plan to the operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from twostroke.layers.attention_metadata import AttentionMetadata


class KVTensors(Protocol):
    """What a layer needs of the KV storage."""

    @property
    def tensor(self) -> Tensor:
        """uint8 [num_blocks, layers_per_block, 2, num_kv_heads, block_size * slot bytes], contiguous."""
        ...

    @property
    def layer_written(self) -> Callable[[int], object]:
        """To be called behind each layer that has written the K and V of a step."""
        ...


class Attention:
    """Writes K and V of the step's tokens, then attends over the paged context."""

    def __init__(self, layer_id: int, head_dim: int) -> None:
        """Scores are scaled by 1 / sqrt(head_dim)."""
        self._layer_id = layer_id
        self._softmax_scale = head_dim**-0.5

    def __call__(self, qkv: Tensor, attention: AttentionMetadata, kv: KVTensors) -> Tensor:
        """Attends.

        Args:
            qkv: [num_tokens, num_heads + 2 * num_kv_heads, head_dim]: q, k and v, rotated.
            attention: the step.
            kv: the storage; receives the new K and V before anything is read, so that what a step wrote and what
                earlier steps wrote is read alike.

        Returns:
            [num_tokens, num_heads * head_dim].
        """
        group, index = attention.layout.layer_slots[self._layer_id]
        attended = attention.operator(qkv, kv.tensor, attention.plans[group], index, self._softmax_scale)
        kv.layer_written(self._layer_id)
        return attended

"""Hunyuan-A13B: sparse layers that apply the norm of q and k heads after rotary embedding.

Rotation does not change a head's RMS, but the norm's weights apply to the rotated values. So the norm cannot be
moved before the rotation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from twostroke.config.model import ModelConfig
from twostroke.layers.elementwise import Rotation
from twostroke.model.decoder import Placement
from twostroke.model.sparse import Sparse, SparseLayer


class HunYuanLayer(SparseLayer):
    """A sparse layer that norms heads after rotary embedding."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Any], layer_id: int, placement: Placement) -> None:
        super().__init__(config, weights, layer_id, placement)
        self._rotate_heads_ = placement.operators.rotate_heads_
        self._head_norm = self.head_norm(config, weights, placement.operators)

    def prepare_heads(self, qkv: Tensor, rotation: Rotation | None) -> tuple[Tensor, None]:
        qk = qkv[:, : self._num_heads + self._num_kv_heads]
        if rotation is not None:
            self._rotate_heads_(qk, *rotation)
        self._head_norm.apply_(qk)
        return qkv, None


class HunYuan(Sparse):
    """Llama with Hunyuan's layers."""

    layer_class = HunYuanLayer

"""The rows of q and k in the order in which kernels rotate.

Kernels turn number j of the first half of a head against number j of the second half. A checkpoint may pair neighbours
instead, or rotate only the first numbers of a head. Since q · k adds up products over a head, any order of its numbers
serves, as long as q and k have the same one: so the rows that make them are put in order when they are read.

    rotated in part, 4 of 8:   a0 a1 b0 b1 c d e f   ─►   a0 a1 c d   b0 b1 e f
    neighbours:                a0 b0 a1 b1 a2 b2     ─►   a0 a1 a2    b0 b1 b2
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from twostroke.config.layer_spec import LayerSpec
from twostroke.config.model import ModelConfig
from twostroke.kernels.quantized_weight import QuantizedWeight
from twostroke.model.registry import architecture
from twostroke.model.weight_map import checkpoint_names
from twostroke.model.weight_source import ALL_ROWS, StoredWeight, WeightSource


def in_rotary_order(source: WeightSource, config: ModelConfig) -> WeightSource:
    """Return the same weights with the rows of q and k in order; the source itself where they are."""
    names = architecture(config.architecture).names
    orders: dict[str, Tensor] = {}
    for layer_id, layer in enumerate(config.layers):
        order = head_order(layer)
        if order is None:
            continue
        q, k = (_of_heads(order, num_heads) for num_heads in (layer.num_heads, layer.kv.num_kv_heads))
        for kind in ("weight", "bias"):
            parts = checkpoint_names(names, f"layers.{layer_id}.qkv.{kind}")
            v = len(q) + len(k) + torch.arange(layer.kv_size)
            of_parts = (torch.cat([q, len(q) + k, v]),) if len(parts) == 1 else (q, k)
            orders |= dict(zip(parts, of_parts, strict=False))
        if layer.qk_norm == "heads":
            for norm in ("q_norm", "k_norm"):
                orders |= dict.fromkeys(checkpoint_names(names, f"layers.{layer_id}.{norm}.weight"), order)
    return _OrderedRows(source, orders) if orders else source


def head_order(layer: LayerSpec) -> Tensor | None:
    """Return where each number of a head is stored, int64 [head_dim]; None: they are in order."""
    if layer.rope is None:
        return None
    head_dim = layer.kv.head_dim
    rotated = layer.rope.rotary_dim or head_dim
    step, half = (2, 1) if layer.rope.is_interleaved else (1, rotated // 2)
    first = torch.arange(rotated // 2) * step
    rest = torch.arange(rotated, head_dim)
    order = torch.cat([first, rest[: len(rest) // 2], first + half, rest[len(rest) // 2 :]])
    return None if torch.equal(order, torch.arange(head_dim)) else order


def _of_heads(order: Tensor, num_heads: int) -> Tensor:
    """Of the rows of several heads, one behind the other."""
    return (torch.arange(num_heads)[:, None] * len(order) + order).flatten()


class _OrderedRows:
    """A WeightSource that gives some weights' rows in another order."""

    def __init__(self, source: WeightSource, orders: Mapping[str, Tensor]) -> None:
        self._source, self._orders = source, orders

    @property
    def path(self) -> Path:
        """See WeightSource."""
        return self._source.path

    @property
    def quantization(self) -> str | None:
        """See WeightSource."""
        return self._source.quantization

    @property
    def weights(self) -> Mapping[str, StoredWeight]:
        """See WeightSource."""
        return self._source.weights

    def read(self, name: str, dtype: torch.dtype, rows: slice = ALL_ROWS) -> Tensor | QuantizedWeight:
        """See WeightSource."""
        if name not in self._orders:
            return self._source.read(name, dtype, rows)
        whole, places = self._source.read(name, dtype), self._orders[name][rows]
        return whole[places] if isinstance(whole, Tensor) else whole.of_rows(places)

"""Reordering of the rows of q, k and v into the order that kernels read and rotate.

Kernels rotate number j of the first half of a head with number j of the second half. A checkpoint may pair
neighbours instead, or rotate only the first numbers of a head. q · k is a sum over a head, so any order of its
numbers gives the same result if q and k use the same one. So the rows that produce them are reordered when they are
read.

    rotated in part, 4 of 8:   a0 a1 b0 b1 c d e f   ─►   a0 a1 c d   b0 b1 e f
    neighbours:                a0 b0 a1 b1 a2 b2     ─►   a0 a1 a2    b0 b1 b2

A checkpoint may also group rows by KV head; here all of q comes first, then k, then v.

    by KV head:                q0 q1 k0 v0   q2 q3 k1 v1   ─►   q0 q1 q2 q3   k0 k1   v0 v1
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from twostroke.config.layer_spec import LayerSpec
from twostroke.config.model import ModelConfig
from twostroke.kernels.quantized_weight import QuantizedWeight
from twostroke.model.registry import architecture
from twostroke.model.weight_map import checkpoint_names
from twostroke.model.weight_source import ALL_ROWS, WeightSource, WrappedSource


def in_rotary_order(source: WeightSource, config: ModelConfig) -> WeightSource:
    """Return the weights with the rows of q and k in order; `source` itself if they already are."""
    entry = architecture(config.architecture)
    rows: dict[str, Tensor] = {}
    columns: dict[str, Tensor] = {}
    for layer_id, layer in enumerate(config.layers):
        order = head_order(layer)
        if order is not None or entry.has_qkv_by_kv_head:
            for kind in ("weight", "bias"):
                parts = checkpoint_names(entry.names, f"layers.{layer_id}.qkv.{kind}")
                rows |= _qkv_rows(parts, layer, order, by_kv_head=entry.has_qkv_by_kv_head)
        if order is not None and layer.qk_norm != "none":
            for norm, num_heads in (("q_norm", layer.num_heads), ("k_norm", layer.kv.num_kv_heads)):
                parts = checkpoint_names(entry.names, f"layers.{layer_id}.{norm}.weight")
                of_norm = _of_heads(torch.arange(num_heads), order) if layer.qk_norm == "rows" else order
                (columns if layer.qk_norm == "own_heads" else rows).update(dict.fromkeys(parts, of_norm))
    return _ReorderedSource(source, rows, columns) if rows else source


def head_order(layer: LayerSpec) -> Tensor | None:
    """Return the stored position of each number of a head, int64 [head_dim]; None: they are in order."""
    if layer.rope is None:
        return None
    head_dim = layer.kv.head_dim
    rotated = layer.rope.rotary_dim or head_dim
    step, half = (2, 1) if layer.rope.is_interleaved else (1, rotated // 2)
    first = torch.arange(rotated // 2) * step
    rest = torch.arange(rotated, head_dim)
    order = torch.cat([first, rest[: len(rest) // 2], first + half, rest[len(rest) // 2 :]])
    return None if torch.equal(order, torch.arange(head_dim)) else order


def _qkv_rows(parts: Sequence[str], layer: LayerSpec, order: Tensor | None, *, by_kv_head: bool) -> dict[str, Tensor]:
    """Return the stored positions of the rows of q, k and v, for each stored part: one for all three, or one each."""
    in_order = torch.arange(layer.kv.head_dim)
    order = in_order if order is None else order
    num_q, num_kv = layer.num_heads, layer.kv.num_kv_heads
    q, k = torch.arange(num_q), torch.arange(num_kv)
    if len(parts) > 1:
        return {parts[0]: _of_heads(q, order), parts[1]: _of_heads(k, order)}
    k, v = num_q + k, num_q + num_kv + k
    if by_kv_head:
        num_together = num_q // num_kv
        q = q + 2 * (q // num_together)  # skip the k and v of all preceding KV heads
        k = torch.arange(num_kv) * (num_together + 2) + num_together
        v = k + 1
    return {parts[0]: torch.cat([_of_heads(q, order), _of_heads(k, order), _of_heads(v, in_order)])}


def _of_heads(heads: Tensor, order: Tensor) -> Tensor:
    """Return the rows of some heads, concatenated."""
    return (heads[:, None] * len(order) + order).flatten()


class _ReorderedSource(WrappedSource):
    """A WeightSource that reorders the rows of some weights, and the columns of others."""

    def __init__(self, source: WeightSource, rows: Mapping[str, Tensor], columns: Mapping[str, Tensor]) -> None:
        super().__init__(source)
        self._rows, self._columns = rows, columns

    def read(self, name: str, dtype: torch.dtype, rows: slice = ALL_ROWS) -> Tensor | QuantizedWeight:
        if name in self._columns:
            norm = self._source.read(name, dtype, rows)
            assert isinstance(norm, Tensor), name
            return norm[:, self._columns[name]]
        if name not in self._rows:
            return super().read(name, dtype, rows)
        places = self._rows[name][rows]
        first = int(places.min())
        found = self._source.read(name, dtype, slice(first, int(places.max()) + 1))  # the rows of a few heads
        return found[places - first] if isinstance(found, Tensor) else found.select_rows(places - first)

"""A decoder layer as one call (csrc/layer.hpp): a decode spends less time between its operators than in Python."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from twostroke.kernels.dispatch import LayerParts, Linear, NormWeight
from twostroke.kernels.large_pages import empty
from twostroke.kernels.native.attention import StepPlan
from twostroke.kernels.native.extension import TYPE_CODES, Kernels, address, native
from twostroke.kernels.native.linear import NativeGated, NativeLinear
from twostroke.kernels.reference.split_linear import SplitLinear


class NativeLayer:
    """See WholeLayer."""

    def __init__(
        self,
        kernels: Kernels,
        parts: LayerParts,
        qkv: Sequence[NativeLinear],
        inner: NativeGated,
        outputs: tuple[NativeLinear, NativeLinear],
    ) -> None:
        """Binds parts, with the maps that they are: qkv side by side, and the outputs of attention and MLP."""
        self._parts = parts  # whose tensors are bound by their addresses
        output, down = (linear.panels for linear in outputs)
        hidden_size, q_size = output.shape
        scoring = parts.scoring
        norms = (parts.attention_norm, parts.attention_out_norm, parts.mlp_norm, parts.mlp_out_norm, parts.head_norm)
        self._layer = native.DecoderLayer(
            kernels,
            [native.Norm(0, 0.0, 0) if norm is None else _bound(norm) for norm in norms],
            [part.panels.bound for part in qkv],
            output.bound,
            inner.panels.bound,
            down.bound,
            scoring.scale,
            scoring.cap or 0.0,
            address(scoring.sinks),
            address(scoring.slopes),
            hidden_size,
            q_size,
            TYPE_CODES[output.dtype],
        )
        self._room_bytes = self._layer.room_bytes

    def __call__(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        storage: Tensor,
        plan: StepPlan,
        layer_in_block: int,
        key_mean: Tensor | None = None,
    ) -> Tensor:
        """See WholeLayer."""
        assert x.is_contiguous(), x.stride()
        assert self._parts.scoring.slopes is None or not plan.has_trees, "draft trees have no slopes"
        num_tokens = x.shape[0]
        block_bytes, layer_bytes, *_ = storage.stride()
        num_bytes = num_tokens * self._room_bytes
        room = None if num_bytes <= native.ROOM_KEPT else empty((num_bytes,), torch.uint8)
        cos = signed_sin = None
        if rotation is not None:
            cos, signed_sin = rotation
            assert cos.is_contiguous(), cos.stride()
            assert signed_sin.is_contiguous(), signed_sin.stride()
        self._layer.run(
            plan.step,
            x.data_ptr(),
            address(room),
            num_tokens,
            storage.data_ptr() + layer_in_block * layer_bytes,
            block_bytes,
            address(cos),
            address(signed_sin),
            address(key_mean),
        )
        return x


def _bound(norm: NormWeight) -> native.Norm:
    return native.Norm(norm.weight.data_ptr(), norm.eps, TYPE_CODES[norm.weight.dtype])


def whole_layer(kernels: Kernels, parts: LayerParts) -> NativeLayer | None:
    """Bind a layer; None where a part is not of these kernels, or a weight but qkv's is of several formats."""
    if parts.head_dim > native.MAX_HEAD_DIM:
        return None
    qkv, inner, outputs = _maps_of(parts.qkv), parts.inner, [*_maps_of(parts.output), *_maps_of(parts.down)]
    if not qkv or not isinstance(inner, NativeGated) or len(outputs) != 2:
        return None
    if any(part.panels.pads_inputs for part in (*qkv, *outputs, inner)):
        return None
    return NativeLayer(kernels, parts, qkv, inner, (outputs[0], outputs[1]))


def _maps_of(linear: Linear) -> Sequence[NativeLinear]:
    """Return the maps that a linear map is, side by side; none where one of them is not of these kernels."""
    parts = linear.parts if isinstance(linear, SplitLinear) else [linear]
    found = [part for part in parts if isinstance(part, NativeLinear)]
    return found if len(found) == len(parts) else []

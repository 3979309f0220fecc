"""Maps of stacked weights, on the operators of any backend: each part is a separate map."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from twostroke.config.layer_spec import Activation
from twostroke.kernels.interface import GatedLinear, Linear, Weight
from twostroke.kernels.memory import to_float32
from twostroke.kernels.reference.elementwise import gate_and_mul
from twostroke.kernels.stacked_weight import StackedWeight
from twostroke.kernels.streamed_weight import Matrix

PackPart = Callable[[Matrix, Tensor | None], Linear]
"""Pack one weight [N, K] and its bias [N] by a backend's own method."""


class SplitLinear:
    """y = x W^T + b, where each part of W gives a range of y."""

    def __init__(self, pack: PackPart, weight: StackedWeight, bias: Tensor | None) -> None:
        """Pack the parts, each with its share of bias [N]."""
        self._num_rows = [part.shape[0] for part in weight.parts]
        biases = [None] * len(self._num_rows) if bias is None else bias.split(self._num_rows)
        self.parts = [pack(part, share) for part, share in zip(weight.parts, biases, strict=True)]

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)

    def in_float32(self, x: Tensor) -> Tensor:
        return to_float32(self(x))

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        shares = residual.split(self._num_rows, dim=-1)
        return torch.cat([part.add_to(share, x) for part, share in zip(self.parts, shares, strict=True)], dim=-1)

    def rows(self, ids: Tensor) -> Tensor:
        """Raise AssertionError: no embedding table is stacked, because every checkpoint keeps it as one matrix."""
        raise AssertionError(f"rows {ids.tolist()} of a stacked weight")


def pack_linear(pack: PackPart, weight: Weight, bias: Tensor | None) -> Linear:
    """Pack any weight with a backend's `pack`; a stacked one part by part."""
    return SplitLinear(pack, weight, bias) if isinstance(weight, StackedWeight) else pack(weight, bias)


def pack_gated(
    pack: PackPart,
    pack_whole: Callable[[Matrix, Tensor | None, Activation], GatedLinear],
    weight: Weight,
    bias: Tensor | None,
    activation: Activation,
) -> GatedLinear:
    """Pack any gated weight; both factors of a stacked one are computed in full before they are combined."""
    if not isinstance(weight, StackedWeight):
        return pack_whole(weight, bias, activation)
    factors = SplitLinear(pack, weight, bias)
    return lambda x: gate_and_mul(factors(x), activation)

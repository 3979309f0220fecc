"""Quantizing weights (csrc/kernels/quantize.hpp): the bits of kernels/quantized_weight.py, a hundred times as fast."""

from __future__ import annotations

import torch
from torch import Tensor

from twostroke.kernels.native.extension import TYPE_CODES, Kernels
from twostroke.kernels.quantized_weight import DIVISORS, QuantizedWeight, per_channel


class Quantizer:
    """Weights [N, K] of float32 or bfloat16 to codes and scales."""

    def __init__(self, kernels: Kernels) -> None:
        """Takes the level's kernels."""
        self._kernels = kernels

    def per_channel(self, weight: Tensor) -> QuantizedWeight:
        """See quantized_weight.quantize_per_channel."""
        return per_channel(*self._quantize(weight, 0, 1), weight.dtype)

    def in_groups(self, weight: Tensor, group_size: int = 32) -> QuantizedWeight:
        """See quantized_weight.quantize_in_groups."""
        codes, scales = self._quantize(weight, group_size, -(-weight.shape[1] // group_size))
        return QuantizedWeight(codes, scales, None, 4, group_size, weight.dtype)

    def _quantize(self, weight: Tensor, group_size: int, groups: int) -> tuple[Tensor, Tensor]:
        weight = weight.contiguous()
        n, k = weight.shape
        codes, scales = torch.empty(n, k, dtype=torch.uint8), torch.empty(n, groups, dtype=torch.float16)
        self._kernels.quantize_weight(
            weight.data_ptr(), codes.data_ptr(), scales.data_ptr(), n, k, group_size, DIVISORS, TYPE_CODES[weight.dtype]
        )
        return codes, scales

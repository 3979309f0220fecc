"""PackedWeight: a weight in the kernels' own order, as it is kept from one start to the next."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twostroke.kernels.quantized_weight import QuantizedFormat


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """What a backend has made of a weight [N, K], or of one with G above U; the same backend takes it as it is."""

    shape: tuple[int, int]
    """[N, K] of the weight."""
    dtype: torch.dtype
    """Of the activations it is multiplied with."""
    is_gated: bool
    format: QuantizedFormat | None
    """None: floats of `dtype`."""
    panels: Tensor
    """uint8, the bytes that kernels read"""
    order: Tensor | None = None
    """int32 [K], see QuantizedWeight."""

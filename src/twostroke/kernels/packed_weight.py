"""PackedWeight: a weight in the kernels' own order, kept from one start to the next."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twostroke.kernels.quantized_weight import QuantizedFormat


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """Packed form of a weight [N, K], or of a gated one with G above U. The same backend takes it without packing
    again."""

    shape: tuple[int, int]
    """[N, K] of the weight."""
    dtype: torch.dtype
    """Type of the activations it is multiplied with."""
    is_gated: bool
    format: QuantizedFormat | None
    """Format of the codes; None for floats of `dtype`."""
    panels: Tensor
    """uint8: the bytes that kernels read."""
    order: Tensor | None = None
    """int32 [K], see QuantizedWeight."""

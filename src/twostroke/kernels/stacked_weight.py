"""StackedWeight: matrices of one linear map that are stacked but cannot be one weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twostroke.kernels.quantized_weight import QuantizedWeight
from twostroke.kernels.streamed_weight import Matrix


@dataclass(frozen=True, slots=True, eq=False)
class StackedWeight:
    """Parts in the order of their rows, with different formats or orders of inputs; each is multiplied separately."""

    parts: tuple[Matrix, ...]
    """Matrices [N_i, K]."""


def stack(parts: Sequence[Tensor | QuantizedWeight]) -> Tensor | QuantizedWeight | StackedWeight:
    """Stack parts: into one weight where their formats agree, so that one pass over the inputs is enough."""
    if len(parts) == 1:
        return parts[0]
    floats = [part for part in parts if isinstance(part, Tensor)]
    quantized = [part for part in parts if isinstance(part, QuantizedWeight)]
    if not quantized:
        return torch.cat(floats)
    if not floats and all(part.has_same_format(quantized[0]) for part in quantized):
        return QuantizedWeight.stack(quantized)
    return StackedWeight(tuple(parts))

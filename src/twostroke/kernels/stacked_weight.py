"""StackedWeight: matrices of one map that lie one under the other, but cannot be one weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twostroke.kernels.quantized_weight import QuantizedWeight
from twostroke.kernels.streamed_weight import Matrix


@dataclass(frozen=True, slots=True, eq=False)
class StackedWeight:
    """Parts in the order of their rows, of different formats or orders of inputs: each is multiplied by itself."""

    parts: tuple[Matrix, ...]
    """[N_i, K] each"""


def stack(parts: Sequence[Tensor | QuantizedWeight]) -> Tensor | QuantizedWeight | StackedWeight:
    """Parts one under the other: one weight where they are alike, for one pass over the inputs instead of several."""
    if len(parts) == 1:
        return parts[0]
    floats = [part for part in parts if isinstance(part, Tensor)]
    quantized = [part for part in parts if isinstance(part, QuantizedWeight)]
    if not quantized:
        return torch.cat(floats)
    if not floats and all(part.is_like(quantized[0]) for part in quantized):
        return QuantizedWeight.stack(quantized)
    return StackedWeight(tuple(parts))

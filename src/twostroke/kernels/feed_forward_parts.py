"""MLPParts and ExpertParts: the feed-forward half of a layer, for a backend that computes whole layers (see
LayerParts)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from twostroke.kernels.expert_operators import ExpertLinears, ExpertRouter, GatedExperts

RowMap = Callable[[Tensor], Tensor]
"""Linear or GatedLinear: [num_rows, K] -> [num_rows, N]."""


class MLPParts(NamedTuple):
    """Parts of an MLP, down(inner(x)), where inner is gated."""

    inner: RowMap
    down: RowMap


@dataclass(frozen=True, slots=True, eq=False)
class ExpertParts:
    """Parts of a sparse MLP: the sum over a token's experts, plus the shared expert."""

    logits: RowMap
    """Router logits: float32 [num_tokens, hidden_size] -> [num_tokens, num_experts]."""
    router: ExpertRouter
    inner: GatedExperts
    down: ExpertLinears
    shared: MLPParts | None
    """Expert that computes every token and has no gate of its own; None if there is none."""

"""MLPParts and ExpertParts: what follows attention, for a back end that binds a whole layer; see LayerParts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from twostroke.kernels.expert_operators import ExpertLinears, ExpertRouter, GatedExperts

RowMap = Callable[[Tensor], Tensor]
"""A Linear or a GatedLinear: [num_rows, K] -> [num_rows, N]."""


class MLPParts(NamedTuple):
    """down(inner(x)), where inner is gated."""

    inner: RowMap
    down: RowMap


@dataclass(frozen=True, slots=True, eq=False)
class ExpertParts:
    """The sum of what a token's experts make, and of what the shared one makes."""

    logits: RowMap
    """Of the router, float32 [num_tokens, hidden_size] -> [num_tokens, num_experts]."""
    router: ExpertRouter
    inner: GatedExperts
    down: ExpertLinears
    shared: MLPParts | None
    """The expert that computes every token, without a gate of its own; None: there is none."""

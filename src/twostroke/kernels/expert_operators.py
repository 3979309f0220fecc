"""Operators of experts, which each backend implements (see kernels/interface.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from twostroke.config.experts import ExpertsSpec


class Routing(NamedTuple):
    """Experts of each token of a step.

    A pair is a token and one of its experts. Pairs are sorted by expert, then by token.
    """

    tokens: Tensor
    """int64 [num_pairs]: the token of each pair."""
    starts: Tensor
    """int64 [num_experts + 1]: where the pairs of each expert start."""
    places: Tensor
    """int64 [num_tokens, num_chosen]: the pairs of each token, in order of rising expert."""
    weights: Tensor
    """float32 [num_tokens, num_chosen]: factors of the results of these pairs."""

    def of_experts(self, experts: range, pairs: slice) -> Routing:
        """Return the routing for some of the experts alone; places and weights stay those of all pairs.

        Args:
            experts: consecutive experts.
            pairs: all pairs of these experts.
        """
        starts = self.starts[experts.start : experts.stop + 1] - pairs.start
        return self._replace(tokens=self.tokens[pairs], starts=starts)


class ExpertRouter(NamedTuple):
    """Settings by which experts are chosen from a router's logits."""

    spec: ExpertsSpec
    correction: Tensor | None
    """float32 [num_experts], added to the scores by which experts are chosen; None adds nothing."""
    expert_scales: Tensor | None = None
    """float32 [num_experts], factors of each expert's routing weights; None for no factors."""
    counts: Tensor | None = None
    """int64 [num_experts], to which each choice adds the tokens of each expert; None: they are not counted."""


Route = Callable[[Tensor, ExpertRouter], Routing]
"""Choice of experts by logits, float32 [num_tokens, num_experts]. Among equal scores the first expert wins."""


class GatedExperts(Protocol):
    """Gated products of all experts: activation(x G_e^T) * (x U_e^T) for each pair."""

    @property
    def syncs_expert_counts(self) -> bool:
        """Whether the host reads the number of pairs of each expert, and so waits for the device."""
        ...

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        """Return the products [num_pairs, N] of x [num_tokens, K], in the order of the pairs."""
        ...


class ExpertLinears(Protocol):
    """Down projections of all experts, and the weighted sum over each token's experts."""

    @property
    def syncs_expert_counts(self) -> bool: ...

    def __call__(self, inner: Tensor, routing: Routing) -> Tensor:
        """Project inner [num_pairs, K] and sum over the experts of each token: [num_tokens, N].

        Each product is rounded to its type. The products of a token, times their weights, are added in float32 in order
        of rising expert, and the sum is rounded once.
        """
        ...

    def multiply(self, inner: Tensor, routing: Routing) -> Tensor:
        """Return the rounded products without the sum. [num_pairs, K] -> [num_pairs, N]; there is at least one pair."""
        ...

    def add(self, products: Tensor, routing: Routing) -> Tensor:
        """Return the sums of given products. [num_pairs, N] -> [num_tokens, N]."""
        ...

"""The operators of experts: what each backend implements of them, see kernels/interface.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from twostroke.config.experts import ExpertsSpec


class Routing(NamedTuple):
    """The experts of each token of a step.

    A pair is a token and one of its experts. Pairs are sorted by expert, those of an expert by token.
    """

    tokens: Tensor
    """int64 [num_pairs]: the token of each pair."""
    starts: Tensor
    """int64 [num_experts + 1]: where the pairs of each expert begin."""
    places: Tensor
    """int64 [num_tokens, num_chosen]: the pairs of each token, by rising expert."""
    weights: Tensor
    """float32 [num_tokens, num_chosen]: what the results of these pairs are multiplied with."""

    def of_experts(self, experts: range, pairs: slice) -> Routing:
        """Return the pairs of some experts, as if they were all; places and weights stay those of all pairs.

        Args:
            experts: neighbours.
            pairs: all that these have.
        """
        starts = self.starts[experts.start : experts.stop + 1] - pairs.start
        return self._replace(tokens=self.tokens[pairs], starts=starts)


class ExpertRouter(NamedTuple):
    """How experts are chosen from a router's logits."""

    spec: ExpertsSpec
    correction: Tensor | None
    """float32 [num_experts], added to the scores that experts are chosen by; None: nothing is."""
    expert_scales: Tensor | None = None
    """float32 [num_experts], factors of the weights of each expert; None: there are none."""


Route = Callable[[Tensor, ExpertRouter], Routing]
"""The choice by logits, float32 [num_tokens, num_experts]. Of equal scores the first expert's counts as larger."""


class GatedExperts(Protocol):
    """The gated products of all experts: activation(x G_e^T) * (x U_e^T) for each pair."""

    @property
    def reads_counts(self) -> bool:
        """Whether the host reads how many pairs each expert has, for which it waits for a device."""
        ...

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        """[num_tokens, K] -> [num_pairs, N], in the order of the pairs."""
        ...


class ExpertLinears(Protocol):
    """The down projections of all experts, and the sum of what a token's experts make."""

    @property
    def reads_counts(self) -> bool:
        """See GatedExperts."""
        ...

    def __call__(self, inner: Tensor, routing: Routing) -> Tensor:
        """[num_pairs, K] -> [num_tokens, N].

        Each product is rounded to its type. The products of a token, times their weights, are added in float32 by
        rising expert, and the sum is rounded once.
        """
        ...

    def multiply(self, inner: Tensor, routing: Routing) -> Tensor:
        """Return the rounded products alone. [num_pairs, K] -> [num_pairs, N]; there is at least one pair."""
        ...

    def add(self, products: Tensor, routing: Routing) -> Tensor:
        """Return the sums alone. [num_pairs, N] -> [num_tokens, N]."""
        ...

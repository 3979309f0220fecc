"""How many distinct experts a step of n tokens is expected to hit.

    E[distinct] = sum over experts e of 1 - (1 - p_e)^n        p_e: share of the tokens that choose expert e

Before anything was measured each expert has the share k / E. Of all routers that choose k of E experts, this one hits
most: the sum is concave in the shares. So the count is then an upper bound. An engine counts the tokens of each expert
while it serves; its shares give the expectation for tokens of the same kind. Tokens are taken as independent draws.
Those of one request may choose alike, so that a chunk of one prompt hits fewer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from twostroke.config.experts import ExpertsSpec


class ExpertShare(NamedTuple):
    """Experts of any layers that about the same share of tokens choose."""

    num_experts: int
    share: float
    """Mean share of the tokens that choose one of them, from 0 to 1."""


ExpertShares = tuple[ExpertShare, ...]
"""All experts of layers alike that tokens choose."""


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """Experts of all layers with the same kind of experts."""

    spec: ExpertsSpec
    num_layers: int
    parameters_each: int
    """Weights of one expert of one layer."""
    shares: ExpertShares

    @property
    def num_parameters(self) -> int:
        """Weights of one expert of each of these layers."""
        return self.num_layers * self.parameters_each

    @property
    def num_weights(self) -> int:
        """Weights of all experts of these layers."""
        return self.spec.num_experts * self.num_parameters

    def fits(self, shares: ExpertShares) -> bool:
        """Return whether these may be shares of this group's experts."""
        num_experts, chosen = sum(num for num, _ in shares), sum(num * share for num, share in shares)
        most = self.num_layers * self.spec.num_experts
        return num_experts <= most and abs(chosen - self.num_layers * self.spec.num_chosen) < 0.01 * chosen

    def expected_hits(self, num_tokens: int) -> float:
        """Return the expected number of distinct experts that the tokens hit, summed over these layers.

        >>> spec = ExpertsSpec(num_experts=8, num_chosen=2, intermediate_size=64)
        >>> group = ExpertGroup(spec, 1, 100, uniform_shares(spec, 1))
        >>> [round(group.expected_hits(num), 2) for num in (0, 1, 2, 100)]
        [0.0, 2.0, 3.5, 8.0]
        """
        return sum(num * (1 - (1 - share) ** num_tokens) for num, share in self.shares)


def uniform_shares(spec: ExpertsSpec, num_layers: int) -> ExpertShares:
    """Return equal shares of all experts of some layers."""
    return (ExpertShare(num_layers * spec.num_experts, spec.num_chosen / spec.num_experts),)

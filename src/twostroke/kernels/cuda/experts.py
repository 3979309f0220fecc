"""Experts on the card: all products of a step in one launch, where their weights are floats.

Nothing is copied back to the host. Experts with quantized weights are multiplied one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from twostroke.config.layer_spec import Activation
from twostroke.kernels.cuda import expert_programs as programs
from twostroke.kernels.cuda.elementwise import gate_and_mul
from twostroke.kernels.cuda.float_linear import RUNS, FloatLinear
from twostroke.kernels.cuda.jit import launch_options, power_of_two
from twostroke.kernels.expert_operators import ExpertLinears, GatedExperts, Routing
from twostroke.kernels.interface import GatedLinear, Linear, Weight
from twostroke.kernels.reference import experts as sequential_experts
from twostroke.kernels.reference.experts import biases_of

_ADDED_AT_ONCE = 256
"""Outputs whose products one program adds."""


class GroupedProducts:
    """Products x W_e^T + b_e for each pair of a token and an expert, with the bits of FloatLinear."""

    def __init__(self, experts: Sequence[FloatLinear], biases: Tensor | None) -> None:
        """Take the packed weights of all experts, and biases [num_experts, N]."""
        self._experts, self._biases = experts, biases
        weights = [one.weight for one in experts]
        first = weights[0]
        places = [(one.data_ptr() - first.data_ptr()) // first.itemsize for one in weights]
        self._places = torch.tensor(places, device=first.device)
        """Start of each weight in elements from the first one; each has memory of its own."""

    def __call__(self, x: Tensor, routing: Routing, *, is_of_tokens: bool) -> Tensor:
        """Return the products [num_pairs, N] of rows x: of tokens [num_tokens, K], or of pairs [num_pairs, K].

        It is one launch with a grid for the most blocks of rows that a step with so many pairs can have.
        """
        first, num_pairs, num_experts = self._experts[0], len(routing.tokens), len(self._experts)
        num_channels, num_inputs = first.weight.shape
        y = torch.empty(num_pairs, num_channels, dtype=x.dtype, device=x.device)
        if not num_pairs:
            return y
        assert x.dtype is first.weight.dtype, (x.dtype, first.weight.dtype)
        x = x if x.stride(-1) == 1 else x.contiguous()
        tile = first.tile_for(num_pairs // num_experts)
        num_blocks = num_pairs // tile.height + min(num_experts, num_pairs)
        span = first.span
        programs.multiply_experts[(num_blocks, -(-num_channels // tile.channels))](
            x,
            first.weight,
            self._places,
            x if self._biases is None else self._biases,
            routing.tokens,
            routing.starts,
            y,
            num_experts,
            num_channels,
            num_inputs,
            -(-num_inputs // (span * RUNS)),
            x.stride(0),
            HEIGHT=tile.height,
            CHANNELS=tile.channels,
            SPAN=span,
            EXPERTS=power_of_two(num_experts),
            HAS_BIAS=self._biases is not None,
            IS_OF_TOKENS=is_of_tokens,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **launch_options(x.device),
        )
        return y


class TritonGatedExperts:
    """Gated products of experts in one launch."""

    syncs_expert_counts = False

    def __init__(self, products: GroupedProducts, activation: Activation) -> None:
        """Take the products with gate above up."""
        self._products = products
        self._activation: Activation = activation

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        return gate_and_mul(self._products(x, routing, is_of_tokens=True), self._activation)


class TritonExpertLinears:
    """Down projections of experts in one launch."""

    syncs_expert_counts = False

    def __init__(self, products: GroupedProducts) -> None:
        self._products = products

    def __call__(self, inner: Tensor, routing: Routing) -> Tensor:
        return self.add(self.multiply(inner, routing), routing)

    def multiply(self, inner: Tensor, routing: Routing) -> Tensor:
        return self._products(inner, routing, is_of_tokens=False)

    def add(self, products: Tensor, routing: Routing) -> Tensor:
        (num_tokens, num_chosen), num_channels = routing.places.shape, products.shape[1]
        y = torch.empty(num_tokens, num_channels, dtype=products.dtype, device=products.device)
        programs.add_pairs[(-(-num_channels // _ADDED_AT_ONCE), num_tokens)](
            products,
            routing.places,
            routing.weights,
            y,
            num_chosen,
            num_channels,
            CHANNELS=_ADDED_AT_ONCE,
            **launch_options(y.device),
        )
        return y


PackLinear = Callable[[Weight, Tensor | None], Linear]


def pack_gated_experts(
    pack: PackLinear, weights: Sequence[Weight], biases: Tensor | None, activation: Activation
) -> GatedExperts:
    """Return experts computed in one launch where their weights are floats, and one by one otherwise."""
    experts = [pack(*one) for one in zip(weights, biases_of(biases, weights), strict=True)]
    grouped = _grouped(experts, biases)
    if grouped is not None:
        return TritonGatedExperts(grouped, activation)
    return sequential_experts.SequentialGatedExperts([_gated(one, activation) for one in experts])


def pack_expert_linears(pack: PackLinear, weights: Sequence[Weight], biases: Tensor | None) -> ExpertLinears:
    """Return experts computed in one launch where their weights are floats, and one by one otherwise."""
    experts = [pack(*one) for one in zip(weights, biases_of(biases, weights), strict=True)]
    grouped = _grouped(experts, biases)
    return sequential_experts.SequentialExpertLinears(experts) if grouped is None else TritonExpertLinears(grouped)


def _grouped(experts: Sequence[Linear], biases: Tensor | None) -> GroupedProducts | None:
    floats = [one for one in experts if isinstance(one, FloatLinear)]
    if len(floats) < len(experts):
        return None
    return GroupedProducts(floats, None if biases is None else biases.contiguous())


def _gated(both: Linear, activation: Activation) -> GatedLinear:
    return lambda x: gate_and_mul(both(x), activation)

"""Experts with packed weights: the router's choice, and the products of all experts in one call (csrc/experts.hpp)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from twostroke.config.experts import ExpertsSpec
from twostroke.config.layer_spec import Activation
from twostroke.kernels.expert_operators import ExpertLinears, ExpertRouter, GatedExperts, Routing
from twostroke.kernels.interface import GatedLinear, Linear, Weight
from twostroke.kernels.memory import empty, to_float32
from twostroke.kernels.native.extension import address, native
from twostroke.kernels.native.linear import NativeGated, NativeLinear, Panels, have_same_format
from twostroke.kernels.reference import experts as sequential_experts


def route(logits: Tensor, router: ExpertRouter) -> Routing:
    """Choose experts by logits, float32 [num_tokens, num_experts]."""
    spec, num_tokens = router.spec, logits.shape[0]
    num_pairs = num_tokens * spec.num_chosen
    tokens, starts = torch.empty(num_pairs, dtype=torch.int64), torch.empty(spec.num_experts + 1, dtype=torch.int64)
    places = torch.empty(num_tokens, spec.num_chosen, dtype=torch.int64)
    weights = torch.empty(num_tokens, spec.num_chosen)
    native_router_rules(spec).route(
        logits.contiguous().data_ptr(),
        address(router.correction),
        address(router.expert_scales),
        num_tokens,
        tokens.data_ptr(),
        starts.data_ptr(),
        places.data_ptr(),
        weights.data_ptr(),
        address(router.counts),
    )
    return Routing(tokens, starts, places, weights)


@cache
def native_router_rules(spec: ExpertsSpec) -> native.RouterRules:
    """Return the rules of a router's choice in the form that the kernels take."""
    return native.RouterRules(
        spec.num_experts,
        spec.num_chosen,
        spec.scores == "sigmoid",
        spec.is_renormalized,
        spec.scale,
        spec.num_groups,
        spec.num_chosen_groups,
    )


class _PackedExperts:
    """Packed weights of experts in one format, and of one shape."""

    syncs_expert_counts = False

    def __init__(self, panels: Sequence[Panels]) -> None:
        """Bind the packed weights of all experts."""
        self.panels, self._n = panels, panels[0].shape[0]
        self.bound = native.PackedExperts([one.bound for one in panels])


class NativeGatedExperts(_PackedExperts):
    """Gated products of experts in one format."""

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        assert x.dtype is self.panels[0].dtype, x.dtype
        num_pairs = len(routing.tokens)
        y = empty((num_pairs, self._n), x.dtype)
        x = x if x.stride(-1) == 1 else x.contiguous()
        self.bound.multiply(
            x.data_ptr(),
            x.stride(0),
            routing.tokens.data_ptr(),
            routing.starts.data_ptr(),
            y.data_ptr(),
            x.shape[0],
            num_pairs,
        )
        return y


class NativeExpertLinears(_PackedExperts):
    """Down projections of experts in one format."""

    def __call__(self, inner: Tensor, routing: Routing) -> Tensor:
        assert inner.dtype is self.panels[0].dtype, inner.dtype
        inner = F.pad(inner, (0, 1)) if self.panels[0].pads_inputs else inner.contiguous()
        num_tokens, num_chosen = routing.places.shape
        y = empty((num_tokens, self._n), inner.dtype)
        self.bound.multiply_and_add(
            inner.data_ptr(),
            inner.stride(0),
            routing.starts.data_ptr(),
            routing.places.data_ptr(),
            routing.weights.data_ptr(),
            y.data_ptr(),
            num_tokens,
            num_chosen,
        )
        return y

    def multiply(self, inner: Tensor, routing: Routing) -> Tensor:
        assert inner.dtype is self.panels[0].dtype, inner.dtype
        inner, num_pairs = inner.contiguous(), len(inner)
        y = empty((num_pairs, self._n), inner.dtype)
        rows = torch.arange(num_pairs)
        self.bound.multiply(
            inner.data_ptr(),
            inner.stride(0),
            rows.data_ptr(),
            routing.starts.data_ptr(),
            y.data_ptr(),
            num_pairs,
            num_pairs,
        )
        return y

    def add(self, products: Tensor, routing: Routing) -> Tensor:
        num_tokens, num_chosen = routing.places.shape
        y, products = empty((num_tokens, self._n), products.dtype), to_float32(products).contiguous()
        self.bound.add(
            products.data_ptr(),
            routing.places.data_ptr(),
            routing.weights.data_ptr(),
            y.data_ptr(),
            num_tokens,
            num_chosen,
        )
        return y


def pack_gated_experts(
    pack: Callable[[Weight, Tensor | None, Activation], GatedLinear],
    weights: Sequence[Weight],
    biases: Tensor | None,
    activation: Activation,
) -> GatedExperts:
    """Return experts computed in one call where their formats agree, and one by one otherwise."""
    experts = [
        pack(*one, activation) for one in zip(weights, sequential_experts.biases_of(biases, weights), strict=True)
    ]
    panels = _together(experts)
    return sequential_experts.SequentialGatedExperts(experts) if panels is None else NativeGatedExperts(panels)


def pack_expert_linears(
    pack: Callable[[Weight, Tensor | None], Linear], weights: Sequence[Weight], biases: Tensor | None
) -> ExpertLinears:
    """Return experts computed in one call where their formats agree, and one by one otherwise."""
    experts = [pack(*one) for one in zip(weights, sequential_experts.biases_of(biases, weights), strict=True)]
    panels = _together(experts)
    return sequential_experts.SequentialExpertLinears(experts) if panels is None else NativeExpertLinears(panels)


def _together(experts: Sequence[GatedLinear] | Sequence[Linear]) -> Sequence[Panels] | None:
    """Return the panels of experts that one call can multiply; None if it cannot, since their formats differ."""
    panels = [one.panels for one in experts if isinstance(one, NativeGated | NativeLinear)]
    return panels if len(panels) == len(experts) and have_same_format(panels) else None

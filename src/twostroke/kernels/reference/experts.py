"""Experts computed with a backend's own products: one expert after the other, each with the rows of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from twostroke.config.layer_spec import Activation
from twostroke.kernels.activation import logistic
from twostroke.kernels.expert_operators import ExpertLinears, ExpertRouter, GatedExperts, Routing
from twostroke.kernels.interface import GatedLinear, Linear, Weight
from twostroke.kernels.memory import to_float32

_MIN_SUM = 1e-20
"""Added to the sum of sigmoids before division, as transformers does."""


def route(logits: Tensor, router: ExpertRouter) -> Routing:
    """Choose experts by a softmax or by sigmoids. Scores are computed in float64, and weights rounded once.

    Args:
        logits: float32 [num_tokens, num_experts].
        router: settings of the choice.
    """
    spec, logits = router.spec, logits.double()
    scores = _softmax(logits) if spec.scores == "softmax" else logistic(logits)
    chosen = _chosen(scores, router)
    weights = scores.gather(1, chosen)
    if spec.is_renormalized:
        total = _sum(weights)
        weights = weights / (total + _MIN_SUM if spec.scores == "sigmoid" else total)
    weights = weights * spec.scale
    if router.expert_scales is not None:
        weights = weights * router.expert_scales[chosen]
    found = routing_of(chosen, weights.float(), spec.num_experts)
    if router.counts is not None:
        router.counts.add_(found.starts.diff())
    return found


def routing_of(chosen: Tensor, weights: Tensor, num_experts: int) -> Routing:
    """Return chosen pairs, sorted by expert.

    Args:
        chosen: int64 [num_tokens, num_chosen], experts in rising order.
        weights: float32, the same shape.
        num_experts: experts of the layer.
    """
    num_tokens, num_chosen = chosen.shape
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    # not bincount, which waits for the device
    starts = torch.searchsorted(flat[order], torch.arange(num_experts + 1, device=order.device))
    return Routing(order // num_chosen, starts, places.view(num_tokens, num_chosen), weights)


def _softmax(logits: Tensor) -> Tensor:
    powers = (logits - logits.amax(-1, keepdim=True)).exp_()
    return powers / _sum(powers)


def _sum(values: Tensor) -> Tensor:
    """Return the sums of rows, [num_rows, 1], each added in the order of its columns."""
    return values.cumsum(-1)[:, -1:]


def _chosen(scores: Tensor, router: ExpertRouter) -> Tensor:
    """Return the experts of each token in rising order. int64 [num_tokens, num_chosen]"""
    spec = router.spec
    if router.correction is not None:
        scores = scores + router.correction
    if spec.num_groups > 1:
        groups = scores.unflatten(1, (spec.num_groups, -1))
        two = groups.sort(dim=-1, descending=True).values[..., :2]
        best = _largest(two[..., 0] + two[..., 1], spec.num_chosen_groups)
        is_left = torch.zeros_like(groups, dtype=torch.bool)
        is_left.scatter_(1, best.unsqueeze(-1).expand(-1, -1, groups.shape[-1]), value=True)
        scores = groups.masked_fill(~is_left, -torch.inf).flatten(1)
    return _largest(scores, spec.num_chosen).sort(-1).values


def _largest(values: Tensor, num: int) -> Tensor:
    """Return the columns of the largest numbers of each row; of equal numbers the first."""
    return values.sort(stable=True, dim=-1, descending=True).indices[:, :num]


class SequentialGatedExperts:
    """Gated products of experts, one expert after the other."""

    syncs_expert_counts = True

    def __init__(self, experts: Sequence[GatedLinear]) -> None:
        self._experts = experts

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        return torch.cat([self._experts[expert](x[routing.tokens[pairs]]) for expert, pairs in _hit(routing)])


class SequentialExpertLinears:
    """Down projections of experts, one expert after the other."""

    syncs_expert_counts = True

    def __init__(self, experts: Sequence[Linear]) -> None:
        self._experts = experts

    def __call__(self, inner: Tensor, routing: Routing) -> Tensor:
        return self.add(self.multiply(inner, routing), routing)

    def multiply(self, inner: Tensor, routing: Routing) -> Tensor:
        return torch.cat([self._experts[expert](inner[pairs]) for expert, pairs in _hit(routing)])

    def add(self, products: Tensor, routing: Routing) -> Tensor:
        total = torch.zeros(len(routing.places), products.shape[1], dtype=torch.float32, device=products.device)
        for rank in range(routing.places.shape[1]):
            total += to_float32(products[routing.places[:, rank]]) * routing.weights[:, rank : rank + 1]
        return total.to(products.dtype)


def pack_gated_experts(
    pack: Callable[[Weight, Tensor | None, Activation], GatedLinear],
    weights: Sequence[Weight],
    biases: Tensor | None,
    activation: Activation,
) -> GatedExperts:
    """Pack experts with `pack`, one product for each."""
    pairs = zip(weights, biases_of(biases, weights), strict=True)
    return SequentialGatedExperts([pack(*one, activation) for one in pairs])


def pack_expert_linears(
    pack: Callable[[Weight, Tensor | None], Linear], weights: Sequence[Weight], biases: Tensor | None
) -> ExpertLinears:
    """Pack experts with `pack`, one product for each."""
    pairs = zip(weights, biases_of(biases, weights), strict=True)
    return SequentialExpertLinears([pack(*one) for one in pairs])


def biases_of(biases: Tensor | None, weights: Sequence[Weight]) -> Sequence[Tensor | None]:
    """Return the bias of each expert; None for each where there are no biases."""
    return [None] * len(weights) if biases is None else biases.unbind(0)


def _hit(routing: Routing) -> Iterator[tuple[int, slice]]:
    """Yield the experts that have tokens, with their pairs."""
    starts = routing.starts.tolist()
    for expert, (begin, end) in enumerate(pairwise(starts)):
        if begin < end:
            yield expert, slice(begin, end)

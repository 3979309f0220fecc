"""Sparse layers: a router sends each token to a few experts (Shazeer et al. 2017, arXiv:1701.06538).

For Mixtral (arXiv:2401.04088), Qwen2-MoE, Qwen3-MoE (arXiv:2505.09388), OLMoE (arXiv:2409.02060), Granite-MoE, gpt-oss
(arXiv:2508.10925), GLM-4.5 (arXiv:2508.06471), MiniMax-M2, ERNIE 4.5 and dots.llm1 (arXiv:2506.05767).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from twostroke.config.experts import ExpertsSpec
from twostroke.config.layer_spec import LayerSpec
from twostroke.config.model import ModelConfig
from twostroke.kernels.activation import logistic
from twostroke.kernels.expert_operators import ExpertRouter, Routing
from twostroke.kernels.feed_forward_parts import ExpertParts, MLPParts
from twostroke.kernels.memory import to_float32
from twostroke.layers.elementwise import RMSNorm
from twostroke.layers.expert_split import ExpertProducts, RowSplitExperts, WholeExperts
from twostroke.model.decoder import Parameter, Placement
from twostroke.model.llama import MLP, FeedForward, Llama, LlamaLayer, gate_activation

_CORRECTION = "routing.e_score_correction_bias"
_INPUT_SCALES = "routing.scale"
_EXPERT_SCALES = "routing.per_expert_scale"


class Experts:
    """The sum of the outputs of a token's experts and of the shared expert. Implements FeedForward."""

    def __init__(self, config: ModelConfig, spec: LayerSpec, weights: Mapping[str, Any], placement: Placement) -> None:
        """Pack the weights of a layer's router and experts."""
        assert spec.experts is not None, spec
        experts, operators, split = spec.experts, placement.operators, placement.split
        self._logits = operators.pack_linear(weights["router.weight"], weights.get("router.bias"))
        # a recorded pass of a GPU has rows of padding, which would be counted too
        is_counted = placement.device.type == "cpu"
        self.counts = torch.zeros(experts.num_experts, dtype=torch.int64) if is_counted else None
        self._router = ExpertRouter(experts, weights.get(_CORRECTION), weights.get(_EXPERT_SCALES), self.counts)
        self._route, self._router_norm = operators.route, None
        if experts.norms_router_input:
            norm = weights[_INPUT_SCALES] * config.hidden_size**-0.5
            self._router_norm = RMSNorm(norm, config.norm_eps, operators)
        activation = gate_activation(spec)
        own = split.own(experts.num_experts) if split.splits_by_expert else range(experts.num_experts)
        gated, down = ([weights[name] for name in _names(own, kind)] for kind in ("gate_up", "down"))
        inner = operators.pack_gated_experts(gated, _biases(experts, own, weights, "gate_up"), activation)
        outer = operators.pack_expert_linears(down, _biases(experts, own, weights, "down"))
        self._products = inner, outer
        self.syncs_expert_counts = inner.syncs_expert_counts or outer.syncs_expert_counts
        self.compute: ExpertProducts
        """Sum of the outputs of the chosen experts."""
        if split.splits_by_expert:
            self.compute = WholeExperts(inner, outer, split, experts.num_experts)
        else:
            self.compute = RowSplitExperts(inner, outer, split, (experts.intermediate_size, config.hidden_size))
        self._shared, self._shared_gate = None, None
        if experts.shared_size:
            shared_inner = operators.pack_gated(weights["shared.gate_up.weight"], None, activation)
            shared_down = operators.pack_linear(weights["shared.down.weight"], None)
            self._shared = MLP(
                split.gated(shared_inner, experts.shared_size),
                split.linear(shared_down, config.hidden_size),
            )
        if experts.has_shared_gate:
            self._shared_gate = operators.pack_linear(weights["shared_gate.weight"], None)

    @property
    def parts(self) -> ExpertParts | None:
        """Parts for a back end that binds them; None if there are others (router norm, gate of a shared expert)."""
        if self._router_norm is not None or self._shared_gate is not None:
            return None
        shared = None if self._shared is None else self._shared.parts
        return ExpertParts(self._logits, self._router, *self._products, shared)

    def choose(self, in_float32: Tensor) -> Routing:
        """Return the experts chosen for each row, float32 [num_tokens, hidden_size]."""
        normed = in_float32 if self._router_norm is None else self._router_norm(in_float32)
        return self._route(self._logits(normed), self._router)

    def __call__(self, x: Tensor) -> Tensor:
        in_float32 = to_float32(x)
        found = self.compute(x, self.choose(in_float32))
        if self._shared is None:
            return found
        if self._shared_gate is None:
            return self._shared.add_to(found, x)
        return found + (to_float32(self._shared(x)) * logistic(self._shared_gate(in_float32))).to(found.dtype)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return residual + self(x)


class SparseLayer(LlamaLayer):
    """A Llama layer with experts in place of the MLP, if its spec has some."""

    def pack_feed_forward(
        self, config: ModelConfig, spec: LayerSpec, weights: Mapping[str, Any], placement: Placement
    ) -> FeedForward:
        if spec.experts is None:
            return super().pack_feed_forward(config, spec, weights, placement)
        experts = Experts(config, spec, weights, placement)
        self.syncs_expert_counts, self.expert_counts = experts.syncs_expert_counts, experts.counts
        return experts

    def feed_forward_parts(self) -> MLPParts | ExpertParts | None:
        found = self.feed_forward
        return found.parts if isinstance(found, Experts) else super().feed_forward_parts()


class Sparse(Llama):
    """Llama with sparse layers."""

    layer_class = SparseLayer

    @classmethod
    def layer_parameters(cls, config: ModelConfig, layer_id: int) -> dict[str, Parameter]:
        found, spec = super().layer_parameters(config, layer_id), config.layers[layer_id]
        return found if spec.experts is None else found | expert_parameters(spec.experts, config.hidden_size)


def expert_parameters(spec: ExpertsSpec, hidden_size: int) -> dict[str, Parameter]:
    """Return the tensors of a layer's router and experts."""
    size = spec.intermediate_size
    found = {"router.weight": Parameter((spec.num_experts,), hidden_size, is_router=True)}
    if spec.has_correction_bias:
        found[_CORRECTION] = Parameter((spec.num_experts,), is_router=True)
    if spec.norms_router_input:
        found[_INPUT_SCALES] = Parameter((hidden_size,), is_router=True)
    if spec.has_expert_scales:
        found[_EXPERT_SCALES] = Parameter((spec.num_experts,), is_router=True)
    experts = range(spec.num_experts)
    for name in _names(experts, "gate_up"):
        found[name] = Parameter((size, size), hidden_size, is_split=True, is_gated=True)
    for name in _names(experts, "down"):
        found[name] = Parameter((hidden_size,), size, is_split=True)
    if spec.has_biases:
        found["router.bias"] = Parameter((spec.num_experts,), is_router=True)
        found |= {name: Parameter((size, size), is_split=True) for name in _names(experts, "gate_up", "bias")}
        found |= {name: Parameter((hidden_size,), is_split=True) for name in _names(experts, "down", "bias")}
    if spec.shared_size:
        rows = (spec.shared_size, spec.shared_size)
        found["shared.gate_up.weight"] = Parameter(rows, hidden_size, is_split=True, is_gated=True)
        found["shared.down.weight"] = Parameter((hidden_size,), spec.shared_size, is_split=True)
    if spec.has_shared_gate:
        found["shared_gate.weight"] = Parameter((1,), hidden_size, is_router=True)
    return found


def _names(experts: range, product: str, kind: str = "weight") -> list[str]:
    return [f"experts.{expert}.{product}.{kind}" for expert in experts]


def _biases(spec: ExpertsSpec, experts: range, weights: Mapping[str, Any], product: str) -> Tensor | None:
    """Return the biases of some experts, [len(experts), N]; None if they have none."""
    if not spec.has_biases:
        return None
    return torch.stack([weights[name] for name in _names(experts, product, "bias")])

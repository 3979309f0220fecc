"""Gemma 4: Llama with per-kind heads, shared K and V, per-layer embeddings, and experts beside an MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from twostroke.config.layer_spec import LayerSpec
from twostroke.config.model import ModelConfig
from twostroke.kernels.activation import activated
from twostroke.kernels.interface import Operators
from twostroke.kernels.memory import to_float32
from twostroke.layers.attention import AttentionMetadata, KVTensors
from twostroke.layers.elementwise import RMSNorm, Rotation
from twostroke.model.decoder import Parameter, Placement
from twostroke.model.llama import FeedForward, Llama, LlamaLayer, identity, norm_weight, rows_reader
from twostroke.model.sparse import Experts, expert_parameters

_SCALAR = "whole.layer_scalar"
_EXPERT_NORMS = ("dense_out_norm", "experts_norm", "experts_out_norm")


class ExpertsBesideMLP(Experts):
    """A feed-forward block norm(mlp(norm(x))) + norm(experts(norm(x))); every norm has its own weights.

    The router also reads x through its own norm. Implements FeedForward.
    """

    def __init__(
        self, config: ModelConfig, spec: LayerSpec, weights: Mapping[str, Any], placement: Placement, dense: FeedForward
    ) -> None:
        """Build the experts and their norms; `dense` is the MLP beside the experts."""
        super().__init__(config, spec, weights, placement)
        self._dense = dense
        self._dense_norm, self._dense_out_norm, self._norm, self._out_norm = (
            RMSNorm(norm_weight(config, weights[f"{name}.weight"]), config.norm_eps, placement.operators)
            for name in ("mlp_norm", *_EXPERT_NORMS)
        )

    def __call__(self, x: Tensor) -> Tensor:
        dense = self._dense_out_norm(self._dense(self._dense_norm(x)))
        return dense + self._out_norm(self.compute(self._norm(x), self.choose(to_float32(x))))


class Gemma4Layer(LlamaLayer):
    """Llama's layer times a learned scalar, with per-layer embeddings.

    After the MLP it adds norm(up(gelu(gate(x)) * e)), where e is the token's embedding for this layer.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, Any], layer_id: int, placement: Placement) -> None:
        spec, name = config.layers[layer_id], _projection(config.layers[layer_id])
        own = {f"qkv.{kind}": weights[f"{name}.{kind}"] for kind in ("weight", "bias") if f"{name}.{kind}" in weights}
        super().__init__(config, {**weights, **own}, layer_id, placement)
        if spec.experts is not None:
            self.mlp_norm = identity  # MLP, experts and router apply their own norms to x
            self.feed_forward = ExpertsBesideMLP(config, spec, weights, placement, self.feed_forward)
            self.syncs_expert_counts, self.expert_counts = (
                self.feed_forward.syncs_expert_counts,
                self.feed_forward.counts,
            )
        self._has_value_projection, self._makes_kv = spec.has_value_projection, spec.kv_source is None
        self._rms_norm_, self._eps = placement.operators.rms_norm_, config.norm_eps
        self._scalar, self._hidden_size = weights[_SCALAR], config.hidden_size
        self._begin, self._size = config.hidden_size + layer_id * spec.token_input_size, spec.token_input_size
        if self._size:
            pack = placement.operators.pack_linear
            self._gate, self._up = pack(weights["input_gate.weight"], None), pack(weights["input_up.weight"], None)
            input_norm = norm_weight(config, weights["input_norm.weight"])
            self._input_norm = RMSNorm(input_norm, config.norm_eps, placement.operators)

    def head_norm(self, config: ModelConfig, weights: Mapping[str, Any], operators: Operators) -> RMSNorm:
        """Return the norm of LlamaLayer, or one of q alone if K and V come from another layer."""
        if "k_norm.weight" in weights:
            return super().head_norm(config, weights, operators)
        q_norm = norm_weight(config, weights["q_norm.weight"])
        return RMSNorm(torch.stack([q_norm] * self._num_heads), config.norm_eps, operators)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None,
        attention: AttentionMetadata,
        kv: KVTensors,
        query_scales: Tensor | None = None,
    ) -> Tensor:
        """Run the layer; x is [num_tokens, hidden_size + per-layer embeddings of all layers]."""
        if not self._size:
            return super().forward(x, rotation, attention, kv, query_scales) * self._scalar
        hidden = x[:, : self._hidden_size].contiguous()
        hidden = super().forward(hidden, rotation, attention, kv, query_scales)
        gate = self._gate(hidden)
        gate = activated(gate.float(), "gelu_tanh").to(gate.dtype)
        hidden = hidden + self._input_norm(self._up(gate * x[:, self._begin : self._begin + self._size]))
        x[:, : self._hidden_size] = hidden * self._scalar
        return x

    def prepare_heads(self, qkv: Tensor, rotation: Rotation | None) -> tuple[Tensor, Rotation | None]:
        if self._makes_kv:
            if not self._has_value_projection:
                qkv = torch.cat([qkv, qkv[:, self._num_heads :]], dim=1)
            values = qkv[:, self._num_heads + self._num_kv_heads :]
            self._rms_norm_(values, _ones(values.shape[1], self._head_dim, qkv.dtype, qkv.device), self._eps)
        return qkv, rotation


@cache
def _ones(num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the weight of a norm without a learned one, made once for all layers."""
    return torch.ones(num_heads, head_dim, dtype=dtype, device=device)


def _projection(spec: LayerSpec) -> str:
    """Return the name of the matrix that projects q, k and v, or some of them."""
    if spec.kv_source is not None:
        return "q"
    return "qkv" if spec.has_value_projection else "qk"


class Gemma4(Llama):
    """Llama with Gemma 4's layers.

    If the model has per-layer embeddings, hidden states carry them behind the residual stream from `embed` to
    `final_norm`: [num_tokens, hidden_size + num_layers * token_input_size].
    """

    layer_class = Gemma4Layer

    @classmethod
    def parameters(cls, config: ModelConfig) -> dict[str, Parameter]:
        size = config.layers[0].token_input_size
        together, found = config.num_layers * size, super().parameters(config)
        if size:
            found["token_inputs.weight"] = Parameter((config.vocab_size,), together, is_split=True, is_table=True)
            found["token_inputs_up.weight"] = Parameter((together,), config.hidden_size)
            found["token_inputs_norm.weight"] = Parameter((size,), is_wide=True)
        return found

    @classmethod
    def layer_parameters(cls, config: ModelConfig, layer_id: int) -> dict[str, Parameter]:
        spec, hidden = config.layers[layer_id], config.hidden_size
        found = super().layer_parameters(config, layer_id)
        rows = {"q": (spec.q_size,), "qk": (spec.q_size, spec.kv_size)}.get(_projection(spec))
        if rows is not None:
            for name in [name for name in found if name.startswith("qkv.")]:
                found[name.replace("qkv", _projection(spec))] = replace(found.pop(name), rows=rows)
        if spec.kv_source is not None:
            del found["k_norm.weight"]
        found[_SCALAR] = Parameter((1,))
        if spec.experts is not None:
            found |= expert_parameters(spec.experts, hidden)
            found |= {f"{name}.weight": Parameter((hidden,), is_wide=True) for name in _EXPERT_NORMS}
        if spec.token_input_size:
            found["input_gate.weight"] = Parameter((spec.token_input_size,), hidden)
            found["input_up.weight"] = Parameter((hidden,), spec.token_input_size)
            found["input_norm.weight"] = Parameter((hidden,), is_wide=True)
        return found

    def __init__(self, config: ModelConfig, weights: Mapping[str, Any], placement: Placement) -> None:
        super().__init__(config, weights, placement)
        self._size = config.layers[0].token_input_size
        if self._size:
            scale = torch.tensor(self._size**0.5, dtype=torch.float64)
            self._rows_of_token_inputs = rows_reader(weights["token_inputs.weight"], placement.operators)
            self._token_inputs_scale = float(scale.to(placement.dtype))
            self._token_inputs_up = placement.operators.pack_linear(weights["token_inputs_up.weight"], None)
            inputs_norm = norm_weight(config, weights["token_inputs_norm.weight"])
            self._token_inputs_norm = RMSNorm(inputs_norm, config.norm_eps, placement.operators)

    @torch.inference_mode()
    def embed(self, input_ids: Tensor, positions: Tensor | None = None) -> Tensor:
        rows = super().embed(input_ids, positions)
        if not self._size:
            return rows
        of_tokens = self._split.rows(input_ids, self.config.vocab_size, self._rows_of_token_inputs)
        inputs = self._token_inputs_up(rows) * self.config.hidden_size**-0.5
        inputs = self._token_inputs_norm(inputs.view(-1, self._size)).view(len(rows), -1)
        return torch.cat([rows, (inputs + of_tokens * self._token_inputs_scale) * 2**-0.5], dim=1)

    @torch.inference_mode()
    def final_norm(self, hidden: Tensor) -> Tensor:
        return super().final_norm(hidden[:, : self.config.hidden_size])

"""Llama (Touvron et al. 2023, arXiv:2302.13971), and models that differ from it only by their LayerSpec.

Among these are Mistral, SmolLM3, Granite, Qwen2, Qwen3 (Yang et al. 2025, arXiv:2505.09388), OLMo 2 (arXiv:2501.00656),
Gemma 3 (arXiv:2503.19786) and GPT-NeoX (arXiv:2204.06745).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from twostroke.config.layer_spec import Activation, LayerSpec, NormPlace, PlainActivation
from twostroke.config.model import ModelConfig
from twostroke.kernels.activation import activated
from twostroke.kernels.feed_forward_parts import ExpertParts, MLPParts
from twostroke.kernels.interface import FusedLayer, GatedLinear, LayerParts, Linear, Operators
from twostroke.kernels.quantized_weight import QuantizedWeight
from twostroke.kernels.soft_cap import soft_cap
from twostroke.kernels.streamed_weight import Matrix, StreamedWeight
from twostroke.layers.attention import Attention, AttentionMetadata, KVTensors
from twostroke.layers.elementwise import LayerNorm, Norm, RMSNorm, Rotary, Rotation
from twostroke.model.decoder import DecoderModel, Parameter, Placement

_NORMS: Mapping[NormPlace, tuple[str, ...]] = {
    "before": ("attention_norm", "mlp_norm"),
    "after": ("attention_out_norm", "mlp_out_norm"),
    "around": ("attention_norm", "mlp_norm", "attention_out_norm", "mlp_out_norm"),
    "shared": ("attention_norm",),
}
_QK_NORMS = ("q_norm", "k_norm")
_SINKS = "attention.sinks"
_GATES: tuple[Activation, ...] = get_args(Activation)


class FeedForward(Protocol):
    """A branch added to the residual stream: an MLP, experts, or the output projection of attention."""

    def __call__(self, x: Tensor) -> Tensor:
        """Map [num_tokens, K] to [num_tokens, hidden_size]."""
        ...

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return residual [num_tokens, hidden_size] plus the result of `__call__`."""
        ...


class MLP:
    """An MLP, down(inner(x)). Implements FeedForward."""

    def __init__(self, inner: GatedLinear, down: Linear) -> None:
        self._inner, self._down = inner, down

    @property
    def parts(self) -> MLPParts:
        """Weights of the MLP, for a back end that binds them."""
        return MLPParts(self._inner, self._down)

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._inner(x))

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return self._down.add_to(residual, self._inner(x))


class LlamaLayer:
    """One layer: x + attention(norm(x)), then x + mlp(norm(x)), with a gated MLP (Shazeer 2020, arXiv:2002.05202).

    Norms are at the inputs of attention and MLP, at their outputs, or at both. If attention and MLP are computed in
    parallel, the MLP has the same input, through its own norm or the same one. With `residual_from_norm` the norm's
    output replaces x as the residual.
    """

    syncs_expert_counts = False
    """Whether it has experts whose rows per expert are read by the host."""
    expert_counts: Tensor | None = None
    """Tokens of each expert since the start; None: it has no experts, or they are not counted."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Any], layer_id: int, placement: Placement) -> None:
        """Pack the layer's weights, which are named without the prefix `layers.i.`."""
        operators, split, spec = placement.operators, placement.split, config.layers[layer_id]
        self._num_heads, self._num_kv_heads = split.share(spec.num_heads), split.share(spec.kv.num_kv_heads)
        self._head_dim, self._width = spec.kv.head_dim, spec.q_size
        self._heads_of_all = (spec.num_heads, spec.kv.num_kv_heads)
        self._residual_scale, self._is_parallel = spec.residual_scale, spec.is_parallel
        self._adds_to_normed = spec.residual_from_norm
        self._shares_norm, self._norms_rows = spec.norms == "shared", spec.qk_norm == "rows"
        self._split = split
        names = _NORMS[spec.norms] + (_QK_NORMS if spec.qk_norm == "rows" else ())
        norms: dict[str, Norm] = {name: _norm(config, weights, name, operators) for name in names}
        if spec.qk_norm == "own_heads":
            norms |= {name: LayerNorm(weights[f"{name}.weight"], None, config.norm_eps) for name in _QK_NORMS}
        self.attention_norm, self.mlp_norm = norms.get("attention_norm", identity), norms.get("mlp_norm", identity)
        self._attention_out_norm, self._mlp_out_norm = norms.get("attention_out_norm"), norms.get("mlp_out_norm")
        self._qk_norms = [norms[name] for name in _QK_NORMS if name in norms]
        self._qkv = operators.pack_linear(weights["qkv.weight"], weights.get("qkv.bias"))
        head_norm = self.head_norm(config, weights, operators) if spec.qk_norm == "heads" else None
        sinks = weights[_SINKS].float() if spec.has_sinks else None
        self._attention = Attention(layer_id, spec, operators, head_norm, own_slopes(spec, placement), sinks)
        output = operators.pack_linear(weights["output.weight"], weights.get("output.bias"))
        self.output = split.linear(output, config.hidden_size)
        self.feed_forward = self.pack_feed_forward(config, spec, weights, placement)
        self._whole = self._as_one_call(spec, norms, head_norm, operators)

    def pack_feed_forward(
        self, config: ModelConfig, spec: LayerSpec, weights: Mapping[str, Any], placement: Placement
    ) -> FeedForward:
        """Return the branch that follows attention and the norm after it."""
        inner = self.pack_mlp(spec, weights, placement)
        down = placement.operators.pack_linear(weights["down.weight"], weights.get("down.bias"))
        return MLP(inner, placement.split.linear(down, config.hidden_size))

    def pack_mlp(self, spec: LayerSpec, weights: Mapping[str, Any], placement: Placement) -> Callable[[Tensor], Tensor]:
        """Return the part of the MLP before its down projection, from hidden_size to intermediate_size."""
        operators = placement.operators
        if spec.has_gate:
            gate_up = weights["gate_up.weight"]
            inner = operators.pack_gated(gate_up, weights.get("gate_up.bias"), gate_activation(spec))
        else:
            up = operators.pack_linear(weights["up.weight"], weights.get("up.bias"))
            assert spec.activation != "clamped_swiglu", spec
            inner = partial(_plain, up, spec.activation)
        return placement.split.gated(inner, spec.intermediate_size)

    def head_norm(self, config: ModelConfig, weights: Mapping[str, Any], operators: Operators) -> RMSNorm:
        """Return the norm over each head of q and k, with each head's weight in its row."""
        q_norm, k_norm = (norm_weight(config, weights[f"{name}.weight"]) for name in ("q_norm", "k_norm"))
        of_heads = torch.stack([q_norm] * self._num_heads + [k_norm] * self._num_kv_heads)
        return RMSNorm(of_heads, config.norm_eps, operators)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None,
        attention: AttentionMetadata,
        kv: KVTensors,
        query_scales: Tensor | None = None,
    ) -> Tensor:
        """Compute the layer.

        Args:
            x: [num_tokens, hidden_size].
            rotation: rotary embedding of q and k, if the layer has one.
            attention: metadata of the step.
            kv: the KV storage.
            query_scales: [num_tokens, 1, 1], factors on q, if the layer has them.
        """
        if self._whole is not None and query_scales is None:
            return self._attention.compute_layer(self._whole, x, rotation, attention, kv)
        normed = self.attention_norm(x)
        beside = self.mlp_norm(x) if self._is_parallel and not self._shares_norm else normed
        attended = self.attend(normed, rotation, attention, kv, query_scales)
        x = self._added(normed if self._adds_to_normed else x, self.output, attended, self._attention_out_norm)
        normed = beside if self._is_parallel else self.mlp_norm(x)
        return self._added(normed if self._adds_to_normed else x, self.feed_forward, normed, self._mlp_out_norm)

    def feed_forward_parts(self) -> MLPParts | ExpertParts | None:
        """Return the parts of the feed-forward branch that a back end may bind; None if it cannot."""
        return self.feed_forward.parts if isinstance(self.feed_forward, MLP) else None

    def center_keys(self, mean: Tensor) -> None:
        """Store quantized keys minus `mean` [num_kv_heads of this rank, head_dim], from now on."""
        self._attention.center_keys(mean)

    def _as_one_call(
        self, spec: LayerSpec, norms: Mapping[str, Norm], head_norm: RMSNorm | None, operators: Operators
    ) -> FusedLayer | None:
        """Return this layer as one call of the back end; None if it has none for such a layer."""
        adds_plainly = not self._adds_to_normed and not self._is_parallel and self._residual_scale == 1.0
        if self._split.size > 1 or not adds_plainly or not spec.has_plain_attention:
            return None
        bound = {name: norm.bound for name, norm in norms.items() if isinstance(norm, RMSNorm)}
        feed_forward = self.feed_forward_parts()
        if len(bound) < len(norms) or feed_forward is None:
            return None
        return operators.fused_layer(
            LayerParts(
                attention_norm=bound.get("attention_norm"),
                attention_out_norm=bound.get("attention_out_norm"),
                mlp_norm=bound.get("mlp_norm"),
                mlp_out_norm=bound.get("mlp_out_norm"),
                head_norm=None if head_norm is None else head_norm.bound,
                scoring=self._attention.scoring,
                head_dim=self._head_dim,
                qkv=self._qkv,
                output=self.output,
                feed_forward=feed_forward,
            )
        )

    def _added(self, residual: Tensor, branch: FeedForward, x: Tensor, norm: Norm | None) -> Tensor:
        if norm is None and self._residual_scale == 1.0:
            return branch.add_to(residual, x)
        added = branch(x) if norm is None else norm(branch(x))
        return residual + (added if self._residual_scale == 1.0 else added * self._residual_scale)

    def attend(
        self,
        x: Tensor,
        rotation: Rotation | None,
        attention: AttentionMetadata,
        kv: KVTensors,
        query_scales: Tensor | None = None,
    ) -> Tensor:
        """Return self-attention of x [num_tokens, hidden_size], before the output projection."""
        heads, rotation = self.prepare_heads(self._qkv(x).view(x.shape[0], -1, self._head_dim), rotation)
        if query_scales is not None:
            heads[:, : self._num_heads].mul_(query_scales)
        return self._split.gather(self._attention(heads, rotation, attention, kv), self._width)

    def prepare_heads(self, qkv: Tensor, rotation: Rotation | None) -> tuple[Tensor, Rotation | None]:
        """Change projected heads [num_tokens, heads, head_dim] before attention, and return the rotation left to it."""
        if self._qk_norms:
            qk = qkv[:, : self._num_heads + self._num_kv_heads]
            parts = qk.split((self._num_heads, self._num_kv_heads), dim=1)
            if self._norms_rows:
                self._norm_rows_(qk, parts)
            else:
                for part, norm in zip(parts, self._qk_norms, strict=True):
                    part.copy_(norm(part))
        return qkv, rotation

    def _norm_rows_(self, qk: Tensor, parts: Sequence[Tensor]) -> None:
        """Normalize q and k over the heads of all ranks, in place; each rank keeps its own heads."""
        wholes = self._split.gather_heads(qk, self._heads_of_all)
        for part, whole, norm in zip(parts, wholes, self._qk_norms, strict=True):
            own = self._split.own(whole.shape[1])
            part.copy_(norm(whole.flatten(1)).view_as(whole)[:, own.start : own.stop])


def identity(x: Tensor) -> Tensor:
    """Return x unchanged, in place of a norm that a layer does not have."""
    return x


def own_slopes(spec: LayerSpec, placement: Placement) -> Tensor | None:
    """Return ALiBi's slopes of this rank's query heads, float32; None without ALiBi."""
    if not spec.has_alibi:
        return None
    own = placement.split.own(spec.num_heads)
    return torch.tensor(spec.slopes[own.start : own.stop], dtype=torch.float32, device=placement.device)


def gate_activation(spec: LayerSpec) -> Activation:
    """Return the activation of a gated MLP, or of experts."""
    assert spec.activation in _GATES, spec
    return spec.activation


def _plain(up: Linear, activation: PlainActivation, x: Tensor) -> Tensor:
    """Compute the part of an MLP without a gate before its down projection."""
    inner = up(x)
    return activated(inner.float(), activation).to(inner.dtype)


def _norm(config: ModelConfig, weights: Mapping[str, Any], name: str, operators: Operators) -> Norm:
    weight = weights[f"{name}.weight"]
    if config.norm == "rms":
        return RMSNorm(norm_weight(config, weight), config.norm_eps, operators)
    bias = weights[f"{name}.bias"] if config.norm == "layer_bias" else None
    return LayerNorm(norm_weight(config, weight), bias, config.norm_eps)


def norm_weight(config: ModelConfig, weight: Tensor) -> Tensor:
    """Return a norm's factors from the stored weight."""
    return weight.float() + config.norm_offset if config.has_float32_norms or config.norm_offset else weight


def _norm_parameters(config: ModelConfig, name: str, size: int, num_copies: int = 1) -> dict[str, Parameter]:
    """Return the tensors of a norm; a norm computed in float32 is kept in float32."""
    is_wide = config.norm != "rms" or config.has_float32_norms
    kinds = ("weight", "bias") if config.norm == "layer_bias" else ("weight",)
    return {f"{name}.{kind}": Parameter((size,), num_copies=num_copies, is_wide=is_wide) for kind in kinds}


class Llama(DecoderModel):
    """A model of embedding, layers, norm, and a head that may be the embedding."""

    layer_class: type[LlamaLayer] = LlamaLayer

    @classmethod
    def parameters(cls, config: ModelConfig) -> dict[str, Parameter]:
        found = {
            "embedding.weight": Parameter((config.vocab_size,), config.hidden_size, is_split=True),
            **_norm_parameters(config, "norm", config.hidden_size),
        }
        if config.has_embedding_norm:
            found |= _norm_parameters(config, "embedding_norm", config.hidden_size)
        if config.position_offset is not None:
            num_rows = config.max_position_embeddings + config.position_offset
            found["positions.weight"] = Parameter((num_rows,), config.hidden_size, is_table=True)
        if not config.tie_word_embeddings:
            found["lm_head.weight"] = Parameter((config.vocab_size,), config.hidden_size, is_split=True)
        if config.head_bias:
            found["lm_head.bias"] = Parameter((config.vocab_size,), is_split=True)
        for i in range(config.num_layers):
            found |= {f"layers.{i}.{name}": shape for name, shape in cls.layer_parameters(config, i).items()}
        return found

    @classmethod
    def layer_parameters(cls, config: ModelConfig, layer_id: int) -> dict[str, Parameter]:
        """Return the tensors of one layer."""
        spec, hidden = config.layers[layer_id], config.hidden_size
        q, kv, wide = spec.q_size, spec.kv_size, spec.intermediate_size
        linears: dict[str, tuple[tuple[int, ...], int, bool]] = {
            "qkv": ((q, kv, kv), hidden, spec.qkv_bias),
            "output": ((hidden,), q, spec.output_bias),
        }
        if wide:
            rows = (wide, wide) if spec.has_gate else (wide,)
            linears["gate_up" if spec.has_gate else "up"] = rows, hidden, spec.mlp_bias
            linears["down"] = (hidden,), wide, spec.mlp_bias
        found: dict[str, Parameter] = {}
        for norm in _NORMS[spec.norms]:
            found |= _norm_parameters(config, norm, hidden)
        for name, (rows, columns, has_bias) in linears.items():
            together = spec.kv.head_dim if name == "qkv" else 1
            found[f"{name}.weight"] = Parameter(
                rows, columns, is_split=True, row_granularity=together, is_gated=name == "gate_up"
            )
            if has_bias:
                found[f"{name}.bias"] = Parameter(rows, is_split=True, row_granularity=together)
        if spec.has_sinks:
            found[_SINKS] = Parameter((spec.num_heads,), is_split=True, is_wide=True)
        if spec.qk_norm == "rows":
            found |= _norm_parameters(config, "q_norm", q) | _norm_parameters(config, "k_norm", kv)
        num_heads = {"q_norm": spec.num_heads, "k_norm": spec.kv.num_kv_heads}
        for name, num in num_heads.items():
            if spec.qk_norm in ("heads", "rotated_heads"):
                found |= _norm_parameters(config, name, spec.kv.head_dim, num_copies=num)
            if spec.qk_norm == "own_heads":
                found[f"{name}.weight"] = Parameter((num,), spec.kv.head_dim, is_split=True, is_wide=True)
        return found

    def __init__(self, config: ModelConfig, weights: Mapping[str, Any], placement: Placement) -> None:
        """Build the layers from weights named as in `parameters`."""
        super().__init__(config, weights, placement)
        head = "embedding.weight" if config.tie_word_embeddings else "lm_head.weight"
        scale = torch.tensor(config.embedding_scale, dtype=torch.float64)
        self._embedding_scale = float(scale.to(placement.dtype) if config.rounds_embedding_scale else scale)
        self._rows_of = (
            None if config.tie_word_embeddings else rows_reader(weights["embedding.weight"], placement.operators)
        )
        has_norm = config.has_embedding_norm
        self._embedding_norm = _norm(config, weights, "embedding_norm", placement.operators) if has_norm else identity
        self._positions = None if config.position_offset is None else weights["positions.weight"]
        # the largest matrix first, so that the memory for quantizing it is free again before the others are loaded
        head_bias = weights["lm_head.bias"] if config.head_bias else None
        lm_head = placement.operators.pack_linear(weights[head], head_bias)
        self._lm_head = placement.split.linear(lm_head, config.vocab_size)
        self._split = placement.split
        self._layers = [
            self.layer_class(config, self._weights_of_layer(weights, i), i, placement) for i in range(config.num_layers)
        ]
        self.syncs_expert_counts = any(layer.syncs_expert_counts for layer in self._layers)
        counts = (layer.expert_counts for layer in self._layers)
        self.expert_counts = tuple(one for one in counts if one is not None)
        self._norm = _norm(config, weights, "norm", placement.operators)
        self._rotaries = [
            Rotary(
                rope,
                head_dim,
                max_model_len=placement.max_model_len,
                dtype=placement.dtype,
                device=placement.device,
            )
            for rope, head_dim in config.ropes
        ]
        kinds = {kind: index for index, kind in enumerate(config.ropes)}
        self._rotary_of = [
            None if layer.rope is None else kinds[layer.rope, layer.kv.head_dim] for layer in config.layers
        ]

    def _weights_of_layer(self, weights: Mapping[str, Any], layer_id: int) -> dict[str, Any]:
        """Return a layer's weights, without those of other ranks' experts."""
        names = ((name, f"layers.{layer_id}.{name}") for name in self.layer_parameters(self.config, layer_id))
        return {name: weights[whole] for name, whole in names if whole in weights}

    @torch.inference_mode()
    def embed(self, input_ids: Tensor, positions: Tensor | None = None) -> Tensor:
        if self._rows_of is None:
            rows = self._lm_head.rows(input_ids)
        else:
            rows = self._split.rows(input_ids, self.config.vocab_size, self._rows_of)
        if self._embedding_scale != 1.0:
            rows = rows * self._embedding_scale
        rows = self._embedding_norm(rows)
        if self._positions is None or positions is None:
            return rows
        return rows + F.embedding(positions + (self.config.position_offset or 0), self._positions)

    @torch.inference_mode()
    def forward_layers(
        self,
        hidden: Tensor,
        layers: range,
        positions: Tensor,
        attention: AttentionMetadata,
        kv: KVTensors,
        features: Mapping[int, Tensor] | None = None,
    ) -> Tensor:
        rotations = [(rotary(positions), rotary.query_scales(positions)) for rotary in self._rotaries]
        for layer_id in layers:
            if features is not None and layer_id in features:
                features[layer_id].copy_(hidden[:, : self.config.hidden_size])  # layers may add in place
            which = self._rotary_of[layer_id]
            rotation, query_scales = (None, None) if which is None else rotations[which]
            hidden = self._layers[layer_id].forward(hidden, rotation, attention, kv, query_scales)
        return hidden

    def center_keys(self, means: Mapping[int, Tensor]) -> None:
        self.key_means = means
        for layer_id, mean in means.items():
            own = self._split.own(len(mean))
            self._layers[layer_id].center_keys(mean if self._split.size == 1 else mean[own.start : own.stop])

    @torch.inference_mode()
    def final_norm(self, hidden: Tensor) -> Tensor:
        return self._norm(hidden)

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits, divisor, cap = self._lm_head.in_float32(hidden), self.config.logits_divisor, self.config.logits_softcap
        if divisor != 1.0:
            logits = logits / divisor
        return logits if cap is None else soft_cap(logits, cap)


def rows_reader(table: Matrix, operators: Operators) -> Callable[[Tensor], Tensor]:
    """Return a function that looks up rows of a table [N, K], int64 [n] -> [n, K].

    A quantized table stays quantized if the operators keep it so.
    """
    if operators.keeps_quantized and not isinstance(table, Tensor):
        return operators.pack_linear(table, None).rows
    whole = table.all_rows() if isinstance(table, StreamedWeight) else table
    numbers = whole.dequantize() if isinstance(whole, QuantizedWeight) else whole
    return partial(_rows_of, numbers)


def _rows_of(table: Tensor, ids: Tensor) -> Tensor:
    return F.embedding(ids, table)

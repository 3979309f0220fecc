"""Llama (Touvron et al. 2023, arXiv:2302.13971), and what differs from it by what a LayerSpec says: Mistral, SmolLM3,
Granite, Qwen2, Qwen3 (Yang et al. 2025, arXiv:2505.09388), OLMo 2 (arXiv:2501.00656) and others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twostroke.config.layer_spec import LayerSpec
from twostroke.config.model import ModelConfig
from twostroke.kernels.dispatch import Linear
from twostroke.layers.attention import Attention, KVTensors
from twostroke.layers.attention_metadata import AttentionMetadata
from twostroke.layers.norm import RMSNorm
from twostroke.layers.rotary import Rotary, Rotation
from twostroke.model.decoder import DecoderModel, Parameter, Placement


class LlamaLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)); the feed-forward is gated (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Any], layer_id: int, placement: Placement) -> None:
        """Takes the layer's weights, named without their `layers.i.`."""
        operators, split, spec = placement.operators, placement.split, config.layers[layer_id]
        self._num_heads, self._num_kv_heads = split.share(spec.num_heads), split.share(spec.kv.num_kv_heads)
        self._head_dim, self._width = spec.kv.head_dim, spec.q_size
        self._residual_scale, self._norms = spec.residual_scale, spec.norms
        self._split = split
        self.attention_norm = RMSNorm(weights["attention_norm.weight"], config.rms_norm_eps, operators)
        self._qkv = operators.pack_linear(weights["qkv.weight"], weights.get("qkv.bias"))
        head_norm = self.head_norm(spec, weights, config.rms_norm_eps, placement)
        self._row_norms: tuple[RMSNorm, RMSNorm] | None = None
        if spec.qk_norm == "rows":
            q_norm, k_norm = weights["q_norm.weight"], weights["k_norm.weight"]
            self._row_norms = (
                RMSNorm(q_norm, config.rms_norm_eps, operators),
                RMSNorm(k_norm, config.rms_norm_eps, operators),
            )
        self._attention = Attention(layer_id, spec.softmax_scale, operators, head_norm)
        output = operators.pack_linear(weights["output.weight"], weights.get("output.bias"))
        self.output = split.linear(output, config.hidden_size)
        self.mlp_norm = RMSNorm(weights["mlp_norm.weight"], config.rms_norm_eps, operators)
        self.inner = self.pack_mlp(spec, weights, placement)
        down = operators.pack_linear(weights["down.weight"], weights.get("down.bias"))
        self.down = split.linear(down, config.hidden_size)

    def pack_mlp(self, spec: LayerSpec, weights: Mapping[str, Any], placement: Placement) -> Callable[[Tensor], Tensor]:
        """Return what the MLP computes before its down projection: [num_tokens, hidden_size] -> intermediate_size."""
        gated = placement.operators.pack_gated(weights["gate_up.weight"], weights.get("gate_up.bias"))
        return placement.split.gated(gated, spec.intermediate_size)

    def head_norm(
        self, spec: LayerSpec, weights: Mapping[str, Any], eps: float, placement: Placement
    ) -> RMSNorm | None:
        """Return the norm over each head of q and k, with each head's weight in its row, where the layer has one."""
        if spec.qk_norm != "heads":
            return None
        of_heads = [weights["q_norm.weight"]] * self._num_heads + [weights["k_norm.weight"]] * self._num_kv_heads
        return RMSNorm(torch.stack(of_heads), eps, placement.operators)

    def forward(self, x: Tensor, rotation: Rotation | None, attention: AttentionMetadata, kv: KVTensors) -> Tensor:
        """x: [num_tokens, hidden_size]; rotation: of q and k, where the layer has one."""
        if self._norms == "after":
            x = x + self.attention_norm(self.output(self.attend(x, rotation, attention, kv)))
            return x + self.mlp_norm(self.down(self.inner(x)))
        x = self._added(self.output, x, self.attend(self.attention_norm(x), rotation, attention, kv))
        return self._added(self.down, x, self.inner(self.mlp_norm(x)))

    def _added(self, linear: Linear, residual: Tensor, x: Tensor) -> Tensor:
        if self._residual_scale == 1.0:
            return linear.add_to(residual, x)
        return residual + linear(x) * self._residual_scale

    def attend(self, x: Tensor, rotation: Rotation | None, attention: AttentionMetadata, kv: KVTensors) -> Tensor:
        """Self-attention of x [num_tokens, hidden_size], before the output projection."""
        qkv = self._qkv(x).view(x.shape[0], self._num_heads + 2 * self._num_kv_heads, self._head_dim)
        if self._row_norms is not None:
            q, k, _ = qkv.split((self._num_heads, self._num_kv_heads, self._num_kv_heads), dim=1)
            for part, norm in zip((q, k), self._row_norms, strict=True):
                part.copy_(norm(part.flatten(1)).view_as(part))
        return self._split.gather(self._attention(qkv, rotation, attention, kv), self._width)


class Llama(DecoderModel):
    """Embedding, layers, norm, and a head that may be the embedding."""

    layer_class: type[LlamaLayer] = LlamaLayer

    @classmethod
    def parameters(cls, config: ModelConfig) -> dict[str, Parameter]:
        """See DecoderModel."""
        found = {
            "embedding.weight": Parameter((config.vocab_size,), config.hidden_size, is_split=True),
            "norm.weight": Parameter((config.hidden_size,)),
        }
        if not config.tie_word_embeddings:
            found["lm_head.weight"] = Parameter((config.vocab_size,), config.hidden_size, is_split=True)
        for i in range(config.num_layers):
            found |= {f"layers.{i}.{name}": shape for name, shape in cls.layer_parameters(config, i).items()}
        return found

    @classmethod
    def layer_parameters(cls, config: ModelConfig, layer_id: int) -> dict[str, Parameter]:
        """Tensors of one layer."""
        spec, hidden = config.layers[layer_id], config.hidden_size
        q, kv, wide = spec.q_size, spec.kv_size, spec.intermediate_size
        linears: dict[str, tuple[tuple[int, ...], int, bool]] = {
            "qkv": ((q, kv, kv), hidden, spec.qkv_bias),
            "output": ((hidden,), q, spec.output_bias),
            "gate_up": ((wide, wide), hidden, spec.mlp_bias),
            "down": ((hidden,), wide, spec.mlp_bias),
        }
        found = {f"{norm}.weight": Parameter((hidden,)) for norm in ("attention_norm", "mlp_norm")}
        for name, (rows, columns, has_bias) in linears.items():
            found[f"{name}.weight"] = Parameter(rows, columns, is_split=True, is_gated=name == "gate_up")
            if has_bias:
                found[f"{name}.bias"] = Parameter(rows, is_split=True)
        if spec.qk_norm == "rows":
            found |= {"q_norm.weight": Parameter((q,)), "k_norm.weight": Parameter((kv,))}
        if spec.qk_norm == "heads":
            num_heads = {"q_norm": spec.num_heads, "k_norm": spec.kv.num_kv_heads}
            for name, num in num_heads.items():
                found[f"{name}.weight"] = Parameter((spec.kv.head_dim,), num_copies=num)
        return found

    def __init__(self, config: ModelConfig, weights: Mapping[str, Any], placement: Placement) -> None:
        """Builds the layers from weights named as in `parameters`."""
        super().__init__(config, weights, placement)
        head = "embedding.weight" if config.tie_word_embeddings else "lm_head.weight"
        self._table = None if config.tie_word_embeddings else weights["embedding.weight"]
        # the largest matrix first: what quantizing it takes for a moment is given back before the others are there
        lm_head = placement.operators.pack_linear(weights[head], None)
        self._lm_head = placement.split.linear(lm_head, config.vocab_size)
        self._split = placement.split
        self._layers = [
            self.layer_class(
                config,
                {name: weights[f"layers.{i}.{name}"] for name in self.layer_parameters(config, i)},
                i,
                placement,
            )
            for i in range(config.num_layers)
        ]
        self._norm = RMSNorm(weights["norm.weight"], config.rms_norm_eps, placement.operators)
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

    @torch.inference_mode()
    def embed(self, input_ids: Tensor) -> Tensor:
        """See DecoderModel."""
        if self._table is None:
            rows = self._lm_head.rows(input_ids)
        else:
            rows = self._split.rows(input_ids, self.config.vocab_size, partial(_rows_of, self._table))
        scale = self.config.embedding_scale
        return rows if scale == 1.0 else rows * scale

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
        """See DecoderModel."""
        rotations = [rotary(positions) for rotary in self._rotaries]
        for layer_id in layers:
            if features is not None and layer_id in features:
                features[layer_id].copy_(hidden)  # what comes may add to it in place
            which = self._rotary_of[layer_id]
            rotation = None if which is None else rotations[which]
            hidden = self._layers[layer_id].forward(hidden, rotation, attention, kv)
        return hidden

    @torch.inference_mode()
    def final_norm(self, hidden: Tensor) -> Tensor:
        """See DecoderModel."""
        return self._norm(hidden)

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See DecoderModel."""
        logits, divisor = self._lm_head(hidden).float(), self.config.logits_divisor
        return logits if divisor == 1.0 else logits / divisor


def _rows_of(table: Tensor, ids: Tensor) -> Tensor:
    return F.embedding(ids, table)

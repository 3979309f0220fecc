"""Llama (Touvron et al. 2023, arXiv:2302.13971), and what differs from it by numbers only: Mistral and Qwen2."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twostroke.config.model import ModelConfig
from twostroke.layers.attention import Attention, KVTensors
from twostroke.layers.attention_metadata import AttentionMetadata
from twostroke.layers.norm import RMSNorm
from twostroke.layers.rotary import Rotary
from twostroke.model.decoder import DecoderModel, Parameter, Placement


class LlamaLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)); the feed-forward is gated (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Any], layer_id: int, placement: Placement) -> None:
        """Takes the layer's weights, named without their `layers.i.`."""
        operators = placement.operators
        split = placement.split
        self._num_heads, self._num_kv_heads = split.share(config.num_heads), split.share(config.num_kv_heads)
        self._head_dim, self._width = config.head_dim, config.num_heads * config.head_dim
        self._split = split
        self.attention_norm = RMSNorm(weights["attention_norm.weight"], config.rms_norm_eps, operators)
        self._qkv = operators.pack_linear(weights["qkv.weight"], weights.get("qkv.bias"))
        self._attention = Attention(layer_id, config.head_dim, operators, self.head_norm(config, weights, placement))
        output = operators.pack_linear(weights["output.weight"], weights.get("output.bias"))
        self.output = split.linear(output, config.hidden_size)
        self.mlp_norm = RMSNorm(weights["mlp_norm.weight"], config.rms_norm_eps, operators)
        gated = operators.pack_gated(weights["gate_up.weight"], weights.get("gate_up.bias"))
        self.gated = split.gated(gated, config.intermediate_size)
        down = operators.pack_linear(weights["down.weight"], weights.get("down.bias"))
        self.down = split.linear(down, config.hidden_size)

    def head_norm(self, config: ModelConfig, weights: Mapping[str, Any], placement: Placement) -> RMSNorm | None:
        """What an architecture norms each head of q and k by, [num_heads + num_kv_heads, head_dim], if it does."""
        del config, weights, placement
        return None

    def forward(
        self, x: Tensor, rotation: tuple[Tensor, Tensor], attention: AttentionMetadata, kv: KVTensors
    ) -> Tensor:
        """x: [num_tokens, hidden_size]."""
        x = self.output.add_to(x, self.attend(self.attention_norm(x), rotation, attention, kv))
        return self.down.add_to(x, self.gated(self.mlp_norm(x)))

    def attend(self, x: Tensor, rotation: tuple[Tensor, Tensor], attention: AttentionMetadata, kv: KVTensors) -> Tensor:
        """Self-attention of x [num_tokens, hidden_size], before the output projection."""
        qkv = self._qkv(x).view(x.shape[0], self._num_heads + 2 * self._num_kv_heads, self._head_dim)
        self.norm_heads_(qkv[:, : self._num_heads + self._num_kv_heads])
        return self._split.gather(self._attention(qkv, rotation, attention, kv), self._width)

    def norm_heads_(self, qk: Tensor) -> None:
        """What else is done to q and k [num_tokens, num_heads + num_kv_heads, head_dim] before rotation."""


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
            found |= {f"layers.{i}.{name}": shape for name, shape in cls.layer_parameters(config).items()}
        return found

    @classmethod
    def layer_parameters(cls, config: ModelConfig) -> dict[str, Parameter]:
        """Tensors of one layer."""
        hidden, q, kv = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        linears: dict[str, tuple[tuple[int, ...], int, bool]] = {
            "qkv": ((q, kv, kv), hidden, config.attention_bias),
            "output": ((hidden,), q, config.output_bias),
            "gate_up": ((config.intermediate_size, config.intermediate_size), hidden, config.mlp_bias),
            "down": ((hidden,), config.intermediate_size, config.mlp_bias),
        }
        found = {f"{norm}.weight": Parameter((hidden,)) for norm in ("attention_norm", "mlp_norm")}
        for name, (rows, columns, has_bias) in linears.items():
            found[f"{name}.weight"] = Parameter(rows, columns, is_split=True, is_gated=name == "gate_up")
            if has_bias:
                found[f"{name}.bias"] = Parameter(rows, is_split=True)
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
                {name: weights[f"layers.{i}.{name}"] for name in self.layer_parameters(config)},
                i,
                placement,
            )
            for i in range(config.num_layers)
        ]
        self._norm = RMSNorm(weights["norm.weight"], config.rms_norm_eps, placement.operators)
        self._rotary = Rotary(
            config.rope,
            config.head_dim,
            max_model_len=placement.max_model_len,
            dtype=placement.dtype,
            device=placement.device,
        )

    @torch.inference_mode()
    def embed(self, input_ids: Tensor) -> Tensor:
        """See DecoderModel."""
        if self._table is None:
            return self._lm_head.rows(input_ids)
        return self._split.rows(input_ids, self.config.vocab_size, partial(_rows_of, self._table))

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
        rotation = self._rotary(positions)
        for layer_id in layers:
            if features is not None and layer_id in features:
                features[layer_id].copy_(hidden)  # what comes may add to it in place
            hidden = self._layers[layer_id].forward(hidden, rotation, attention, kv)
        return hidden

    @torch.inference_mode()
    def final_norm(self, hidden: Tensor) -> Tensor:
        """See DecoderModel."""
        return self._norm(hidden)

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See DecoderModel."""
        return self._lm_head(hidden).float()


def _rows_of(table: Tensor, ids: Tensor) -> Tensor:
    return F.embedding(ids, table)

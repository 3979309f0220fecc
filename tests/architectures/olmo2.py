"""OLMo 2 (arXiv:2501.00656), added from outside the package: Llama with its norms behind attention and MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from twostroke.config.model import ArchitectureTraits, ModelConfig
from twostroke.layers.attention import KVTensors
from twostroke.layers.attention_metadata import AttentionMetadata
from twostroke.layers.norm import RMSNorm
from twostroke.layers.rotary import Rotation
from twostroke.model.decoder import Parameter, Placement
from twostroke.model.llama import Llama, LlamaLayer
from twostroke.model.registry import Architecture, register
from twostroke.model.weight_map import LLAMA


class Olmo2Layer(LlamaLayer):
    """x + norm(attention(x)), then x + norm(mlp(x)); q and k are normed over all their heads at once."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Any], layer_id: int, placement: Placement) -> None:
        """Llama's, and the two norms."""
        super().__init__(config, weights, layer_id, placement)
        self.num_heads = config.layers[layer_id].num_heads
        self.q_norm = RMSNorm(weights["q_norm.weight"], config.rms_norm_eps, placement.operators)
        self.k_norm = RMSNorm(weights["k_norm.weight"], config.rms_norm_eps, placement.operators)

    def forward(self, x: Tensor, rotation: Rotation | None, attention: AttentionMetadata, kv: KVTensors) -> Tensor:
        """x: [num_tokens, hidden_size]."""
        x = x + self.attention_norm(self.output(self.attend(x, rotation, attention, kv)))
        return x + self.mlp_norm(self.down(self.gated(x)))

    def norm_heads_(self, qk: Tensor) -> None:
        """qk: [num_tokens, num_heads + num_kv_heads, head_dim]."""
        q, k = qk[:, : self.num_heads], qk[:, self.num_heads :]
        q.copy_(self.q_norm(q.flatten(1)).view_as(q))
        k.copy_(self.k_norm(k.flatten(1)).view_as(k))


class Olmo2(Llama):
    """Llama with OLMo 2's layers."""

    layer_class = Olmo2Layer

    @classmethod
    def layer_parameters(cls, config: ModelConfig, layer_id: int) -> dict[str, Parameter]:
        """Llama's, and the two norms."""
        spec = config.layers[layer_id]
        return super().layer_parameters(config, layer_id) | {
            "q_norm.weight": Parameter((spec.q_size,)),
            "k_norm.weight": Parameter((spec.kv_size,)),
        }


NAMES = {
    **LLAMA,
    "layers.{i}.attention_norm": "model.layers.{i}.post_attention_layernorm",
    "layers.{i}.mlp_norm": "model.layers.{i}.post_feedforward_layernorm",
    "layers.{i}.q_norm": "model.layers.{i}.self_attn.q_norm",
    "layers.{i}.k_norm": "model.layers.{i}.self_attn.k_norm",
}


def add() -> None:
    """Makes OLMo 2 checkpoints loadable in this process."""
    register(
        "Olmo2ForCausalLM",
        Architecture("architectures.olmo2:Olmo2", NAMES),
        ArchitectureTraits(reads_attention_bias=True),
    )

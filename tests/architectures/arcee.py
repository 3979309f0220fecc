"""Arcee (AFM-4.5B), added from outside the package: Llama with a plain MLP and ReLU² (arXiv:2109.08668)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from twostroke.config.architectures import ArchitectureTraits
from twostroke.config.layer_spec import LayerSpec
from twostroke.config.model import ModelConfig
from twostroke.model.decoder import Parameter, Placement
from twostroke.model.llama import Llama, LlamaLayer
from twostroke.model.registry import Architecture, register
from twostroke.model.weight_map import LLAMA


class ArceeLayer(LlamaLayer):
    """Llama's attention, then x + down(relu(up(norm(x)))²)."""

    def pack_mlp(self, spec: LayerSpec, weights: Mapping[str, Any], placement: Placement) -> Callable[[Tensor], Tensor]:
        """See LlamaLayer."""
        up = placement.operators.pack_linear(weights["up.weight"], weights.get("up.bias"))
        return lambda x: up(x).relu_().square_()


class Arcee(Llama):
    """Llama with Arcee's layers."""

    layer_class = ArceeLayer

    @classmethod
    def layer_parameters(cls, config: ModelConfig, layer_id: int) -> dict[str, Parameter]:
        """Llama's, with one matrix in place of gate and up."""
        spec = config.layers[layer_id]
        found = super().layer_parameters(config, layer_id)
        found["up.weight"] = Parameter((spec.intermediate_size,), config.hidden_size)
        if spec.mlp_bias:
            found["up.bias"] = Parameter((spec.intermediate_size,))
        return {name: shape for name, shape in found.items() if not name.startswith("gate_up")}


NAMES = {**LLAMA, "layers.{i}.up": "model.layers.{i}.mlp.up_proj"}


def add() -> None:
    """Makes Arcee checkpoints loadable in this process."""
    register(
        "ArceeForCausalLM",
        Architecture("architectures.arcee:Arcee", NAMES),
        ArchitectureTraits(reads_attention_bias=True, reads_mlp_bias=True, activation_names=("relu2",)),
    )

"""BitNet b1.58, added from outside the package: Llama with ReLU² gates and two more norms (arXiv:2504.12285)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from twostroke.config.architecture_traits import ArchitectureTraits
from twostroke.config.layer_spec import LayerSpec
from twostroke.config.model import ModelConfig
from twostroke.layers.elementwise import RMSNorm
from twostroke.model.decoder import Parameter, Placement
from twostroke.model.llama import Llama, LlamaLayer
from twostroke.model.registry import Architecture, register
from twostroke.model.weight_map import LLAMA


class BitNetLayer(LlamaLayer):
    """x + output(norm(attention(norm(x)))), then x + down(norm(relu(gate(norm(x)))² * up(norm(x))))."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Any], layer_id: int, placement: Placement) -> None:
        names = ("output_in_norm", "down_in_norm")
        norms = (RMSNorm(weights[f"{name}.weight"], config.norm_eps, placement.operators) for name in names)
        self._output_in_norm, self._down_in_norm = norms
        super().__init__(config, weights, layer_id, placement)

    def attend(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._output_in_norm(super().attend(*args, **kwargs))

    def pack_mlp(self, spec: LayerSpec, weights: Mapping[str, Any], placement: Placement) -> Callable[[Tensor], Tensor]:
        gate_up = placement.operators.pack_linear(weights["gate_up.weight"], None)

        def inner(x: Tensor) -> Tensor:
            gate, up = gate_up(x).chunk(2, dim=-1)
            return self._down_in_norm(gate.relu().square_().mul_(up))

        return inner


class BitNet(Llama):
    """Llama with BitNet's layers."""

    layer_class = BitNetLayer

    @classmethod
    def layer_parameters(cls, config: ModelConfig, layer_id: int) -> dict[str, Parameter]:
        """Return Llama's parameters and two norms."""
        sizes = {"output_in_norm": config.hidden_size, "down_in_norm": config.layers[layer_id].intermediate_size}
        norms = {f"{name}.weight": Parameter((size,)) for name, size in sizes.items()}
        return super().layer_parameters(config, layer_id) | norms


NAMES = {
    **LLAMA,
    "layers.{i}.output_in_norm": "model.layers.{i}.self_attn.attn_sub_norm",
    "layers.{i}.down_in_norm": "model.layers.{i}.mlp.ffn_sub_norm",
}


def add() -> None:
    """Make BitNet checkpoints with float weights loadable in this process."""
    register(
        "BitNetForCausalLM",
        Architecture("architectures.bitnet:BitNet", NAMES),
        ArchitectureTraits(
            reads_attention_bias=True,
            activations={"relu2": "relu2"},
            defaults={"num_key_value_heads": 5, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0},
        ),
    )

"""Apertus (arXiv:2509.14233): Llama with norms of q and k, and an MLP without a gate and with a learned activation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from twostroke.config.layer_spec import LayerSpec
from twostroke.config.model import ModelConfig
from twostroke.model.decoder import Parameter, Placement
from twostroke.model.llama import Llama, LlamaLayer

_LINEAR = 0.5
"""Factor of the linear term of every xIELU."""
_ALPHAS = ("activation.alpha_p", "activation.alpha_n")


class ApertusLayer(LlamaLayer):
    """Llama's attention, then x + down(xielu(up(norm(x)))) (Huang and Schlag 2024, arXiv:2411.13010)."""

    def pack_mlp(self, spec: LayerSpec, weights: Mapping[str, Any], placement: Placement) -> Callable[[Tensor], Tensor]:
        up = placement.operators.pack_linear(weights["up.weight"], None)
        positive, negative = (F.softplus(weights[name].float()) for name in _ALPHAS)
        negative = negative + _LINEAR

        def inner(x: Tensor) -> Tensor:
            products = up(x)
            wide = products.float()
            below = wide.clamp(max=0.0)
            curved = wide.relu().square_().mul_(positive).add_(below.expm1().sub_(below).mul_(negative))
            return curved.add_(wide, alpha=_LINEAR).to(products.dtype)

        return placement.split.gated(inner, spec.intermediate_size)


class Apertus(Llama):
    """Llama with Apertus's layers."""

    layer_class = ApertusLayer

    @classmethod
    def layer_parameters(cls, config: ModelConfig, layer_id: int) -> dict[str, Parameter]:
        """Return Llama's parameters and the two numbers of the activation."""
        return super().layer_parameters(config, layer_id) | {name: Parameter((1,), is_wide=True) for name in _ALPHAS}

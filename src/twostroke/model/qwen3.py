"""Qwen3 (Yang et al. 2025, arXiv:2505.09388): Llama with a norm over each head of q and k."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from twostroke.config.model import ModelConfig
from twostroke.layers.norm import RMSNorm
from twostroke.model.decoder import Parameter, Placement
from twostroke.model.llama import Llama, LlamaLayer


class Qwen3Layer(LlamaLayer):
    """Norms q and k before they are rotated."""

    def head_norm(self, config: ModelConfig, weights: Mapping[str, Any], placement: Placement) -> RMSNorm | None:
        """One norm for all heads of q and k, with each head's weight in its row."""
        split = placement.split
        num_heads, num_kv_heads = split.share(config.num_heads), split.share(config.num_kv_heads)
        of_heads = [weights["q_norm.weight"]] * num_heads + [weights["k_norm.weight"]] * num_kv_heads
        return RMSNorm(torch.stack(of_heads), config.rms_norm_eps, placement.operators)


class Qwen3(Llama):
    """Llama with Qwen3's layers."""

    layer_class = Qwen3Layer

    @classmethod
    def layer_parameters(cls, config: ModelConfig) -> dict[str, Parameter]:
        """Llama's, and the two norms."""
        num_heads = {"q_norm": config.num_heads, "k_norm": config.num_kv_heads}
        norms = {f"{name}.weight": Parameter((config.head_dim,), num_copies=num) for name, num in num_heads.items()}
        return super().layer_parameters(config) | norms

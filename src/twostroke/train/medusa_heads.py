"""Medusa's heads (Cai et al. 2024, arXiv:2401.10774) in plain torch, and the folder that holds them.

H is the hidden size of the backbone, V its vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "medusa_lm_head.safetensors"


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """Contents of a heads folder's config.json, with the published names."""

    hidden_size: int
    vocab_size: int
    base_model_name_or_path: str
    medusa_num_heads: int = 4
    medusa_num_layers: int = 1


class TrainableHeads(nn.Module):
    """Medusa heads. Head i turns the final-normed state at position p into a state that predicts the token at p + 2 +
    i.

    A head is some blocks of x + silu(linear(x)) in front of the backbone's own output head.  The last block starts at
    zero, and those before it near zero: a head begins as the backbone's own prediction of p + 1.
    """

    _FIRST_SPREAD = 0.02
    """Standard deviation of the weights of all blocks but the last: at zero they would all learn the same."""

    def __init__(self, num_heads: int, hidden_size: int, num_layers: int = 1) -> None:
        super().__init__()
        self.num_heads = num_heads
        self._blocks = [[nn.Linear(hidden_size, hidden_size) for _ in range(num_layers)] for _ in range(num_heads)]
        self.linears = nn.ModuleList(linear for blocks in self._blocks for linear in blocks)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        rng = torch.Generator().manual_seed(0)
        for linear in (linear for blocks in self._blocks for linear in blocks[:-1]):
            nn.init.normal_(linear.weight, std=self._FIRST_SPREAD, generator=rng)

    def forward(self, x: Tensor, head: int) -> Tensor:
        """Return [..., H] for [..., H], to be multiplied with the backbone's output head."""
        for linear in self._blocks[head]:
            x = x + F.silu(F.linear(x, linear.weight.to(x.dtype), linear.bias.to(x.dtype)))
        return x

    def published(self) -> dict[str, Tensor]:
        """Return tensors by their published names, without output matrices: all heads use the backbone's."""
        found: dict[str, Tensor] = {}
        for i, blocks in enumerate(self._blocks):
            for j, linear in enumerate(blocks):
                found[f"{i}.{j}.linear.weight"] = linear.weight.detach()
                found[f"{i}.{j}.linear.bias"] = linear.bias.detach()
        return found

    def load_published(self, tensors: Mapping[str, Tensor]) -> None:
        """Load values by the names of `published`."""
        with torch.no_grad():
            for name, own in self.published().items():
                own.copy_(tensors[name])


def save_heads(heads: TrainableHeads, config: MedusaConfig, folder: Path) -> None:
    """Write both files, the weights in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.to("cpu", torch.bfloat16).contiguous() for name, value in heads.published().items()}
    save_file(weights, folder / WEIGHTS_NAME, metadata={"format": "pt"})
    values: dict[str, Any] = asdict(config)
    (folder / CONFIG_NAME).write_text(json.dumps(values, indent=2) + "\n")


def soft_cross_entropy(logits: Tensor, teacher: Tensor) -> Tensor:
    """Return the mean cross-entropy of [..., V] to the softmax of the teacher's logits [..., V], in nats."""
    return -(teacher.float().softmax(-1) * logits.float().log_softmax(-1)).sum(-1).mean()


def medusa_losses(heads: TrainableHeads, output: Tensor, states: Tensor, teacher: Tensor) -> list[Tensor]:
    """Return the losses of head i at position p against the backbone at p + 1 + i: both predict the token at p + 2 + i.

    Args:
        heads: that are trained.
        output: the backbone's output head [V, H].
        states: final-normed [..., T, H].
        teacher: the backbone's logits [..., T, V] at the same positions.

    Returns:
        A loss for each head, over the first T - num_heads positions.
    """
    length = states.shape[-2] - heads.num_heads
    return [
        soft_cross_entropy(heads(states[..., :length, :], i) @ output.mT, teacher[..., 1 + i : 1 + i + length, :])
        for i in range(heads.num_heads)
    ]

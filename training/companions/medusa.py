"""Medusa heads for the embedded model."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from training.companions.target import Target, TargetStates
from twostroke.train.medusa_heads import WEIGHTS_NAME, MedusaConfig, TrainableHeads, medusa_losses, save_heads


class Medusa(nn.Module):
    """Four heads; a later one weighs less, because its drafts only count if all before them are accepted."""

    name = "medusa"
    weights: tuple[float, ...] = (1.0, 0.8, 0.64, 0.512)
    num_layers = 1
    output: Tensor

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.vocab_size, self.hidden_size = target.head.shape
        self.heads = TrainableHeads(len(self.weights), self.hidden_size, self.num_layers)
        self.register_buffer("output", target.head.clone(), persistent=False)

    @classmethod
    def load(cls, folder: Path, target: Target) -> Medusa:
        """Return the drafter that :meth:`export` wrote."""
        medusa = cls(target)
        medusa.heads.load_published(load_file(folder / WEIGHTS_NAME))
        return medusa

    def losses(self, seen: TargetStates, following: Tensor) -> Tensor:
        """Return the losses [heads]: head i at p against the target's softmax at p + 1 + i, both for the token at p + 2
        + i."""
        return torch.stack(medusa_losses(self.heads, self.output, seen.normed, seen.logits))

    def export(self, folder: Path) -> None:
        """Write the published layout."""
        config = MedusaConfig(self.hidden_size, self.vocab_size, "embedded", len(self.weights), self.num_layers)
        save_heads(self.heads, config, folder)

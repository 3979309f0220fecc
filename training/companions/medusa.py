"""Medusa's heads for the embedded model."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from training.companions.target import Seen, Target
from twostroke.train.medusa_heads import WEIGHTS_NAME, MedusaConfig, TrainableHeads, medusa_losses, save_heads


class Medusa(nn.Module):
    """Four heads; a later one counts less, because its drafts count only where all before it stood."""

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
        """The inverse of :meth:`export`."""
        medusa = cls(target)
        medusa.heads.load_published(load_file(folder / WEIGHTS_NAME))
        return medusa

    def losses(self, seen: Seen, following: Tensor) -> Tensor:
        """[heads]: cross-entropy of head i at p to the target's softmax at p + 1 + i, which is of token p + 2 + i."""
        return torch.stack(medusa_losses(self.heads, self.output, seen.normed, seen.logits))

    def export(self, folder: Path) -> None:
        """The published layout."""
        config = MedusaConfig(self.hidden_size, self.vocab_size, "embedded", len(self.weights), self.num_layers)
        save_heads(self.heads, config, folder)

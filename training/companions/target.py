"""The frozen embedded model, and the states that its drafters learn from.

B is the batch, T the sequence, H the hidden size, V the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from training.export import load_exported
from training.model import LlamaModel


@dataclass(frozen=True)
class TargetStates:
    """The target's states over ``tokens`` [B, T], from which a companion learns."""

    tokens: Tensor
    features: Tensor
    """Inputs of three layers, concatenated as EAGLE-3 reads them: [B, T, 3H]."""
    normed: Tensor
    """States after the final norm, the output head's input: [B, T, H]."""
    logits: Tensor
    """Logits of the next token at each position: [B, T, V]."""


def feature_layers(depth: int) -> tuple[int, int, int]:
    """Return the layers whose inputs EAGLE-3 reads: an early, a middle and a late one."""
    return 2, depth // 2, depth - 3


class Target:
    """A model that is never trained; its weights are stored in its compute dtype."""

    def __init__(self, model: LlamaModel, dtype: torch.dtype, compiled: bool = False) -> None:
        layers = feature_layers(model.config.num_hidden_layers)
        self.exits = model.config.exit_layers
        # The states in front of layer n are those after n layers, which is what an exit is.
        model.config = replace(model.config, exit_layers=tuple(sorted({*layers, *self.exits})))
        self.model = model.to(dtype).requires_grad_(False)
        self.config, self.layers, self.dtype = model.config, layers, dtype
        self._run = torch.compile(self._states, dynamic=False) if compiled else self._states

    def _states(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        states = self.model.hidden_states(tokens, self.dtype)
        normed = self.model.model.norm(states[self.config.num_hidden_layers])
        return torch.cat([states[n] for n in self.layers], dim=-1), normed, F.linear(normed, self.head)

    @property
    def head(self) -> Tensor:
        """Output head [V, H], which is the embedding."""
        return self.model.model.embed_tokens.weight

    @torch.no_grad()
    def see(self, tokens: Tensor) -> TargetStates:
        """Run the target over tokens [B, T]."""
        return TargetStates(tokens, *self._run(tokens))


def load_target(folder: Path, dtype: torch.dtype, compiled: bool = False) -> Target:
    """Return the target of an exported folder."""
    return Target(load_exported(folder), dtype, compiled)

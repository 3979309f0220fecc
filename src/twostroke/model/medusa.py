"""Medusa heads (Cai et al. 2024, arXiv:2401.10774): draft tokens from one hidden state of the target."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from twostroke.config.model import ModelConfig
from twostroke.errors import CorruptCheckpoint
from twostroke.kernels.interface import PackedSizes
from twostroke.model.decoder import DecoderModel, Placement
from twostroke.model.draft_folder import DraftFolder


@dataclass(frozen=True, slots=True)
class MedusaShape:
    """Sizes of the heads, from their folder."""

    num_heads: int
    num_layers: int
    """Residual blocks per head."""


class MedusaHeads:
    """Medusa heads: head i drafts the token i + 2 positions ahead from the target's final hidden state.

    ```
    x = hidden            each block: x + silu(W x + b); then the output head, its own or the target's
    ```

    Published folders hold `medusa_lm_head.pt` or `.safetensors` with `{i}.{block}.linear.weight` and `.bias`, and a
    head's own output matrix as `{i}.{num_layers}.weight`.
    """

    def __init__(self, folder: DraftFolder, target: DecoderModel, placement: Placement) -> None:
        """Read the heads. If none has its own output matrix, the target's is multiplied once for all."""
        self.shape = medusa_shape(folder)
        self._target = target
        operators = placement.operators

        def read(name: str) -> Tensor:
            return folder.tensor(name).to(placement.dtype).to(placement.device)

        heads, blocks = range(self.shape.num_heads), range(self.shape.num_layers)
        self._blocks = [
            [operators.pack_linear(read(f"{i}.{j}.linear.weight"), read(f"{i}.{j}.linear.bias")) for j in blocks]
            for i in heads
        ]
        last = f"{self.shape.num_layers}.weight"
        self._heads = [
            operators.pack_linear(read(f"{i}.{last}"), None) if f"{i}.{last}" in folder.shapes else None for i in heads
        ]

    @torch.inference_mode()
    def logits(self, hidden: Tensor, num_heads: int) -> Tensor:
        """Return float32 logits [num_heads, num_rows, vocab_size] of the first heads.

        hidden: [num_rows, hidden_size], the target's final hidden states.
        """
        states: list[Tensor] = []
        for blocks in self._blocks[:num_heads]:
            x = hidden
            for linear in blocks:
                x = x + F.silu(linear(x))
            states.append(x)
        if all(head is None for head in self._heads[:num_heads]):
            return self._target.compute_logits(torch.cat(states)).view(num_heads, len(hidden), -1)
        found = [
            self._target.compute_logits(x) if head is None else head(x).float()
            for x, head in zip(states, self._heads, strict=False)
        ]
        return torch.stack(found)


def medusa_bytes(folder: DraftFolder, dtype: torch.dtype, sizes: PackedSizes) -> int:
    """Return the bytes of the loaded heads, from the shapes in their folder.

    Args:
        folder: folder of the heads.
        dtype: type of floats.
        sizes: packed sizes of a backend.
    """
    total = 0
    for name, shape in folder.shapes.items():
        num_rows = shape[0]
        total += (
            sizes.bias(num_rows, dtype, gated=False)
            if name.endswith(".bias")
            else sizes.weight((num_rows, shape[1]), None, dtype, gated=False)
        )
    return total


def medusa_shape(folder: DraftFolder) -> MedusaShape:
    """Return the sizes of the heads in config.json."""
    return MedusaShape(folder.count("medusa_num_heads"), folder.count("medusa_num_layers", 1))


def check_medusa(folder: DraftFolder, target: ModelConfig, name: str) -> None:
    """Raise if heads were made for another model than `target`, or lack a part.

    Raises:
        CorruptCheckpoint: a number or a tensor is missing or has another size.
    """
    # the clearest error for a folder of another kind, such as a whole model
    folder.check_shape("0.0.linear.weight", (None, None))
    shape, hidden = medusa_shape(folder), target.hidden_size
    why = f": {name} has hidden states of {hidden} numbers and a vocabulary of {target.vocab_size}"
    folder.check_counts({"hidden_size": hidden, "vocab_size": target.vocab_size}, why)
    for i in range(shape.num_heads):
        for j in range(shape.num_layers):
            folder.check_shape(f"{i}.{j}.linear.weight", (hidden, hidden), why)
            folder.check_shape(f"{i}.{j}.linear.bias", (hidden,), why)
        if f"{i}.{shape.num_layers}.linear.weight" in folder.shapes:
            told = f"config.json has {shape.num_layers} medusa_num_layers"
            raise CorruptCheckpoint(f"{folder.path}: {told}, but head {i} has more blocks.")
        if f"{i}.{shape.num_layers}.weight" in folder.shapes:
            folder.check_shape(f"{i}.{shape.num_layers}.weight", (target.vocab_size, hidden), why)

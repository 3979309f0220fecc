"""FloatWeights: the weight source for checkpoints that are not quantized."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from twostroke.errors import UnsupportedModel
from twostroke.model.checkpoint import Checkpoint
from twostroke.model.weight_source import ALL_ROWS, StoredWeight

FLOAT_TYPES = ("F32", "F16", "BF16")


class FloatWeights:
    """A safetensors checkpoint that is not quantized. Implements WeightSource."""

    quantization = None

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Check the tensors' types.

        Raises:
            UnsupportedModel: a tensor is not of a float type.
        """
        self._checkpoint = checkpoint
        check_floats(checkpoint, checkpoint.types, "Quantized weights need quantization_config in config.json.")
        self.weights: Mapping[str, StoredWeight] = stored_floats(checkpoint, checkpoint.shapes)

    @property
    def path(self) -> Path:
        return self._checkpoint.path

    def read(self, name: str, dtype: torch.dtype, rows: slice = ALL_ROWS) -> Tensor:
        del dtype
        return self._checkpoint.read(name, rows)


def stored_floats(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, StoredWeight]:
    """Return the named tensors, with their types, as weights that are not quantized."""
    return {name: StoredWeight(shape, float_type=checkpoint.types[name]) for name, shape in shapes.items()}


def check_floats(checkpoint: Checkpoint, names: Mapping[str, object], remedy: str) -> None:
    """Raise if one of the named tensors is not of a float type.

    Raises:
        UnsupportedModel: such a tensor; the error names it.
    """
    for name in names:
        if checkpoint.types[name] not in FLOAT_TYPES:
            known = ", ".join(FLOAT_TYPES)
            raise UnsupportedModel(
                f"{checkpoint.path}: {name} has type {checkpoint.types[name]}; known: {known}. {remedy}"
            )

"""Transposed: matrices of layers as [outputs, inputs], of a checkpoint that stores them the other way round (GPT-2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from twostroke.model.weight_source import ALL_ROWS, StoredWeight, WeightSource

_LAYERS = "transformer.h."


class Transposed:
    """A WeightSource of floats."""

    quantization = None

    def __init__(self, source: WeightSource) -> None:
        """Takes the weights as they are stored."""
        self._source = source
        self.weights: Mapping[str, StoredWeight] = {
            name: replace(weight, shape=weight.shape[::-1]) if _is_matrix(name, weight) else weight
            for name, weight in source.weights.items()
        }

    @property
    def path(self) -> Path:
        """See WeightSource."""
        return self._source.path

    def read(self, name: str, dtype: torch.dtype, rows: slice = ALL_ROWS) -> Tensor:
        """See WeightSource."""
        is_matrix = _is_matrix(name, self.weights[name])
        found = self._source.read(name, dtype, ALL_ROWS if is_matrix else rows)
        assert isinstance(found, Tensor), name
        return found.t()[rows] if is_matrix else found


def _is_matrix(name: str, weight: StoredWeight) -> bool:
    return name.startswith(_LAYERS) and len(weight.shape) == 2

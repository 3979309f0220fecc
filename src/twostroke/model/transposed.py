"""Transposed: matrices of layers as [outputs, inputs], from a checkpoint that stores [inputs, outputs] (GPT-2)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from twostroke.model.weight_source import ALL_ROWS, StoredWeight, WeightSource, WrappedSource

_LAYERS = "transformer.h."


class Transposed(WrappedSource):
    """A WeightSource that transposes float matrices of layers."""

    def __init__(self, source: WeightSource) -> None:
        """Transpose the shapes of matrices of layers."""
        weights = {
            name: replace(weight, shape=weight.shape[::-1]) if _is_matrix(name, weight) else weight
            for name, weight in source.weights.items()
        }
        super().__init__(source, weights)

    def read(self, name: str, dtype: torch.dtype, rows: slice = ALL_ROWS) -> Tensor:
        is_matrix = _is_matrix(name, self.weights[name])
        found = self._source.read(name, dtype, ALL_ROWS if is_matrix else rows)
        assert isinstance(found, Tensor), name
        return found.t()[rows] if is_matrix else found


def _is_matrix(name: str, weight: StoredWeight) -> bool:
    return name.startswith(_LAYERS) and len(weight.shape) == 2

"""StackedNorms: norms of heads as one tensor [num_heads, head_dim], from a tensor per head (StableLM 2).

model.layers.0.self_attn.q_layernorm.norms.0.weight  ┐
model.layers.0.self_attn.q_layernorm.norms.1.weight  ┴─►  model.layers.0.self_attn.q_layernorm.weight
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from twostroke.errors import CorruptCheckpoint
from twostroke.kernels.quantized_weight import QuantizedWeight
from twostroke.model.weight_source import ALL_ROWS, StoredWeight, WeightSource, WrappedSource

_OF_A_HEAD = re.compile(r"(.+_layernorm)\.norms\.(\d+)\.weight")


class StackedNorms(WrappedSource):
    """A WeightSource that presents the norms of a layer's heads as one weight."""

    def __init__(self, source: WeightSource) -> None:
        """Group the norms of each layer.

        Raises:
            CorruptCheckpoint: a head's norm is missing, or has another shape than the first's.
        """
        self._heads: dict[str, dict[int, str]] = {}
        found: dict[str, StoredWeight] = {}
        for name, weight in source.weights.items():
            head = _OF_A_HEAD.fullmatch(name)
            if head is None:
                found[name] = weight
            else:
                self._heads.setdefault(f"{head[1]}.weight", {})[int(head[2])] = name
        for name, heads in self._heads.items():
            shapes = {source.weights[part].shape for part in heads.values()}
            if len(shapes) > 1 or sorted(heads) != list(range(len(heads))):
                raise CorruptCheckpoint(f"{source.path}: {name} is incomplete: heads {sorted(heads)}, shapes {shapes}.")
            found[name] = StoredWeight((len(heads), *shapes.pop()))
        super().__init__(source, found)

    def read(self, name: str, dtype: torch.dtype, rows: slice = ALL_ROWS) -> Tensor | QuantizedWeight:
        if name not in self._heads:
            return super().read(name, dtype, rows)
        found: list[Tensor] = []
        for head in range(len(self._heads[name]))[rows]:
            norm = self._source.read(self._heads[name][head], dtype)
            assert isinstance(norm, Tensor), name
            found.append(norm)
        return torch.stack(found)

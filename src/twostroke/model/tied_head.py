"""TiedHead: the embedding of a checkpoint that ties it to the head, and stores only the head."""

from __future__ import annotations

import torch
from torch import Tensor

from twostroke.kernels.quantized_weight import QuantizedWeight
from twostroke.model.weight_source import ALL_ROWS, WeightSource, WrappedSource


class TiedHead(WrappedSource):
    """A WeightSource that presents the head under the name of the embedding."""

    def __init__(self, source: WeightSource, head: str, embedding: str) -> None:
        """Rename `head` to `embedding`."""
        self._head, self._embedding = head, embedding
        super().__init__(source, {embedding if name == head else name: one for name, one in source.weights.items()})

    def read(self, name: str, dtype: torch.dtype, rows: slice = ALL_ROWS) -> Tensor | QuantizedWeight:
        return super().read(self._head if name == self._embedding else name, dtype, rows)


def with_embedding(source: WeightSource, head: str, embedding: str) -> WeightSource:
    """Return the weights of a model with tied embedding and head, whichever of the two is stored."""
    is_head_alone = head in source.weights and embedding not in source.weights
    return TiedHead(source, head, embedding) if is_head_alone else source

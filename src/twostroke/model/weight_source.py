"""WeightSource: a model's weights by name, whatever file they come from and however it stores them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from twostroke.kernels.quantized_weight import QuantizedFormat, QuantizedWeight
from twostroke.kernels.stored_rows import StoredRows

ALL_ROWS = slice(None)
ROWS_TOGETHER = 8
"""Rows that a layout may pack into one word: a range that is read begins at a multiple of it."""


@dataclass(frozen=True, slots=True)
class StoredStack:
    """A tensor of a file that has a matrix or a bias of each expert."""

    name: str
    shape: tuple[int, ...]
    """[num_experts, ...]"""


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """What is known of a weight before it is read."""

    shape: tuple[int, ...]
    format: QuantizedFormat | None = None
    """Of a quantized one, once it is loaded; None for floats, which take the type that the model runs in."""
    is_by_rows: bool = True
    """Whether some of its rows can be read without the others."""
    stored_name: str | None = None
    """What its file calls it, where that is not the name of a checkpoint; for messages."""
    stack: StoredStack | None = None
    """The tensor of its file that it is a part of; None: it is one by itself."""


class WeightSource(Protocol):
    """Weights under the names of a Hugging Face checkpoint (`model.layers.0.self_attn.q_proj.weight`).

    Packed tensors that make up one weight appear as that weight; what belongs to none appears under its own name, so
    that the loader can refuse it.
    """

    @property
    def path(self) -> Path:
        """The folder or file, for messages."""
        ...

    @property
    def quantization(self) -> str | None:
        """How the weights are quantized, by the name that `--quantization` may repeat; None where they are floats."""
        ...

    @property
    def weights(self) -> Mapping[str, StoredWeight]:
        """Everything there is."""
        ...

    def read(self, name: str, dtype: torch.dtype, rows: slice = ALL_ROWS) -> Tensor | QuantizedWeight:
        """One weight, or some of its rows.

        Args:
            name: one of `weights`.
            dtype: of the activations that a quantized weight is multiplied with. Floats come as they are stored, and
                may be memory of the file.
            rows: from where, a multiple of ROWS_TOGETHER, to where; all, of a weight that is not stored by rows
                (`StoredWeight.is_by_rows`).

        Raises:
            CorruptCheckpoint: its bytes cannot be read, or contradict each other.
            UnsupportedModel: it is stored in a way that is not implemented.
        """
        ...


@runtime_checkable
class StoresRows(Protocol):
    """A WeightSource that can say where rows lie in its files. What stands before it and changes weights is none."""

    def stored_rows(self, name: str) -> StoredRows | None:
        """Return where the rows of a weight lie, in their order; None where none lies in a file as blocks."""
        ...


class WrappedSource:
    """A WeightSource that stands before another one; as it is, it gives what that gives."""

    def __init__(self, source: WeightSource, weights: Mapping[str, StoredWeight] | None = None) -> None:
        """Takes the other source, and what there is where that differs."""
        self._source = source
        self.weights: Mapping[str, StoredWeight] = source.weights if weights is None else weights

    @property
    def path(self) -> Path:
        return self._source.path

    @property
    def quantization(self) -> str | None:
        return self._source.quantization

    def read(self, name: str, dtype: torch.dtype, rows: slice = ALL_ROWS) -> Tensor | QuantizedWeight:
        return self._source.read(name, dtype, rows)

"""WeightSource: a model's weights by name, independent of file type and storage format."""

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
"""Rows that a layout may pack into one word; a range of rows to read begins at a multiple of it."""


@dataclass(frozen=True, slots=True)
class StoredStack:
    """A tensor of a file that holds a matrix or a bias for each expert."""

    name: str
    shape: tuple[int, ...]
    """Shape [num_experts, ...]."""


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """Properties of a weight that are known before it is read."""

    shape: tuple[int, ...]
    format: QuantizedFormat | None = None
    """Format of a quantized weight once it is loaded; None for floats, which are converted to the model's dtype."""
    is_by_rows: bool = True
    """Whether some of its rows can be read without the others."""
    stored_name: str | None = None
    """Name in its file, if it differs from the checkpoint's name; for messages."""
    stack: StoredStack | None = None
    """Tensor of the file that contains it; None: it is a tensor of its own."""
    float_type: str | None = None
    """Stored type of floats, as the file names it (F32, BF16 ...); None: the weight is quantized, or has no type."""


class WeightSource(Protocol):
    """Weights under the names of a Hugging Face checkpoint (`model.layers.0.self_attn.q_proj.weight`).

    Packed tensors that make up one weight appear as that weight. Tensors that belong to no weight appear under their
    own names, so that the loader can refuse them.
    """

    @property
    def path(self) -> Path:
        """The folder or file, for messages."""
        ...

    @property
    def quantization(self) -> str | None:
        """Quantization of the weights, as a value of `--quantization`; None: they are floats."""
        ...

    @property
    def weights(self) -> Mapping[str, StoredWeight]:
        """All weights by name."""
        ...

    def read(self, name: str, dtype: torch.dtype, rows: slice = ALL_ROWS) -> Tensor | QuantizedWeight:
        """Return one weight, or some of its rows.

        Args:
            name: a key of `weights`.
            dtype: type of the activations that a quantized weight is multiplied with. Floats are returned in their
            stored
                type, possibly as a view of the mapped file.
            rows: range of rows that begins at a multiple of ROWS_TOGETHER; all rows for a weight that is not stored
            by rows
                (`StoredWeight.is_by_rows`).

        Raises:
            CorruptCheckpoint: its bytes cannot be read, or contradict each other.
            UnsupportedModel: it is stored in a format that is not implemented.
        """
        ...


@runtime_checkable
class StoresRows(Protocol):
    """A WeightSource that knows where its files store rows; wrappers that change weights do not implement it."""

    def stored_rows(self, name: str) -> StoredRows | None:
        """Return where the rows of a weight are stored, in order; None if they are not stored in a file as blocks."""
        ...


class WrappedSource:
    """Base class of a WeightSource that wraps another one; unchanged, it returns the other's weights."""

    def __init__(self, source: WeightSource, weights: Mapping[str, StoredWeight] | None = None) -> None:
        """Store the wrapped source, and the weights if they differ from its own."""
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

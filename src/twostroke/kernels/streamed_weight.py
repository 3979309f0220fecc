"""StreamedWeight: a weight that is read, converted and quantized a few rows at a time while it is packed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from twostroke.kernels.packed_weight import PackedWeight
from twostroke.kernels.quantized_weight import QuantizedWeight
from twostroke.kernels.stored_rows import StoredRows


@dataclass(frozen=True, slots=True, eq=False)
class StreamedWeight:
    """Weight [N, K] that is never in memory as a whole: its codes, a byte each, would be larger than the packed
    weight."""

    shape: tuple[int, int]
    dtype: torch.dtype
    """Type of the activations it is multiplied with."""
    rows: Callable[[int, int], Tensor | QuantizedWeight]
    """Return rows [begin, end), all in one format; floats may be memory of a file."""
    stored: StoredRows | None = None
    """Location of the rows, for code that reads files faster than `rows`; None if they are in no file or need
    conversion."""
    packed: PackedWeight | None = None
    """Packed form from an earlier start; None if it has to be packed."""
    save_packed: Callable[[PackedWeight], None] | None = None
    """Keep the packed form for later starts; None if it is not to be kept."""

    def all_rows(self) -> Tensor | QuantizedWeight:
        """Return all rows at once, for code that does not pack them."""
        return self.rows(0, self.shape[0])


Matrix = Tensor | QuantizedWeight | StreamedWeight
"""Operand of one product."""

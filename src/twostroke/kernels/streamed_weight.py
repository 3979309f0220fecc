"""StreamedWeight: a weight that is read, converted and quantized a few rows at a time, while it is packed."""

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
    """A weight [N, K] that is never there as a whole: its codes, a byte each, would be more than the packed weight."""

    shape: tuple[int, int]
    dtype: torch.dtype
    """Of the activations it is multiplied with."""
    rows: Callable[[int, int], Tensor | QuantizedWeight]
    """Rows [begin, end), all of them of one format; floats may be memory of a file."""
    stored: StoredRows | None = None
    """Where they lie, for who reads files faster than `rows` does; None: in no file, or not as they are."""
    packed: PackedWeight | None = None
    """What an earlier start has made of it; None: it is to be packed."""
    keep: Callable[[PackedWeight], None] | None = None
    """Takes what was made of it, for later starts; None: nobody wants it."""

    def whole(self) -> Tensor | QuantizedWeight:
        """All rows at once, for who does not pack them."""
        return self.rows(0, self.shape[0])


Matrix = Tensor | QuantizedWeight | StreamedWeight
"""What one product is made of."""

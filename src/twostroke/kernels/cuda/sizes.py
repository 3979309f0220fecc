"""Sizes of weights in the layout of Triton's kernels. Needs no Triton, so that a plan can use them on any machine."""

from __future__ import annotations

import torch

from twostroke.kernels.quantized_weight import QuantizedFormat
from twostroke.kernels.reference.linear import PlainSizes

SPAN = 128
"""Inputs that are read at once. In 4 bits, 64 bytes hold the first half of them in their low bits, the second in their
high bits."""


class Sizes:
    """Sizes of floats as torch keeps them; of codes, scales, mins and orders as QuantizedLinear does."""

    def weight(
        self, shape: tuple[int, int], quantized: QuantizedFormat | None, dtype: torch.dtype, *, gated: bool
    ) -> int:
        if quantized is None:
            return PlainSizes().weight(shape, quantized, dtype, gated=gated)
        quantized = quantized.plain
        num_rows, num_inputs = shape
        num_groups = -(-num_inputs // quantized.group_size)
        per_row = row_bytes(num_inputs, quantized.bits) + 2 * num_groups * (2 if quantized.has_mins else 1)
        return num_rows * per_row + (0 if quantized.order_digest is None else 4 * num_inputs)

    def bias(self, num_rows: int, dtype: torch.dtype, *, gated: bool) -> int:
        return PlainSizes().bias(num_rows, dtype, gated=gated)


def row_bytes(num_inputs: int, bits: int) -> int:
    """Return the bytes of one row's codes, padded to whole spans.

    >>> row_bytes(130, 8), row_bytes(130, 4)
    (130, 128)
    """
    return num_inputs if bits == 8 else -(-num_inputs // SPAN) * SPAN // 2

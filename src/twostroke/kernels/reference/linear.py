"""Linear maps, packed once at load."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from twostroke.kernels.quantized_weight import QuantizedFormat, QuantizedWeight
from twostroke.kernels.reference.elementwise import silu_and_mul
from twostroke.kernels.reference.row_tiles import in_row_tiles, linear_heights
from twostroke.kernels.streamed_weight import Matrix, StreamedWeight


class PackedLinear:
    """y = x W^T + b with bits per row that do not depend on the other rows; weights as torch keeps them."""

    def __init__(self, weight: Matrix, bias: Tensor | None) -> None:
        """Takes weight [N, K] and bias [N], and proves the heights they may be multiplied at (row_tiles).

        A quantized weight is multiplied as the numbers it stands for.
        """
        weight = weight.whole() if isinstance(weight, StreamedWeight) else weight
        # a copy: what a file maps would change with the file
        weight = weight.dequantize() if isinstance(weight, QuantizedWeight) else weight.clone().contiguous()
        self.weight, self.bias = weight, bias
        self.heights = linear_heights(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """Maps x [num_rows, K] to [num_rows, N], in the type of the weights."""
        return in_row_tiles(self._multiply, x, self.heights)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + x W^T + b, the product rounded first."""
        return residual + self(x)

    def rows(self, ids: Tensor) -> Tensor:
        """W[ids]. [n, K]"""
        return F.embedding(ids, self.weight)

    def _multiply(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class PackedGated:
    """silu(x G^T) * (x U^T), G and U one under the other in weight [2 N, K]."""

    def __init__(self, weight: Matrix, bias: Tensor | None) -> None:
        """Packs both as one product."""
        self._linear = PackedLinear(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """Maps x [num_rows, K] to [num_rows, N]."""
        return silu_and_mul(self._linear(x))


class PlainSizes:
    """Weights as torch keeps them, quantized ones as the numbers they stand for."""

    def weight(
        self, shape: tuple[int, int], quantized: QuantizedFormat | None, dtype: torch.dtype, *, gated: bool
    ) -> int:
        """See PackedSizes."""
        del quantized, gated
        return shape[0] * shape[1] * dtype.itemsize

    def bias(self, num_rows: int, dtype: torch.dtype, *, gated: bool) -> int:
        """See PackedSizes."""
        del gated
        return num_rows * dtype.itemsize

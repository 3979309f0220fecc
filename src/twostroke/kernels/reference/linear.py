"""Linear maps, packed once at load."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from twostroke.config.layer_spec import Activation
from twostroke.kernels.interface import Linear
from twostroke.kernels.memory import to_float32
from twostroke.kernels.quantized_weight import QuantizedFormat, QuantizedWeight
from twostroke.kernels.reference.elementwise import gate_and_mul
from twostroke.kernels.reference.row_tiles import in_row_tiles, linear_heights
from twostroke.kernels.streamed_weight import Matrix, StreamedWeight


class PlainLinear:
    """y = x W^T + b by torch; the order of summation within a row may depend on the number of rows."""

    def __init__(self, weight: Matrix, bias: Tensor | None) -> None:
        """Take weight [N, K] and bias [N]; a quantized weight is dequantized."""
        weight = weight.all_rows() if isinstance(weight, StreamedWeight) else weight
        # a copy, because a mapped file's memory would change with the file
        weight = weight.dequantize() if isinstance(weight, QuantizedWeight) else weight.clone().contiguous()
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [num_rows, K] to [num_rows, N], in the type of the weights."""
        return F.linear(x, self.weight, self.bias)

    def in_float32(self, x: Tensor) -> Tensor:
        return to_float32(self(x))

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return residual + x W^T + b; without a bias in one pass, and rounded once."""
        return torch.addmm(residual, x, self.weight.t()) if self.bias is None else residual + self(x)

    def rows(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class PackedLinear(PlainLinear):
    """PlainLinear with bits per row that do not depend on the other rows."""

    def __init__(self, weight: Matrix, bias: Tensor | None) -> None:
        """Prove the heights at which rows may be multiplied (row_tiles)."""
        super().__init__(weight, bias)
        self.heights = linear_heights(self.weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        return in_row_tiles(super().__call__, x, self.heights)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return residual + x W^T + b, with the product rounded first."""
        return residual + self(x)


class PackedGated:
    """Gated product activation(x G^T) * (x U^T), with G above U in weight [2 N, K]."""

    def __init__(
        self,
        pack: Callable[[Matrix, Tensor | None], Linear],
        weight: Matrix,
        bias: Tensor | None,
        activation: Activation,
    ) -> None:
        """Pack gate and up as one matrix."""
        self._linear = pack(weight, bias)
        self._activation: Activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [num_rows, K] to [num_rows, N]."""
        return gate_and_mul(self._linear(x), self._activation)


class PlainSizes:
    """Sizes of weights as torch keeps them, quantized ones dequantized."""

    def weight(
        self, shape: tuple[int, int], quantized: QuantizedFormat | None, dtype: torch.dtype, *, gated: bool
    ) -> int:
        del quantized, gated
        return shape[0] * shape[1] * dtype.itemsize

    def bias(self, num_rows: int, dtype: torch.dtype, *, gated: bool) -> int:
        del gated
        return num_rows * dtype.itemsize

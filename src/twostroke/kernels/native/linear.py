"""Linear maps against packed panels (csrc/kernels/linear.hpp)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from twostroke.kernels.large_pages import large_pages
from twostroke.kernels.native._native import Kernels
from twostroke.kernels.native.extension import TYPE_CODES, address, native


class _Panels:
    """A weight in the kernels' order, and the call."""

    def __init__(self, kernels: Kernels, weight: Tensor, bias: Tensor | None, *, gated: bool) -> None:
        self._kernels = kernels
        rows, self._k = weight.shape
        self.n = rows // 2 if gated else rows
        self._gated, self.dtype = gated, weight.dtype
        self._type = TYPE_CODES[weight.dtype]
        self._packed = large_pages(native.packed_bytes(self.n, self._k, gated, self._type))
        weight = weight.contiguous()
        native.pack_linear(weight.data_ptr(), self._packed.data_ptr(), self.n, self._k, gated, self._type)
        self._bias = None if bias is None else self._of_channels(bias)

    def _of_channels(self, bias: Tensor) -> Tensor:
        """The bias in the order of the panels' channels, float32, zero where a panel is filled up."""
        num_vectors = -(-self.n // 16) * (2 if self._gated else 1)
        rows = [native.row_of_channel(channel, self.n, self._gated) for channel in range(-(-num_vectors // 4) * 64)]
        index = torch.tensor(rows)
        return torch.where(index < 0, torch.zeros(()), bias.float()[index.clamp_min(0)]).contiguous()

    def multiply(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [num_rows, K] to [num_rows, n]."""
        assert x.dtype is self.dtype, (x.dtype, self.dtype)
        if x.stride(-1) != 1:
            x = x.contiguous()
        if self._k % 2 and self.dtype is torch.bfloat16:
            x = F.pad(x, (0, 1))  # two bfloat16 are read at once
        if residual is not None:
            residual = residual.contiguous()
        y = torch.empty(len(x), self.n, dtype=self.dtype)
        self._kernels.linear(
            x.data_ptr(),
            x.stride(0),
            self._packed.data_ptr(),
            address(self._bias),
            address(residual),
            y.data_ptr(),
            len(x),
            self.n,
            self._k,
            self._gated,
            self._type,
        )
        return y

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the weight, taken out of the panels: there is no other copy of it. int64 [n] to [n, K]"""
        found = torch.empty(len(ids), self._k, dtype=self.dtype)
        ids = ids.contiguous()
        native.unpack_rows(self._packed.data_ptr(), ids.data_ptr(), found.data_ptr(), len(ids), self._k, self._type)
        return found


class NativeLinear:
    """y = x W^T + b. A result is rounded once, from float32, the residual included."""

    def __init__(self, kernels: Kernels, weight: Tensor, bias: Tensor | None) -> None:
        """Packs weight [N, K] and bias [N]; they are not needed afterwards."""
        self._panels = _Panels(kernels, weight, bias, gated=False)

    def __call__(self, x: Tensor) -> Tensor:
        """Maps x [num_rows, K] to [num_rows, N], in the type of the weights."""
        return self._panels.multiply(x)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + x W^T + b. [num_rows, N]"""
        return self._panels.multiply(x, residual)

    def rows(self, ids: Tensor) -> Tensor:
        """W[ids]. [n, K]"""
        return self._panels.rows(ids)


class NativeGated:
    """silu(x G^T) * (x U^T); the two factors are never written to memory."""

    def __init__(self, kernels: Kernels, weight: Tensor, bias: Tensor | None) -> None:
        """Packs weight [2 N, K], G above U, and bias [2 N]."""
        self._panels = _Panels(kernels, weight, bias, gated=True)

    def __call__(self, x: Tensor) -> Tensor:
        """Maps x [num_rows, K] to [num_rows, N], in the type of the weights."""
        return self._panels.multiply(x)

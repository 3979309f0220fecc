"""Linear maps against packed panels (csrc/kernels/linear.hpp, csrc/kernels/quantized.hpp)."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from twostroke.kernels.large_pages import large_pages
from twostroke.kernels.native.extension import TYPE_CODES, Kernels, address, native
from twostroke.kernels.quantized_weight import QuantizedWeight


class _Panels(ABC):
    """A weight [N, K], or [2 N, K] with G above U, in the kernels' order, and its bias."""

    def __init__(self, kernels: Kernels, weight: Tensor | QuantizedWeight, bias: Tensor | None, *, gated: bool) -> None:
        self._kernels = kernels
        rows, self._k = weight.shape
        self._n, self._gated = rows // 2 if gated else rows, gated
        self._dtype, self._type = weight.dtype, TYPE_CODES[weight.dtype]
        self._bias = None if bias is None else _of_channels(bias, self._n, gated=gated)

    def multiply(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [num_rows, K] to [num_rows, N]."""
        assert x.dtype is self._dtype, (x.dtype, self._dtype)
        y = torch.empty(x.shape[0], self._n, dtype=self._dtype)
        self._multiply(x if x.stride(-1) == 1 else x.contiguous(), residual, y)
        return y

    @abstractmethod
    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the weight, taken out of the panels: there is no other copy of it. int64 [n] to [n, K]"""

    @abstractmethod
    def _multiply(self, x: Tensor, residual: Tensor | None, y: Tensor) -> None:
        """Writes y; the rows of x are contiguous."""


def _panels(
    kernels: Kernels, weight: Tensor | QuantizedWeight, bias: Tensor | None, *, gated: bool, quantizes_inputs: bool
) -> _Panels:
    if isinstance(weight, QuantizedWeight):
        return _QuantizedPanels(kernels, weight, bias, gated=gated, quantizes_inputs=quantizes_inputs)
    return _FloatPanels(kernels, weight, bias, gated=gated)


class _FloatPanels(_Panels):
    """Weights of float32 or bfloat16."""

    def __init__(self, kernels: Kernels, weight: Tensor, bias: Tensor | None, *, gated: bool) -> None:
        super().__init__(kernels, weight, bias, gated=gated)
        self._packed = large_pages(native.packed_bytes(self._n, self._k, gated, self._type))
        weight = weight.contiguous()
        native.pack_linear(weight.data_ptr(), self._packed.data_ptr(), self._n, self._k, gated, self._type)

    def rows(self, ids: Tensor) -> Tensor:
        """See _Panels."""
        found = torch.empty(len(ids), self._k, dtype=self._dtype)
        native.unpack_rows(
            self._packed.data_ptr(), ids.contiguous().data_ptr(), found.data_ptr(), len(ids), self._k, self._type
        )
        return found

    def _multiply(self, x: Tensor, residual: Tensor | None, y: Tensor) -> None:
        if self._k % 2 and self._dtype is torch.bfloat16:
            x = F.pad(x, (0, 1))  # two bfloat16 are read at once
        self._kernels.linear(
            x.data_ptr(),
            x.stride(0),
            self._packed.data_ptr(),
            address(self._bias),
            address(residual),
            y.data_ptr(),
            x.shape[0],
            self._n,
            self._k,
            self._gated,
            self._type,
        )


class _QuantizedPanels(_Panels):
    """Weights of 8 or 4 bits; inputs are multiplied as they are, or quantized on the fly, each row by itself."""

    def __init__(
        self,
        kernels: Kernels,
        weight: QuantizedWeight,
        bias: Tensor | None,
        *,
        gated: bool,
        quantizes_inputs: bool,
    ) -> None:
        super().__init__(kernels, weight, bias, gated=gated)
        self._quantizes_inputs = quantizes_inputs
        self._bits, self._group, self._has_min = weight.bits, weight.group_size, weight.mins is not None
        self._order = None if weight.order is None else weight.order.to(torch.int32)
        num_bytes = native.packed_quantized_bytes(self._n, self._k, gated, self._bits, self._group, self._has_min)
        self._packed = large_pages(num_bytes)
        codes, scales = weight.codes.contiguous(), weight.scales.contiguous()
        mins = None if weight.mins is None else weight.mins.contiguous()
        native.pack_quantized(
            codes.data_ptr(),
            scales.data_ptr(),
            address(mins),
            self._packed.data_ptr(),
            self._n,
            self._k,
            gated,
            self._bits,
            self._group,
        )

    def rows(self, ids: Tensor) -> Tensor:
        """See _Panels."""
        found = torch.empty(len(ids), self._k)
        native.unpack_quantized_rows(
            self._packed.data_ptr(),
            ids.contiguous().data_ptr(),
            found.data_ptr(),
            len(ids),
            self._k,
            self._bits,
            self._group,
            self._has_min,
        )
        if self._order is not None:
            found = torch.empty_like(found).index_copy_(1, self._order.long(), found)
        return found.to(self._dtype)

    def _multiply(self, x: Tensor, residual: Tensor | None, y: Tensor) -> None:
        self._kernels.quantized_linear(
            x.data_ptr(),
            x.stride(0),
            self._packed.data_ptr(),
            address(self._bias),
            address(residual),
            y.data_ptr(),
            x.shape[0],
            self._n,
            self._k,
            self._gated,
            self._type,
            self._bits,
            self._group,
            self._has_min,
            address(self._order),
            self._quantizes_inputs,
        )


def _of_channels(bias: Tensor, n: int, *, gated: bool) -> Tensor:
    """The bias in the order of the panels' channels, float32, zero where a panel is filled up."""
    num_vectors = -(-n // 16) * (2 if gated else 1)
    rows = torch.tensor([native.row_of_channel(channel, n, gated) for channel in range(-(-num_vectors // 4) * 64)])
    return torch.where(rows < 0, torch.zeros(()), bias.float()[rows.clamp_min(0)]).contiguous()


class NativeLinear:
    """y = x W^T + b. A result is rounded once, from float32, the residual included."""

    def __init__(
        self,
        kernels: Kernels,
        weight: Tensor | QuantizedWeight,
        bias: Tensor | None,
        *,
        quantizes_inputs: bool = True,
    ) -> None:
        """Packs weight [N, K] and bias [N]; they are not needed afterwards.

        A quantized weight meets inputs that are quantized on the fly, or inputs as they are.
        """
        self._panels = _panels(kernels, weight, bias, gated=False, quantizes_inputs=quantizes_inputs)

    def __call__(self, x: Tensor) -> Tensor:
        """Maps x [num_rows, K] to [num_rows, N], in the type of the activations."""
        return self._panels.multiply(x)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + x W^T + b. [num_rows, N]"""
        return self._panels.multiply(x, residual.contiguous())

    def rows(self, ids: Tensor) -> Tensor:
        """W[ids]. [n, K]"""
        return self._panels.rows(ids)


class NativeGated:
    """silu(x G^T) * (x U^T); the two factors are never written to memory."""

    def __init__(
        self,
        kernels: Kernels,
        weight: Tensor | QuantizedWeight,
        bias: Tensor | None,
        *,
        quantizes_inputs: bool = True,
    ) -> None:
        """Packs weight [2 N, K], G above U, and bias [2 N]; see NativeLinear."""
        self._panels = _panels(kernels, weight, bias, gated=True, quantizes_inputs=quantizes_inputs)

    def __call__(self, x: Tensor) -> Tensor:
        """Maps x [num_rows, K] to [num_rows, N], in the type of the activations."""
        return self._panels.multiply(x)

"""Linear maps with weights in packed panels (csrc/kernels/linear.hpp, csrc/kernels/quantized.hpp)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from twostroke.config.layer_spec import Activation
from twostroke.kernels.memory import empty, large_pages
from twostroke.kernels.native.extension import TYPE_CODES, Kernels, address, native
from twostroke.kernels.packed_weight import PackedWeight
from twostroke.kernels.quantized_weight import CodeTable, QuantizedFormat, QuantizedWeight
from twostroke.kernels.stacked_weight import StackedWeight, stack
from twostroke.kernels.stored_rows import StoredRows
from twostroke.kernels.streamed_weight import Matrix, StreamedWeight

_PANEL = 64
"""Channels side by side in a panel (csrc/kernels/table.hpp)."""
_GATE_CODES: dict[Activation | None, int] = {None: 0, "silu": 1, "gelu_tanh": 2, "clamped_swiglu": 3}
"""Codes of the activations in csrc/kernels/table.hpp; None is a weight without a gate."""
_TABLE_CODES: dict[CodeTable | None, int] = {None: 0, "iq4": 1, "fp4": 2}


class Panels(ABC):
    """Weight [N, K], or [2 N, K] with G above U, in the kernels' order, and its bias."""

    bound: native.PackedLinear
    """Weight and bias for code that multiplies with them; it must keep this object alive."""
    pads_inputs = False
    """Whether rows of x need a zero after them, because bfloat16 are read in pairs."""
    _packed: Tensor
    _order: Tensor | None = None
    _quantized: QuantizedFormat | None = None

    def __init__(self, weight: Matrix, bias: Tensor | None, activation: Activation | None) -> None:
        rows, self._k = weight.shape
        gated = activation is not None
        self._n, self._gated, self._gate = rows // 2 if gated else rows, gated, _GATE_CODES[activation]
        self._dtype, self._type = weight.dtype, TYPE_CODES[weight.dtype]
        self._bias = None if bias is None else _of_channels(bias, self._n, gated=gated)

    def multiply(self, x: Tensor, residual: Tensor | None = None, *, is_wide: bool = False) -> Tensor:
        """Map x [num_rows, K] to [num_rows, N]; with `is_wide` the same numbers in float32."""
        assert x.dtype is self._dtype, (x.dtype, self._dtype)
        y = empty((x.shape[0], self._n), torch.float32 if is_wide else self._dtype)
        if self.pads_inputs:
            x = F.pad(x, (0, 1))
        elif x.stride(-1) != 1:
            x = x.contiguous()
        self.bound.multiply(x.data_ptr(), x.stride(0), address(residual), y.data_ptr(), self._n, x.shape[0], is_wide)
        return y

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return self._n, self._k

    @property
    def dtype(self) -> torch.dtype:
        """Type of inputs and outputs."""
        return self._dtype

    def has_same_format(self, other: Panels) -> bool:
        """Return whether both weights differ only in their numbers, and take inputs in their own order."""
        of_weight = self._quantized, self._order is None, self.shape, self._gate, self._dtype, self._bias is None
        return self._order is None and of_weight == (
            other._quantized,
            other._order is None,
            other.shape,
            other._gate,
            other._dtype,
            other._bias is None,
        )

    @property
    def packed(self) -> PackedWeight:
        """Weight in its packed form, for a later start."""
        shape = (2 * self._n if self._gated else self._n, self._k)
        return PackedWeight(shape, self._dtype, self._gated, self._quantized, self._packed, self._order)

    def take(self, packed: PackedWeight) -> None:
        """Use the packed form from an earlier start."""
        assert (packed.is_gated, len(packed.panels)) == (self._gated, len(self._packed)), packed.shape
        self._packed = packed.panels
        self.bound = self._bind()

    @abstractmethod
    def _bind(self) -> native.PackedLinear:
        """Bind the kernels to the current panels."""

    @abstractmethod
    def pack(self, ranges: Iterator[_Range]) -> None:
        """Pack rows that were read."""

    @abstractmethod
    def rows(self, ids: Tensor) -> Tensor:
        """Return rows of the weight, read from the panels, which are its only copy. int64 [n] to [n, K]"""


def have_same_format(panels: Sequence[Panels]) -> bool:
    """Return whether one call can multiply with all of them (see Panels.has_same_format)."""
    return all(one.has_same_format(panels[0]) for one in panels)


_NUMBERS_PER_CHUNK = 1 << 20
"""Numbers of a streamed weight converted at once: codes of a MiB, which stay in the caches until they are packed."""

_Range = tuple[int, int, Tensor | QuantizedWeight]
"""Outputs [begin, begin + count) and their rows of the weight, [count, K] or [2 count, K] with G above U."""


def _ranges(weight: Matrix, *, gated: bool) -> Iterator[_Range]:
    """Yield ranges of whole panels; only the last may end within one."""
    n, k = weight.shape[0] // 2 if gated else weight.shape[0], weight.shape[1]
    if not isinstance(weight, StreamedWeight):
        yield 0, n, weight
        return
    unit, at_once = (_PANEL // 2, _NUMBERS_PER_CHUNK // 2) if gated else (_PANEL, _NUMBERS_PER_CHUNK)
    step = max(unit, at_once // k // unit * unit)
    for begin in range(0, n, step):
        end = min(begin + step, n)
        found = [weight.rows(begin, end), *([weight.rows(n + begin, n + end)] if gated else [])]
        rows = stack(found)
        assert not isinstance(rows, StackedWeight), "the rows of a streamed weight are of one format"
        yield begin, end - begin, rows


def _panels(
    kernels: Kernels,
    weight: Matrix,
    bias: Tensor | None,
    activation: Activation | None,
    *,
    quantizes_inputs: bool,
) -> Panels:
    quantized = partial(_QuantizedPanels, kernels, weight, bias, activation, quantizes_inputs=quantizes_inputs)
    floats = partial(_FloatPanels, kernels, weight, bias, activation)
    if not isinstance(weight, StreamedWeight):
        return _packed_panels(weight, activation, quantized, floats)
    if weight.packed is not None:
        packed = weight.packed
        panels = floats() if packed.format is None else quantized(packed.format, packed.order)
        panels.take(packed)
        return panels
    panels = _packed_panels(weight, activation, quantized, floats)
    if weight.save_packed is not None:
        weight.save_packed(panels.packed)
    return panels


def _packed_panels(
    weight: Matrix,
    activation: Activation | None,
    quantized: Callable[..., _QuantizedPanels],
    floats: Callable[[], _FloatPanels],
) -> Panels:
    stored = weight.stored if isinstance(weight, StreamedWeight) else None
    if stored is not None and stored.type_name in native.ggml_types():
        panels = quantized(stored.format)
        if panels.read(stored):
            return panels  # otherwise the slower path below reports what is wrong with the rows
    ranges = _ranges(weight, gated=activation is not None)
    begin, count, first = next(ranges)
    panels = quantized(first.format, first.order) if isinstance(first, QuantizedWeight) else floats()
    panels.pack(chain([(begin, count, first)], ranges))
    return panels


class _FloatPanels(Panels):
    """Panels of float32 or bfloat16."""

    def __init__(
        self,
        kernels: Kernels,
        weight: Matrix,
        bias: Tensor | None,
        activation: Activation | None,
    ) -> None:
        super().__init__(weight, bias, activation)
        self._kernels = kernels
        self.pads_inputs = self._k % 2 == 1 and self._dtype is torch.bfloat16
        self._packed = large_pages(native.packed_bytes(self._n, self._k, self._gated, self._type))
        self.bound = self._bind()

    def _bind(self) -> native.PackedLinear:
        packed, bias = self._packed.data_ptr(), address(self._bias)
        return native.PackedLinear(self._kernels, packed, bias, *self.shape, self._gate, self._type)

    def pack(self, ranges: Iterator[_Range]) -> None:
        gated = self._gated
        for begin, count, found in ranges:
            assert isinstance(found, Tensor), found
            rows = found.contiguous()
            to = self._packed.data_ptr() + native.packed_bytes(begin, self._k, gated, self._type)
            native.pack_linear(rows.data_ptr(), to, count, self._k, gated, self._type)

    def rows(self, ids: Tensor) -> Tensor:
        found = torch.empty(len(ids), self._k, dtype=self._dtype)
        native.unpack_rows(
            self._packed.data_ptr(), ids.contiguous().data_ptr(), found.data_ptr(), len(ids), self._k, self._type
        )
        return found


class _QuantizedPanels(Panels):
    """Panels of 2 to 8 bits. Inputs are used as they are, or each row is quantized separately during the call."""

    def __init__(
        self,
        kernels: Kernels,
        weight: Matrix,
        bias: Tensor | None,
        activation: Activation | None,
        quantized: QuantizedFormat,
        order: Tensor | None = None,
        *,
        quantizes_inputs: bool,
    ) -> None:
        super().__init__(weight, bias, activation)
        self._kernels, self._quantizes_inputs = kernels, quantizes_inputs
        self._quantized, self._format = quantized, _native_format(quantized)
        self._order = None if order is None else order.to(torch.int32)
        self._packed = large_pages(self._packed_bytes(self._n))
        self.bound = self._bind()

    def _bind(self) -> native.PackedLinear:
        return native.PackedLinear(
            self._kernels,
            self._packed.data_ptr(),
            address(self._bias),
            *self.shape,
            self._gate,
            self._type,
            self._format,
            address(self._order),
            self._quantizes_inputs,
        )

    def read(self, stored: StoredRows) -> bool:
        """Pack rows directly from their files; return whether all were read and are finite.

        Raises:
            CorruptCheckpoint: a file has changed meanwhile.
        """
        files, offsets = np.ascontiguousarray(stored.files), np.ascontiguousarray(stored.offsets)
        is_good = native.pack_stored(
            stored.type_name,
            files.ctypes.data,
            offsets.ctypes.data,
            self._packed.data_ptr(),
            self._n,
            self._k,
            self._gated,
            self._format,
        )
        stored.check()
        return is_good

    def pack(self, ranges: Iterator[_Range]) -> None:
        for begin, count, rows in ranges:
            assert isinstance(rows, QuantizedWeight), rows
            found = rows.contiguous()
            native.pack_quantized(
                found.codes.data_ptr(),
                found.scales.data_ptr(),
                address(found.mins),
                address(found.super_scales),
                address(found.super_mins),
                self._packed.data_ptr() + self._packed_bytes(begin),
                count,
                self._k,
                self._gated,
                self._format,
            )

    def _packed_bytes(self, n: int) -> int:
        return native.packed_quantized_bytes(n, self._k, self._gated, self._format)

    def rows(self, ids: Tensor) -> Tensor:
        found = torch.empty(len(ids), self._k)
        native.unpack_quantized_rows(
            self._packed.data_ptr(),
            ids.contiguous().data_ptr(),
            found.data_ptr(),
            len(ids),
            self._k,
            self._format,
        )
        if self._order is not None:
            found = torch.empty_like(found).index_copy_(1, self._order.long(), found)
        return found.to(self._dtype)


def _native_format(quantized: QuantizedFormat) -> native.WeightFormat:
    table = _TABLE_CODES[quantized.table]
    return native.WeightFormat(
        quantized.bits, quantized.group_size, quantized.has_mins, quantized.has_super_blocks, table
    )


def _of_channels(bias: Tensor, n: int, *, gated: bool) -> Tensor:
    """Return the bias in the order of the panels' channels, float32, zero in the padding of a panel."""
    rows = torch.tensor([native.row_of_channel(channel, n, gated) for channel in range(_num_channels(n, gated=gated))])
    return torch.where(rows < 0, torch.zeros(()), bias.float()[rows.clamp_min(0)]).contiguous()


def _num_channels(n: int, *, gated: bool) -> int:
    """Return the number of channels of all panels."""
    num_vectors = -(-n // 16) * (2 if gated else 1)
    return -(-num_vectors // 4) * _PANEL


class PanelSizes:
    """Sizes of panels with their padding, biases in float32 and orders of columns in int32."""

    def weight(
        self, shape: tuple[int, int], quantized: QuantizedFormat | None, dtype: torch.dtype, *, gated: bool
    ) -> int:
        n, k = shape[0] // 2 if gated else shape[0], shape[1]
        if quantized is None:
            return native.packed_bytes(n, k, gated, TYPE_CODES[dtype])
        order = 0 if quantized.order_digest is None else k * torch.int32.itemsize
        return order + native.packed_quantized_bytes(n, k, gated, _native_format(quantized))

    def bias(self, num_rows: int, dtype: torch.dtype, *, gated: bool) -> int:
        del dtype
        n = num_rows // 2 if gated else num_rows
        return _num_channels(n, gated=gated) * torch.float32.itemsize


class NativeLinear:
    """Linear map y = x W^T + b. A result is rounded once, from float32, the residual included."""

    def __init__(
        self,
        kernels: Kernels,
        weight: Matrix,
        bias: Tensor | None,
        *,
        quantizes_inputs: bool = True,
    ) -> None:
        """Pack weight [N, K] and bias [N]; they are not needed afterwards.

        With `quantizes_inputs`, a quantized weight is multiplied with inputs that are quantized during the call.
        """
        self.panels = _panels(kernels, weight, bias, None, quantizes_inputs=quantizes_inputs)

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [num_rows, K] to [num_rows, N], in the type of the activations."""
        return self.panels.multiply(x)

    def in_float32(self, x: Tensor) -> Tensor:
        return self.panels.multiply(x, is_wide=True)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return self.panels.multiply(x, residual.contiguous())

    def rows(self, ids: Tensor) -> Tensor:
        return self.panels.rows(ids)


class NativeGated:
    """Gated product activation(x G^T) * (x U^T); the two factors are never written to memory."""

    def __init__(
        self,
        kernels: Kernels,
        weight: Matrix,
        bias: Tensor | None,
        activation: Activation,
        *,
        quantizes_inputs: bool = True,
    ) -> None:
        """Pack weight [2 N, K], G above U, and bias [2 N] (see NativeLinear)."""
        self.panels = _panels(kernels, weight, bias, activation, quantizes_inputs=quantizes_inputs)

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [num_rows, K] to [num_rows, N], in the type of the activations."""
        return self.panels.multiply(x)

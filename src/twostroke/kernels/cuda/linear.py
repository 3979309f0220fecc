"""Linear maps on the card: those with weights of 8 or 4 bits, and the choice of the map for a weight."""

from __future__ import annotations

import torch
from torch import Tensor

from twostroke.config.layer_spec import Activation
from twostroke.kernels.cuda import linear_programs as programs
from twostroke.kernels.cuda.elementwise import gate_and_mul
from twostroke.kernels.cuda.float_linear import FloatLinear, add_runs
from twostroke.kernels.cuda.jit import launch_options
from twostroke.kernels.cuda.sizes import SPAN, row_bytes
from twostroke.kernels.interface import GatedLinear, Linear
from twostroke.kernels.quantized_weight import QuantizedWeight
from twostroke.kernels.reference.linear import PlainLinear
from twostroke.kernels.reference.row_tiles import prove_once
from twostroke.kernels.streamed_weight import Matrix, StreamedWeight

_RUNS = 4
"""Runs into which an output's sum is cut, for every batch."""
_CHANNELS = 64
_LOW, _HIGH = 64, 128
"""Rows of a tile: for a few rows, and for many where it was proved to give the same bits. Heights below 64 use another
instruction on cards of capability 9.0, which sums in another order."""
_NUMBERS_PER_CHUNK = 1 << 22
"""Numbers of a streamed weight that are packed together."""


class QuantizedLinear:
    """Linear map y = x W^T + b, in the type of x; codes, scales and mins are the only copy of the weight."""

    def __init__(self, weight: QuantizedWeight | StreamedWeight, first: QuantizedWeight, bias: Tensor | None) -> None:
        """Pack weight [N, K] and bias [N]; `first` has some of its rows, or all of them."""
        first = first.plain()
        (self._num_channels, self._num_inputs), device = weight.shape, first.codes.device
        self._format, self._dtype, self._bias = first.format, first.dtype, bias
        num_groups = first.scales.shape[1]
        num_row_bytes = row_bytes(self._num_inputs, first.bits)
        self.codes = torch.empty(self._num_channels, num_row_bytes, dtype=torch.uint8, device=device)
        self.scales = torch.empty(self._num_channels, num_groups, dtype=torch.float16, device=device)
        self.mins = None if first.mins is None else torch.empty_like(self.scales)
        self.order = None if first.order is None else first.order.to(torch.int32)
        step = (
            max(1, _NUMBERS_PER_CHUNK // self._num_inputs) if isinstance(weight, StreamedWeight) else self._num_channels
        )
        for begin in range(0, self._num_channels, step):
            rows = slice(begin, min(begin + step, self._num_channels))
            found = weight.rows(rows.start, rows.stop) if isinstance(weight, StreamedWeight) else weight
            assert isinstance(found, QuantizedWeight), found
            found = found.plain()
            self.codes[rows], self.scales[rows] = _packed(found.codes, found.bits), found.scales
            if self.mins is not None and found.mins is not None:
                self.mins[rows] = found.mins
        self._high_tile_is_proven = _HIGH in self._proven_heights()

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight."""
        parts = (self.codes, self.scales, self.mins, self.order)
        return sum(part.nbytes for part in parts if part is not None)

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [num_rows, K] to [num_rows, N]."""
        return self._multiply(x, None)

    def in_float32(self, x: Tensor) -> Tensor:
        return self(x).float()

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return residual + x W^T + b in one pass, with the product rounded first."""
        return self._multiply(x, residual)

    def rows(self, ids: Tensor) -> Tensor:
        found, bits = self.codes[ids], self._format.bits
        if bits == 4:
            spans = found.view(len(ids), -1, 1, SPAN // 2)
            found = torch.cat((spans & 15, spans >> 4), dim=2).view(len(ids), -1)[:, : self._num_inputs]
        return QuantizedWeight(
            found,
            self.scales[ids],
            None if self.mins is None else self.mins[ids],
            bits,
            self._format.group_size,
            self._dtype,
            None if self.order is None else self.order.long(),
            self._format.is_fp8,
        ).dequantize()

    def _proven_heights(self) -> tuple[int, ...]:
        """Return the heights whose rows get the bits of a low tile; another height may be another instruction."""
        of_weight = (self._num_channels, self._num_inputs, self._format, self._dtype, self.codes.device)

        def prove() -> tuple[int, ...]:
            generator = torch.Generator().manual_seed(20_24)
            x = torch.randn(_HIGH, self._num_inputs, generator=generator).to(self.codes.device, self._dtype)
            low, high = (self._tiled(x, None, height, apart=False) for height in (_LOW, _HIGH))
            return (_LOW, _HIGH) if torch.equal(low, high) else (_LOW,)

        form = "fp8" if self._format.is_fp8 else f"{self._format.bits} bits"
        name = f"linear {self._num_inputs} -> {self._num_channels} of {form}"
        return prove_once(("triton", *of_weight), prove, name)

    def _multiply(self, x: Tensor, residual: Tensor | None) -> Tensor:
        num_rows = len(x)
        if not num_rows:
            return torch.empty(0, self._num_channels, dtype=x.dtype, device=x.device)
        is_few = num_rows <= _LOW
        return self._tiled(x, residual, _LOW if is_few or not self._high_tile_is_proven else _HIGH, apart=is_few)

    def _tiled(self, x: Tensor, residual: Tensor | None, height: int, *, apart: bool) -> Tensor:
        """Multiply in tiles of a height, with separate programs for the runs (`apart`) or not; the bits are the
        same."""
        assert x.dtype is self._dtype, (x.dtype, self._dtype)
        x = x if x.stride(-1) == 1 else x.contiguous()
        assert residual is None or residual.stride(-1) == 1, residual
        num_rows, n = len(x), self._num_channels
        y = torch.empty(num_rows, n, dtype=x.dtype, device=x.device)
        parts = torch.empty((_RUNS, num_rows, n) if apart else (1,), dtype=torch.float32, device=x.device)
        no_residual = residual is None
        residual_stride = 0 if no_residual else residual.stride(0)
        programs.multiply[(-(-n // _CHANNELS), -(-num_rows // height), _RUNS if apart else 1)](
            x,
            self.codes,
            self.scales,
            self.scales if self.mins is None else self.mins,
            self.codes if self.order is None else self.order,
            x if self._bias is None else self._bias,
            x if residual is None else residual,
            y,
            parts,
            num_rows,
            n,
            self._num_inputs,
            self.scales.shape[1],
            -(-self._num_inputs // SPAN),
            self.codes.shape[1],
            x.stride(0),
            residual_stride,
            1 if apart else _RUNS,
            HEIGHT=height,
            CHANNELS=_CHANNELS,
            RUNS=_RUNS,
            BITS=self._format.bits,
            IS_FP8=self._format.is_fp8,
            GROUP_SIZE=self._format.group_size,
            HAS_MINS=self.mins is not None,
            HAS_ORDER=self.order is not None,
            HAS_BIAS=self._bias is not None,
            HAS_RESIDUAL=not no_residual,
            num_warps=4 if height == _LOW else 8,
            num_stages=3 if height == _LOW else 2,  # more would be too much shared memory for cards of 8.6
            **launch_options(x.device),
        )
        if apart:
            add_runs(parts, self._bias, residual, y)
        return y


def pack_linear(weight: Matrix, bias: Tensor | None, *, batch_invariant: bool = True) -> Linear:
    """Pack a weight [N, K]. Without `batch_invariant`, floats are multiplied by cuBLAS."""
    first = weight.rows(0, 1) if isinstance(weight, StreamedWeight) else weight
    if isinstance(first, QuantizedWeight):
        assert not isinstance(weight, Tensor)
        return QuantizedLinear(weight, first, bias)
    return FloatLinear(weight, bias) if batch_invariant else PlainLinear(weight, bias)


def pack_gated(
    weight: Matrix, bias: Tensor | None, activation: Activation, *, batch_invariant: bool = True
) -> GatedLinear:
    """Pack activation(x G^T) * (x U^T) with G above U in weight [2 N, K] as one product, one pass over the weight."""
    both = pack_linear(weight, bias, batch_invariant=batch_invariant)
    return lambda x: gate_and_mul(both(x), activation)


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Return codes uint8 [N, K] in the kernel's order (see linear_programs.multiply)."""
    if bits == 8:
        return codes
    missing = -codes.shape[1] % SPAN
    spans = torch.nn.functional.pad(codes, (0, missing)).view(len(codes), -1, 2, SPAN // 2)
    return (spans[:, :, 0] | spans[:, :, 1] << 4).flatten(1)

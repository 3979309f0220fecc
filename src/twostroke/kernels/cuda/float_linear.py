"""Linear maps with float weights on the card, with independent rows.

cuBLAS splits and sums products in a way that depends on the number of rows; here it is always the same. Without that
promise (`batch_invariant=False`) cuBLAS is used: kernels/reference/linear.PlainLinear.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from twostroke.kernels.cuda import float_programs, linear_programs
from twostroke.kernels.cuda.card import has_tma, num_multiprocessors, shared_memory_bytes
from twostroke.kernels.cuda.jit import as_tensor_descriptor, launch_options
from twostroke.kernels.quantized_weight import QuantizedWeight
from twostroke.kernels.reference.row_tiles import fingerprint, prove_once
from twostroke.kernels.streamed_weight import Matrix, StreamedWeight

_SPAN_BYTES = 128
"""Bytes of a row that are read at once."""
_BAND = 8
_PREFETCHED = 2
"""Spans of a weight that a program of LOW prefetches before its inputs are ready. More took longer on an H200, because
they delay the reads of the kernel before."""
RUNS = 4
"""Runs into which an output's sum is cut, for every batch, weight and card: ranks that share a weight's rows add as one
rank with all of them does."""
_ADDED_AT_ONCE = 256
"""Outputs whose runs one program adds."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Part of a product that one program computes, its warps, and the spans it loads ahead."""

    height: int
    channels: int
    num_warps: int
    num_stages: int

    def count(self, num_rows: int, num_channels: int) -> int:
        """Return the number of tiles of a product."""
        return -(-num_rows // self.height) * -(-num_channels // self.channels)


LOW: Final = Tile(64, 64, 4, 4)
"""Tile for a few rows, and for all where HIGH does not give the same bits. Matrix units take 64 rows since capability
9.0. Most of them are padding in a decode, which costs nothing, since a decode waits for the weights."""
HIGH: Final = Tile(128, 128, 8, 4)
"""Tile for many rows."""
TMA_TILE: Final = Tile(128, 128, 8, 3)
"""Tile for many rows where the card has a copy engine, with spans of 256 bytes. More outputs spill registers: 128 x 256
took 875 us for a weight of 24,576 x 4,096 and 2,048 rows on an H200, instead of 656."""
_TMA_SPAN = 128
"""Inputs that DESCRIBED reads at once, of types of 2 bytes."""
_ALIGNED_BYTES = 16
"""Bytes that a row's length must be a multiple of for the copy engine."""
_FEWER_STAGES = 3
"""Stages of HIGH where a program has too little shared memory, as on cards of 8.6."""


class FloatLinear:
    """Linear map y = x W^T + b with bits per row that do not depend on the other rows."""

    def __init__(self, weight: Matrix, bias: Tensor | None) -> None:
        """Take weight [N, K] and bias [N]; a quantized weight is dequantized."""
        weight = weight.all_rows() if isinstance(weight, StreamedWeight) else weight
        # a copy, because a mapped file's memory would change with the file
        self.weight = weight.dequantize() if isinstance(weight, QuantizedWeight) else weight.clone().contiguous()
        self.bias = bias
        self._num_channels, self._num_inputs = self.weight.shape
        self.span = _SPAN_BYTES // self.weight.dtype.itemsize
        self._num_processors = num_multiprocessors(self.weight.device)
        self._high = _fitting(HIGH, shared_memory_bytes(self.weight.device))
        run_inputs = -(-self._num_inputs // (self.span * RUNS)) * self.span
        self._uses_tma = (
            has_tma(self.weight.device)
            and self.weight.dtype.itemsize == 2
            and self._num_inputs * self.weight.dtype.itemsize % _ALIGNED_BYTES == 0
            and run_inputs % _TMA_SPAN == 0
        )
        self._high_tile_is_proven = HIGH.height in self._proven_heights()

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [num_rows, K] to [num_rows, N], in the type of the weights."""
        return self._multiply(x, None)

    def in_float32(self, x: Tensor) -> Tensor:
        return self(x).float()

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return residual + x W^T + b in one pass, with the product rounded first."""
        return self._multiply(x, residual)

    def rows(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)

    def tile_for(self, num_rows: int) -> Tile:
        """Return the tile for `num_rows` rows."""
        return self._high if num_rows > LOW.height and self._high_tile_is_proven else LOW

    def _proven_heights(self) -> tuple[int, ...]:
        """Return the heights whose rows get the bits of a low tile, wherever they stand in it."""
        key = ("triton floats", self._num_channels, self._num_inputs, self.weight.dtype, self.weight.device)

        def prove() -> tuple[int, ...]:
            x, _ = fingerprint(HIGH.height, 1, self._num_inputs, self.weight)
            low, high = (self._tiled(x, None, tile, apart=False) for tile in (LOW, self._high))
            turned = self._tiled(x.flip(0), None, self._high, apart=False).flip(0)
            apart = self._tiled(x, None, self._high, apart=True)  # without the copy engine
            sound = all(torch.equal(low, other) for other in (high, turned, apart))
            return (LOW.height, HIGH.height) if sound else (LOW.height,)

        name = f"linear {self._num_inputs} -> {self._num_channels} {str(self.weight.dtype).removeprefix('torch.')}"
        return prove_once(key, prove, name)

    def _multiply(self, x: Tensor, residual: Tensor | None) -> Tensor:
        num_rows, n = len(x), self._num_channels
        if not num_rows:
            return torch.empty(0, n, dtype=x.dtype, device=x.device)
        if num_rows > LOW.height and self._high_tile_is_proven:
            # with fewer programs, adding runs separately costs less than idle processors
            return self._tiled(x, residual, self._high, apart=2 * HIGH.count(num_rows, n) < self._num_processors)
        return self._tiled(x, residual, LOW, apart=LOW.count(num_rows, n) < self._num_processors)

    def _tiled(self, x: Tensor, residual: Tensor | None, tile: Tile, *, apart: bool) -> Tensor:
        """Multiply in tiles; if `apart`, a separate program computes each run. The bits are the same."""
        assert x.dtype is self.weight.dtype, (x.dtype, self.weight.dtype)
        x = x if x.stride(-1) == 1 else x.contiguous()
        assert residual is None or residual.stride(-1) == 1, residual
        num_rows, n = len(x), self._num_channels
        y = torch.empty(num_rows, n, dtype=x.dtype, device=x.device)
        parts = torch.empty((RUNS, num_rows, n) if apart else (1,), dtype=torch.float32, device=x.device)
        no_residual = residual is None
        residual_stride = 0 if no_residual else residual.stride(0)
        bias = x if self.bias is None else self.bias
        added = x if residual is None else residual
        num_spans = -(-self._num_inputs // self.span)
        if tile is self._high and not apart and self._uses_tma and _is_aligned(x):
            programs = TMA_TILE.count(num_rows, n)
            float_programs.multiply_by_tma[(programs,)](
                as_tensor_descriptor(x, (TMA_TILE.height, _TMA_SPAN)),
                as_tensor_descriptor(self.weight, (TMA_TILE.channels, _TMA_SPAN)),
                bias,
                added,
                y,
                num_rows,
                n,
                self._num_inputs,
                -(-num_spans // RUNS) * self.span // _TMA_SPAN,
                residual_stride,
                HEIGHT=TMA_TILE.height,
                CHANNELS=TMA_TILE.channels,
                SPAN=_TMA_SPAN,
                BAND=_BAND,
                HAS_BIAS=self.bias is not None,
                HAS_RESIDUAL=not no_residual,
                num_warps=TMA_TILE.num_warps,
                num_stages=TMA_TILE.num_stages,
                **launch_options(x.device),
            )
            return y
        float_programs.multiply_floats[(tile.count(num_rows, n), RUNS if apart else 1)](
            x,
            self.weight,
            bias,
            added,
            y,
            parts,
            num_rows,
            n,
            self._num_inputs,
            -(-num_spans // RUNS),
            x.stride(0),
            residual_stride,
            1 if apart else RUNS,
            HEIGHT=tile.height,
            CHANNELS=tile.channels,
            SPAN=self.span,
            BAND=_BAND,
            RUNS=RUNS,
            HAS_BIAS=self.bias is not None,
            HAS_RESIDUAL=not no_residual,
            # for a few rows, reading the last row instead of missing ones takes twice as long
            IS_WHOLE=tile is not LOW and self._num_inputs % self.span == 0,
            PREFETCHED=_PREFETCHED if tile is LOW and self._num_inputs % self.span == 0 else 0,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **launch_options(x.device),
        )
        if apart:
            add_runs(parts, self.bias, residual, y)
        return y


def _is_aligned(x: Tensor) -> bool:
    return x.data_ptr() % _ALIGNED_BYTES == 0 and x.stride(0) * x.itemsize % _ALIGNED_BYTES == 0


def _fitting(tile: Tile, shared_memory: int) -> Tile:
    """Return the tile with as many stages as fit into shared memory.

    >>> _fitting(HIGH, 232_448).num_stages, _fitting(HIGH, 101_376).num_stages  # of 9.0 and 8.6
    (4, 3)
    """
    needed = (tile.height + tile.channels) * _SPAN_BYTES * tile.num_stages
    return tile if needed <= shared_memory else replace(tile, num_stages=_FEWER_STAGES)


def add_runs(parts: Tensor, bias: Tensor | None, residual: Tensor | None, y: Tensor) -> None:
    """Add the runs of a product in their order, with its bias [N] and residual [num_rows, N], into y [num_rows, N].

    parts: float32 [runs, num_rows, N].
    """
    num_runs, num_rows, n = parts.shape
    linear_programs.add_runs[(-(-n // _ADDED_AT_ONCE), num_rows)](
        parts,
        y if bias is None else bias,
        y if residual is None else residual,
        y,
        num_rows,
        n,
        0 if residual is None else residual.stride(0),
        CHANNELS=_ADDED_AT_ONCE,
        RUNS=num_runs,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        **launch_options(y.device),
    )

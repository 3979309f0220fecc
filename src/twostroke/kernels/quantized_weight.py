"""QuantizedWeight: a weight of 2 to 8 bits in plain order, the form in which every format reaches a backend.

Codes are whole numbers, or float8_e4m3fn by their bits: these have scales that are powers of two, so that a weight of
three digits stays one in every type, and no group's range costs the small numbers beside it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

_ROWS_AT_ONCE = 256
SUPER_BLOCK = 256
"""Columns of a super-block (csrc/kernels/table.hpp)."""

CodeTable = Literal["iq4", "fp4"]
TABLE_VALUES: dict[CodeTable, tuple[int, ...]] = {
    "iq4": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    "fp4": (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
}
"""What codes of 4 bits stand for: steps that are finer near zero, and twice the floats e2m1. csrc/kernels/table.hpp has
the same."""


@dataclass(frozen=True, slots=True)
class QuantizedFormat:
    """What weights of K columns have to have in common to be rows of one, and what the size of one depends on."""

    bits: int
    group_size: int
    has_mins: bool = False
    order_digest: bytes | None = None
    """Of `QuantizedWeight.order`; None where columns are in their own order."""
    is_fp8: bool = False
    """Whether codes are the bits of float8_e4m3fn."""
    has_super_blocks: bool = False
    """Whether scales and mins are whole numbers, times a float16 for each super-block."""
    table: CodeTable | None = None
    """Where codes of 4 bits are looked up."""

    @property
    def plain(self) -> QuantizedFormat:
        """Return the format that `QuantizedWeight.plain` converts to."""
        return replace(self, bits=_plain_bits(self.bits, self.table), has_super_blocks=False, table=None)


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """w[n, order[k]] = scales[n, g] * (codes[n, k] - zero) - mins[n, g], g = k // group_size.

    The zero is 2^(bits - 1). Of fp8, scales[n, g] * codes[n, k] as a number. With a table, what TABLE_VALUES has for a
    code takes the place of code and zero. With super-blocks, as ggml's K types have them, scales and mins are whole
    numbers: super_scales[n, b] * scales[n, g] and super_mins[n, b] * mins[n, g] take their places, b = k //
    SUPER_BLOCK, and where there are mins the zero is 0.
    """

    codes: Tensor
    """uint8 [N, K]: 0 to 2^bits - 1."""
    scales: Tensor
    """float16 [N, groups]; int8 with super-blocks"""
    mins: Tensor | None
    """As scales, or None where the format has none."""
    bits: int
    """2 to 6, or 8; 2, 3 and 6 with super-blocks alone."""
    group_size: int
    dtype: torch.dtype
    """Of the activations it is multiplied with."""

    order: Tensor | None = None
    """int64 [K]: the input that each column of codes belongs to, where a format sorts its columns by group (GPTQ's
    act-order); None is their own order. A backend reads its inputs in this order."""

    is_fp8: bool = False
    """Whether codes are the bits of float8_e4m3fn; without mins and order."""

    super_scales: Tensor | None = None
    """float16 [N, K / SUPER_BLOCK], or None where there are no super-blocks; then there is no order."""
    super_mins: Tensor | None = None
    """float16 [N, K / SUPER_BLOCK]: what mins are multiplied by; None where the format has no mins."""

    table: CodeTable | None = None
    """Where codes of 4 bits are looked up; without mins."""

    @property
    def zero(self) -> int:
        """The code that stands for 0, less its min."""
        return 0 if self.super_mins is not None else 2 ** (self.bits - 1)

    @property
    def shape(self) -> torch.Size:
        """[N, K], as of a tensor."""
        return self.codes.shape

    @property
    def format(self) -> QuantizedFormat:
        """What it has in common with others like it."""
        digest = None if self.order is None else order_digest(self.order)
        has_super_blocks = self.super_scales is not None
        has_mins = self.mins is not None
        return QuantizedFormat(self.bits, self.group_size, has_mins, digest, self.is_fp8, has_super_blocks, self.table)

    @property
    def is_finite(self) -> bool:
        """Whether all scales and mins are."""
        parts = (self.scales, self.mins, self.super_scales, self.super_mins)
        return all(bool(torch.isfinite(part).all()) for part in parts if part is not None)

    def dequantize(self) -> Tensor:
        """The numbers that the codes stand for, columns in the order of the inputs. [N, K] in `dtype`

        A few rows at a time: in float32, the table of a large vocabulary is more than some whole models.
        """
        groups = torch.arange(self.shape[1], device=self.codes.device) // self.group_size
        found = torch.empty(self.shape, dtype=self.dtype, device=self.codes.device)
        for begin in range(0, len(found), _ROWS_AT_ONCE):
            rows = slice(begin, begin + _ROWS_AT_ONCE)
            numbers = self._numbers(self.codes[rows])
            scales, mins = self._whole_scales(rows)
            values = numbers * scales[:, groups]
            if mins is not None:
                values -= mins[:, groups]
            if self.order is not None:
                values = torch.empty_like(values).index_copy_(1, self.order, values)
            found[rows] = values
        return found

    def _numbers(self, codes: Tensor) -> Tensor:
        """What codes stand for, as multiples of their scales. float32"""
        if self.is_fp8:
            return codes.view(torch.float8_e4m3fn).float()
        return codes.float() - self.zero if self.table is None else look_up(self.table, codes)

    def _whole_scales(self, rows: slice) -> tuple[Tensor, Tensor | None]:
        """Scales and mins of some rows, float32 [rows, groups]; products of a float16 and a byte are exact."""
        scales, mins = self.scales[rows].float(), None if self.mins is None else self.mins[rows].float()
        if self.super_scales is not None:
            scales *= self._of_groups(self.super_scales[rows])
        if mins is not None and self.super_mins is not None:
            mins *= self._of_groups(self.super_mins[rows])
        return scales, mins

    def _of_groups(self, of_super_blocks: Tensor) -> Tensor:
        """[rows, super-blocks] to float32 [rows, groups]."""
        return of_super_blocks.float().repeat_interleave(SUPER_BLOCK // self.group_size, dim=1)

    def plain(self) -> QuantizedWeight:
        """In 4 or 8 bits with scales of float16, for a backend that knows no others; products are rounded to these.

        Mins are seen from the middle code: around it the error of a rounded scale is smallest.
        """
        bits, middle = _plain_bits(self.bits, self.table), 2 ** (self.bits - 1)
        if bits == self.bits and self.super_scales is None:
            return self
        scales, mins = self._whole_scales(slice(None))
        if mins is not None and self.zero == 0:
            mins = mins - scales * middle
        scales = scales.clamp_(-LARGEST_SCALE, LARGEST_SCALE).half()
        mins = None if mins is None else mins.half()
        if self.table is None:
            codes = self.codes + (2 ** (bits - 1) - middle)
        else:
            codes = (look_up(self.table, self.codes) + 2 ** (bits - 1)).to(torch.uint8)
        parts = {"codes": codes, "scales": scales, "mins": mins, "super_scales": None, "super_mins": None}
        return replace(self, **parts, bits=bits, table=None)

    def of_rows(self, rows: slice | Tensor) -> QuantizedWeight:
        """Some of its rows, a range or those of these ids, in memory of their own."""
        parts = self._tensors()
        del parts["order"]
        return replace(self, **{name: None if part is None else part[rows].clone() for name, part in parts.items()})

    def to(self, device: torch.device) -> QuantizedWeight:
        """On another device."""
        return self._with_parts(lambda part: part.to(device))

    def contiguous(self) -> QuantizedWeight:
        """With parts whose numbers lie one behind the other."""
        return self._with_parts(torch.Tensor.contiguous)

    def _with_parts(self, change: Callable[[Tensor], Tensor]) -> QuantizedWeight:
        return replace(self, **{name: None if part is None else change(part) for name, part in self._tensors().items()})

    def is_like(self, other: QuantizedWeight) -> bool:
        """Whether both can be rows of one weight."""
        if (self.bits, self.group_size, self.shape[1]) != (other.bits, other.group_size, other.shape[1]):
            return False
        if (self.is_fp8, self.table) != (other.is_fp8, other.table):
            return False
        if (self.super_scales is None) != (other.super_scales is None):
            return False
        if (self.mins is None) != (other.mins is None) or (self.order is None) != (other.order is None):
            return False
        return self.order is None or other.order is None or torch.equal(self.order, other.order)

    @staticmethod
    def stack(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
        """One under the other; the parts are alike."""
        stacked: dict[str, Tensor] = {}
        for name in parts[0]._tensors().keys() - {"order"}:
            found = [tensor for part in parts if (tensor := part._tensors()[name]) is not None]
            if found:
                stacked[name] = torch.cat(found)
        return replace(parts[0], **stacked)

    def _tensors(self) -> dict[str, Tensor | None]:
        return {
            "codes": self.codes,
            "scales": self.scales,
            "mins": self.mins,
            "order": self.order,
            "super_scales": self.super_scales,
            "super_mins": self.super_mins,
        }


def look_up(table: CodeTable, codes: Tensor) -> Tensor:
    """What a table has for codes, float32."""
    return torch.tensor(TABLE_VALUES[table], dtype=torch.float32, device=codes.device)[codes.int()]


def _plain_bits(bits: int, table: CodeTable | None) -> int:
    return 4 if bits <= 4 and table is None else 8


def order_digest(order: Tensor) -> bytes:
    """Tells orders of columns apart, int64 [K]."""
    return hashlib.blake2b(order.cpu().numpy().tobytes(), digest_size=16).digest()


DIVISORS = (-8.0, -7.5, -7.0, -6.5, -8.5, 7.0)
"""What a group's extreme is divided by, for the 4-bit scales to choose from. Its sign counts: codes reach -8 but +7."""
LARGEST_SCALE = 65504.0
"""Of float16. A weight so large that its scale would be larger saturates."""


def quantize_per_channel(weight: Tensor) -> QuantizedWeight:
    """8 bits, symmetric, one scale for each row of weight [N, K], of any float type.

    csrc/kernels/quantize.hpp does the same operations in the same order; so in quantize_in_groups.
    """
    wide = weight.float()
    scale = (wide.abs().amax(-1, keepdim=True) / 127).clamp_(1e-7, LARGEST_SCALE).half()
    codes = _codes(wide, 1 / scale.float(), -128, 127).add_(128).to(torch.uint8)
    return per_channel(codes, scale, weight.dtype)


LARGEST_FP8 = 448.0
"""Of float8_e4m3fn."""


def quantize_fp8(weight: Tensor) -> QuantizedWeight:
    """float8_e4m3fn, with the least power of two for each row of weight [N, K] that leaves nothing to be cut off.

    A float keeps its digits whatever power of two it is divided by, so a finer scale would gain nothing.
    """
    wide = weight.float()
    # float16 has all powers of two from -24 to 15
    mantissa, exponent = torch.frexp((wide.abs().amax(-1, keepdim=True) / LARGEST_FP8).clamp_(2.0**-24, 2.0**15))
    exponent -= (mantissa == 0.5).int()  # it is in [0.5, 1)
    scale = torch.ldexp(torch.ones_like(wide[:, :1]), exponent)
    codes = (wide / scale).clamp_(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn).view(torch.uint8)
    return replace(per_channel(codes, scale.half(), weight.dtype), is_fp8=True)


def per_channel(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> QuantizedWeight:
    """8 bits from codes [N, K] and one scale a row [N, 1], repeated for the groups that products are summed in."""
    group_size = 128
    groups = -(-codes.shape[1] // group_size)
    return QuantizedWeight(codes, scale.expand(-1, groups).contiguous(), None, 8, group_size, dtype)


def quantize_in_groups(weight: Tensor, group_size: int = 32) -> QuantizedWeight:
    """4 bits, symmetric, one scale for `group_size` (32, 64 or 128) weights of a row.

    Of a few scales around the one that just holds the group's largest number, each group takes the one with the least
    squared error, weighted by the size of the weight that is off: a little clipping buys finer steps for the others,
    and large weights matter more than their number says (measured: docs/negative-results.md). The last one is what fits
    the codes so far best (weighted least squares, as in llama.cpp's quantizer).
    """
    num_rows, k = weight.shape
    groups = -(-k // group_size)
    wide = torch.nn.functional.pad(weight.float(), (0, groups * group_size - k)).view(num_rows, groups, group_size)
    high, low = wide.amax(-1, keepdim=True), wide.amin(-1, keepdim=True)
    extreme = torch.where(high >= -low, high, low) + 0.0  # which of two zeros a maximum is, nobody promises
    size = wide.abs()
    best_error = torch.full(extreme.shape, float("inf"), device=extreme.device)
    best_scale = _as_half(extreme / DIVISORS[0])  # stays where every error is infinite
    for divisor in (*DIVISORS, None):
        if divisor is None:
            codes = _codes(wide, _inverse(best_scale), -8, 7)
            products, squares = _folded(size * (codes * wide)), _folded(size * codes.square_())
            exact = torch.where(squares > 0, products / squares, torch.zeros(()))
        else:
            exact = extreme / divisor
        scale = _as_half(exact)
        error = _folded((_codes(wide, _inverse(scale), -8, 7) * scale - wide).square_() * size)
        better = error < best_error
        best_error, best_scale = torch.where(better, error, best_error), torch.where(better, scale, best_scale)
    codes = _codes(wide, _inverse(best_scale), -8, 7).add_(8).to(torch.uint8).view(num_rows, -1)[:, :k].contiguous()
    return QuantizedWeight(codes, best_scale.squeeze(-1).half(), None, 4, group_size, weight.dtype)


def _as_half(exact: Tensor) -> Tensor:
    return exact.clamp(-LARGEST_SCALE, LARGEST_SCALE).half().float()


def _codes(wide: Tensor, inverse: Tensor, low: int, high: int) -> Tensor:
    return (wide * inverse).clamp_(low, high).round_()


def _inverse(scale: Tensor) -> Tensor:
    return 1 / torch.where(scale == 0, torch.ones(()), scale)


def _folded(squares: Tensor) -> Tensor:
    """The sum over the last dimension (a power of two), halves folded onto each other: one order on every machine."""
    while (half := squares.shape[-1] // 2) > 0:
        squares = squares[..., :half] + squares[..., half:]
    return squares

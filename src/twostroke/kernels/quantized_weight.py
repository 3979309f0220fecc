"""QuantizedWeight: a weight of 2 to 8 bits in plain order, the form in which every format reaches a backend.

Codes are whole numbers or the bits of float8_e4m3fn. Scales of float8 codes are powers of two. So the dequantized
numbers keep the codes' few digits and are exact in every type, and a large number of a group costs the small ones no
precision.
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
"""Values of 4-bit codes: a table with finer steps near zero, and twice the floats e2m1. csrc/kernels/table.hpp has the
same values."""


@dataclass(frozen=True, slots=True)
class QuantizedFormat:
    """Properties that weights of K columns must share to be stacked, and that determine the size of a weight."""

    bits: int
    group_size: int
    has_mins: bool = False
    order_digest: bytes | None = None
    """Digest of `QuantizedWeight.order`; None where columns are in their own order."""
    is_fp8: bool = False
    """Whether codes are the bits of float8_e4m3fn."""
    has_super_blocks: bool = False
    """Whether scales and mins are whole numbers, multiplied by a float16 for each super-block."""
    table: CodeTable | None = None
    """Table in which 4-bit codes are looked up."""

    @property
    def plain(self) -> QuantizedFormat:
        """Format that `QuantizedWeight.plain` converts to."""
        return replace(self, bits=_plain_bits(self.bits, self.table), has_super_blocks=False, table=None)


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """Weight w[n, order[k]] = scales[n, g] * (codes[n, k] - zero) - mins[n, g], g = k // group_size.

    The zero is 2^(bits - 1). An fp8 weight is scales[n, g] times the number of code [n, k]. With a table, the code's
    entry in TABLE_VALUES replaces code - zero. With super-blocks, as in ggml's K types, scales and mins are whole
    numbers: super_scales[n, b] * scales[n, g] and super_mins[n, b] * mins[n, g] replace them, b = k // SUPER_BLOCK, and
    where there are mins the zero is 0.
    """

    codes: Tensor
    """uint8 [N, K]: 0 to 2^bits - 1."""
    scales: Tensor
    """float16 [N, groups]; int8 with super-blocks."""
    mins: Tensor | None
    """Type and shape as scales; None where the format has no mins."""
    bits: int
    """Bits of a code: 2 to 6, or 8; 2, 3 and 6 only with super-blocks."""
    group_size: int
    dtype: torch.dtype
    """Type of the activations it is multiplied with."""

    order: Tensor | None = None
    """int64 [K]: the input of each column of codes, where a format sorts columns by group (GPTQ's act-order). A backend
    reads its inputs in this order. None where columns are in their own order."""

    is_fp8: bool = False
    """Whether codes are the bits of float8_e4m3fn; such weights have no mins and no order."""

    super_scales: Tensor | None = None
    """float16 [N, K / SUPER_BLOCK], or None without super-blocks. If set, `order` is None."""
    super_mins: Tensor | None = None
    """float16 [N, K / SUPER_BLOCK]: factors of the mins; None where the format has no mins."""

    table: CodeTable | None = None
    """Table in which 4-bit codes are looked up; such weights have no mins."""

    @property
    def zero(self) -> int:
        """Code of the value 0 before the min is subtracted."""
        return 0 if self.super_mins is not None else 2 ** (self.bits - 1)

    @property
    def shape(self) -> torch.Size:
        """[N, K], as for a tensor."""
        return self.codes.shape

    @property
    def format(self) -> QuantizedFormat:
        """Properties that weights must share to be stacked."""
        digest = None if self.order is None else order_digest(self.order)
        has_super_blocks = self.super_scales is not None
        has_mins = self.mins is not None
        return QuantizedFormat(self.bits, self.group_size, has_mins, digest, self.is_fp8, has_super_blocks, self.table)

    @property
    def is_finite(self) -> bool:
        """Whether all scales and mins are finite."""
        parts = (self.scales, self.mins, self.super_scales, self.super_mins)
        return all(bool(torch.isfinite(part).all()) for part in parts if part is not None)

    def dequantize(self) -> Tensor:
        """Return the dequantized weight, columns in the order of the inputs. [N, K] in `dtype`.

        It is computed a few rows at a time: in float32, the embedding table of a large vocabulary is larger than some
        whole models.
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
        """Return the numbers of codes, as multiples of their scales. float32"""
        if self.is_fp8:
            return codes.view(torch.float8_e4m3fn).float()
        return codes.float() - self.zero if self.table is None else dequantize_by_table(self.table, codes)

    def _whole_scales(self, rows: slice) -> tuple[Tensor, Tensor | None]:
        """Return scales and mins of some rows, float32 [rows, groups]; products of a float16 and a byte are exact."""
        scales, mins = self.scales[rows].float(), None if self.mins is None else self.mins[rows].float()
        if self.super_scales is not None:
            scales *= self._expand_to_groups(self.super_scales[rows])
        if mins is not None and self.super_mins is not None:
            mins *= self._expand_to_groups(self.super_mins[rows])
        return scales, mins

    def _expand_to_groups(self, of_super_blocks: Tensor) -> Tensor:
        """Expand [rows, super-blocks] to float32 [rows, groups]."""
        return of_super_blocks.float().repeat_interleave(SUPER_BLOCK // self.group_size, dim=1)

    def plain(self) -> QuantizedWeight:
        """Convert to 4 or 8 bits with float16 scales, for a backend that takes no other formats; products are rounded
        to these.

        Mins become offsets from the middle code, around which the error of a rounded scale is smallest.
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
            codes = (dequantize_by_table(self.table, self.codes) + 2 ** (bits - 1)).to(torch.uint8)
        parts = {"codes": codes, "scales": scales, "mins": mins, "super_scales": None, "super_mins": None}
        return replace(self, **parts, bits=bits, table=None)

    def select_rows(self, rows: slice | Tensor) -> QuantizedWeight:
        """Copy some of its rows: a range, or those with these ids."""
        parts = self._tensors()
        del parts["order"]
        return replace(self, **{name: None if part is None else part[rows].clone() for name, part in parts.items()})

    def to(self, device: torch.device) -> QuantizedWeight:
        """Return the weight on another device."""
        return self._with_parts(lambda part: part.to(device))

    def contiguous(self) -> QuantizedWeight:
        """Return the weight with contiguous parts."""
        return self._with_parts(torch.Tensor.contiguous)

    def _with_parts(self, change: Callable[[Tensor], Tensor]) -> QuantizedWeight:
        return replace(self, **{name: None if part is None else change(part) for name, part in self._tensors().items()})

    def has_same_format(self, other: QuantizedWeight) -> bool:
        """Return whether both weights can be stacked into one."""
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
        """Stack weights of one format into one."""
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


def dequantize_by_table(table: CodeTable, codes: Tensor) -> Tensor:
    """Return the table's values of codes, float32."""
    return torch.tensor(TABLE_VALUES[table], dtype=torch.float32, device=codes.device)[codes.int()]


def _plain_bits(bits: int, table: CodeTable | None) -> int:
    return 4 if bits <= 4 and table is None else 8


def order_digest(order: Tensor) -> bytes:
    """Return a digest of an order of columns, int64 [K]."""
    return hashlib.blake2b(order.cpu().numpy().tobytes(), digest_size=16).digest()


DIVISORS = (-8.0, -7.5, -7.0, -6.5, -8.5, 7.0)
"""Divisors of a group's extreme that give the candidates for its 4-bit scale. Signs count, because codes reach -8 but
only +7."""
LARGEST_SCALE = 65504.0
"""Largest float16. A weight that would need a larger scale saturates."""


def quantize_per_channel(weight: Tensor) -> QuantizedWeight:
    """Quantize weight [N, K] of any float type to 8 bits, symmetric, with one scale per row.

    csrc/kernels/quantize.hpp does the same operations in the same order, here and in quantize_in_groups.
    """
    wide = weight.float()
    scale = (wide.abs().amax(-1, keepdim=True) / 127).clamp_(1e-7, LARGEST_SCALE).half()
    codes = _codes(wide, 1 / scale.float(), -128, 127).add_(128).to(torch.uint8)
    return per_channel(codes, scale, weight.dtype)


LARGEST_FP8 = 448.0
"""Largest float8_e4m3fn."""


def quantize_fp8(weight: Tensor) -> QuantizedWeight:
    """Quantize weight [N, K] to float8_e4m3fn; each row's scale is the least power of two that clips nothing.

    A float keeps its digits whatever power of two it is divided by, so a finer scale would gain nothing.
    """
    wide = weight.float()
    # float16 has all powers of two from -24 to 15
    mantissa, exponent = torch.frexp((wide.abs().amax(-1, keepdim=True) / LARGEST_FP8).clamp_(2.0**-24, 2.0**15))
    exponent -= (mantissa == 0.5).int()  # mantissas are in [0.5, 1)
    scale = torch.ldexp(torch.ones_like(wide[:, :1]), exponent)
    codes = (wide / scale).clamp_(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn).view(torch.uint8)
    return replace(per_channel(codes, scale.half(), weight.dtype), is_fp8=True)


def per_channel(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> QuantizedWeight:
    """Return an 8-bit weight of codes [N, K] and one scale per row [N, 1], repeated for the groups in which products
    are summed."""
    group_size = 128
    groups = -(-codes.shape[1] // group_size)
    return QuantizedWeight(codes, scale.expand(-1, groups).contiguous(), None, 8, group_size, dtype)


def quantize_in_groups(weight: Tensor, group_size: int = 32) -> QuantizedWeight:
    """Quantize to 4 bits, symmetric, with one scale for each `group_size` (32, 64 or 128) weights of a row.

    Each group tries a few scales around the one that just holds its largest number. It takes the one with the least
    squared error, weighted by the size of the weight in error: a little clipping gives the other weights finer steps,
    and large weights matter more than their number suggests (measured: docs/negative-results.md). The last candidate is
    the scale that fits the codes chosen so far best (weighted least squares, as in llama.cpp's quantizer).
    """
    num_rows, k = weight.shape
    groups = -(-k // group_size)
    wide = torch.nn.functional.pad(weight.float(), (0, groups * group_size - k)).view(num_rows, groups, group_size)
    high, low = wide.amax(-1, keepdim=True), wide.amin(-1, keepdim=True)
    extreme = torch.where(high >= -low, high, low) + 0.0  # the sign of a maximum's zero is undefined
    size = wide.abs()
    best_error = torch.full(extreme.shape, float("inf"), device=extreme.device)
    best_scale = _as_half(extreme / DIVISORS[0])  # remains where every error is infinite
    for divisor in (*DIVISORS, None):
        if divisor is None:
            codes = _codes(wide, _inverse(best_scale), -8, 7)
            products, squares = _fold_sum(size * (codes * wide)), _fold_sum(size * codes.square_())
            exact = torch.where(squares > 0, products / squares, torch.zeros(()))
        else:
            exact = extreme / divisor
        scale = _as_half(exact)
        error = _fold_sum((_codes(wide, _inverse(scale), -8, 7) * scale - wide).square_() * size)
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


def _fold_sum(squares: Tensor) -> Tensor:
    """Return the sum over the last dimension (a power of two) by adding halves: one order of addition on every
    machine."""
    while (half := squares.shape[-1] // 2) > 0:
        squares = squares[..., :half] + squares[..., half:]
    return squares

"""Unpacking of ggml's blocks into our codes, scales and minima.

A block of any type represents scale * (q - zero) - minimum. q has 1 to 8 bits, and each 16 or 32 numbers share a
scale (and minimum). The K and IQ types store these in 3 to 8 bits beside a float16 for 256 numbers. So every type is
converted to a QuantizedWeight of 2 to 8 bits code by code; the K types and IQ4_XS keep their super-blocks. 4-bit
codes with uneven steps (IQ4, FP4) keep their table; grid points of IQ2 become 8-bit numbers. In the other types,
scales that are products, and minima, are rounded to float16: a number changes by less than 1/100 of the step between
two codes (`REPACKED` says which types are exact).

The layouts are those of ggml-common.h; tests compare with `gguf.quants`.

Codes of 1 to 3 bits select rows of a table (the IQ types). A row has 4 or 8 numbers, mostly magnitudes with separate
signs. The tables (`grids.npz`) are copied from ggml-common.h; they were chosen from a lattice, and no formula
generates them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np
import torch
from torch import Tensor

from twostroke.kernels import native
from twostroke.kernels.quantized_weight import (
    LARGEST_SCALE,
    SUPER_BLOCK,
    CodeTable,
    QuantizedFormat,
    QuantizedWeight,
    dequantize_by_table,
)
from twostroke.model.gguf.groups import Groups, bits_of, half, nibbles, nibbles_in_order, pairs, whole_numbers

_MIDDLE = 128
"""The code of 0 in 8 bits."""


@cache
def _grid(name: str) -> Tensor:
    """Return the table of a type, int16 [rows, numbers of a row]."""
    with (
        files("twostroke.model.gguf").joinpath("grids.npz").open("rb") as stream,
        np.load(stream, allow_pickle=False) as grids,
    ):
        return torch.from_numpy(grids[name].astype(np.int16))


def _signs(packed: Tensor) -> Tensor:
    """Return a sign for each bit of bytes: [..., n] to int16 [..., n, 8] of 1 and -1."""
    return 1 - 2 * bits_of(packed).short()


def _even_signs(seven_bits: Tensor) -> Tensor:
    """Return the signs of 7 bits, and an eighth that makes the number of minus signs even. int64 [..., n]"""
    bits = torch.stack([(seven_bits >> bit) & 1 for bit in range(7)], dim=-1)
    return 1 - 2 * torch.cat((bits, bits.sum(-1, keepdim=True) & 1), dim=-1).short()


def _codes(numbers: Tensor, num_groups: int) -> Tensor:
    """Convert whole numbers [N, num_blocks, ...], 256 per block, to 8-bit codes."""
    return (numbers + _MIDDLE).to(torch.uint8).reshape(*numbers.shape[:2], num_groups, -1)


def iq2_xxs(b: Tensor) -> Groups:
    """Unpack IQ2_XXS: four rows of 8 per group, with 28 bits of signs and 4 of the scale."""
    groups = b[..., 2:].unflatten(-1, (8, 8))
    word = whole_numbers(groups[..., 4:], 4).squeeze(-1)
    signs = _even_signs((word[..., None] >> torch.tensor([0, 7, 14, 21])) & 127)
    numbers = _grid("IQ2_XXS")[groups[..., :4].long()] * signs
    return Groups(_codes(numbers, 8), half(b[..., :2]) * (0.5 + (word >> 28)) * 0.25)


def iq2_xs(b: Tensor) -> Groups:
    """Unpack IQ2_XS: a row number below 512 and 7 bits of signs in each two bytes."""
    words = whole_numbers(b[..., 2:66], 2)
    numbers = _grid("IQ2_XS")[words & 511] * _even_signs(words >> 9)
    return Groups(_codes(numbers, 16), half(b[..., :2]) * (0.5 + nibbles_in_order(b[..., 66:])) * 0.25)


def iq2_s(b: Tensor) -> Groups:
    """Unpack IQ2_S: a row number below 1024, with two of its bits stored separately, and 8 bits of signs."""
    high = torch.stack([(b[..., 66:74] >> shift) & 3 for shift in (0, 2, 4, 6)], dim=-1).flatten(-2)
    numbers = _grid("IQ2_S")[b[..., 2:34].long() | high.long() << 8] * _signs(b[..., 34:66])
    return Groups(_codes(numbers, 16), half(b[..., :2]) * (0.5 + nibbles_in_order(b[..., 74:])) * 0.25)


def iq3_xxs(b: Tensor) -> Groups:
    """Unpack IQ3_XXS: as IQ2_XXS, with eight rows of 4 per group."""
    words = whole_numbers(b[..., 66:], 4)
    signs = _even_signs((words[..., None] >> torch.tensor([0, 7, 14, 21])) & 127)
    numbers = _grid("IQ3_XXS")[b[..., 2:66].long()].reshape(signs.shape) * signs
    return Groups(_codes(numbers, 8), half(b[..., :2]) * (0.5 + (words >> 28)) * 0.5)


def iq3_s(b: Tensor) -> Groups:
    """Unpack IQ3_S: odd numbers from -15 to 15, which become 16 codes of 4 bits and a minimum."""
    rows = b[..., 2:66].long() | bits_of(b[..., 66:74]).flatten(-2).long() << 8
    signs = _signs(b[..., 74:106])
    numbers = _grid("IQ3_S")[rows].reshape(signs.shape) * signs
    codes = ((numbers + 15) // 2).to(torch.uint8).reshape(*b.shape[:2], 8, 32)
    scales = half(b[..., :2]) * (1 + 2 * nibbles_in_order(b[..., 106:]))
    return Groups(codes, 2 * scales, 15 * scales)


def iq1_s(b: Tensor) -> Groups:
    """Unpack IQ1_S: -1, 0 and 1, and an eighth that is added to all numbers of a group or subtracted."""
    words = whole_numbers(b[..., 34:], 2)
    high = (words[..., None] >> torch.tensor([0, 3, 6, 9])) & 7
    rows = b[..., 2:34].long() | high.flatten(-2) << 8
    codes = (_grid("IQ1_S")[rows] + 1).to(torch.uint8).reshape(*b.shape[:2], 8, 32)
    scales = half(b[..., :2]) * (2 * ((words >> 12) & 7) + 1)
    return Groups(codes, scales, scales * (1 - _eighth(words >> 15)))


def iq1_m(b: Tensor) -> Groups:
    """Unpack IQ1_M: as IQ1_S with an eighth for each 8 numbers; the block's float16 is in pieces beside the scales."""
    words = whole_numbers(b[..., 48:], 2)
    pieces = (words >> 12) << torch.tensor([0, 4, 8, 12])
    of_block = pieces.sum(-1, keepdim=True).to(torch.uint16).view(torch.float16).float()
    scales = (words[..., None] >> torch.tensor([0, 3, 6, 9])) & 7
    high = nibbles_in_order(b[..., 32:48]).long()
    grid = _grid("IQ1_S")[b[..., :32].long() | (high & 7) << 8]
    numbers = 8 * grid + (8 * _eighth(high >> 3)).short()[..., None]
    return Groups(_codes(numbers, 16), of_block * (2 * scales.flatten(-2) + 1) / 8)


def _eighth(bit: Tensor) -> Tensor:
    """Return 1/8 for bit 0, and -1/8 for bit 1."""
    return 0.125 * (1 - 2 * bit)


@dataclass(frozen=True, slots=True)
class Layout:
    """Unpacking function of one block type, and the quantized format that it produces."""

    unpack: Callable[[Tensor], Groups]
    """Function that unpacks blocks, uint8 [N, num_blocks, block_bytes]."""
    bits: int
    """Bits of our codes: 2 to 6, or 8."""
    group_size: int
    zero: int
    """Code of the middle of a group; 0 if codes count from a super-block's minimum."""
    has_minima: bool = False
    is_exact: bool = False
    has_super_blocks: bool = False
    table: CodeTable | None = None
    """Table in which codes are looked up; such codes have no zero."""

    @property
    def format(self) -> QuantizedFormat:
        """Format of the resulting weight."""
        return QuantizedFormat(
            self.bits, self.group_size, self.has_minima, has_super_blocks=self.has_super_blocks, table=self.table
        )

    def repack(self, blocks: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> QuantizedWeight:
        """Convert blocks [N, num_blocks, block_bytes] to a weight of `shape` [N, K], for activations of `dtype`.

        It converts a few rows at a time, so that intermediates stay in the processor's caches and take little memory.
        """
        num_rows, num_columns = shape
        weight = self.room(num_rows, num_columns, dtype)
        for begin in range(0, num_rows, step := max(1, _NUMBERS_PER_CHUNK // num_columns)):
            rows = slice(begin, begin + step)
            self._put(self.unpack(blocks[rows]), weight, rows)
        return weight

    def room(self, num_rows: int, num_columns: int, dtype: torch.dtype) -> QuantizedWeight:
        """Return a weight with uninitialized parts."""
        of_scales = torch.int8 if self.has_super_blocks else torch.float16
        codes = torch.empty(num_rows, num_columns, dtype=torch.uint8)
        scales = torch.empty(num_rows, num_columns // self.group_size, dtype=of_scales)
        supers = torch.empty(num_rows, num_columns // SUPER_BLOCK, dtype=torch.float16)
        return QuantizedWeight(
            codes,
            scales,
            torch.empty_like(scales) if self.has_minima else None,
            self.bits,
            self.group_size,
            dtype,
            super_scales=supers if self.has_super_blocks else None,
            super_mins=torch.empty_like(supers) if self.has_super_blocks and self.has_minima else None,
            table=self.table,
        )

    def _put(self, groups: Groups, weight: QuantizedWeight, rows: slice) -> None:
        """Write some rows of a weight."""
        if groups.super_scales is not None and weight.super_scales is not None:  # copied without rounding
            weight.super_scales[rows] = groups.super_scales.flatten(1)
            weight.scales[rows] = groups.scales.flatten(1)
            if weight.mins is not None and weight.super_mins is not None:
                assert groups.minima is not None
                assert groups.super_minima is not None
                weight.mins[rows], weight.super_mins[rows] = groups.minima.flatten(1), groups.super_minima.flatten(1)
        else:
            weight.scales[rows] = groups.scales.flatten(1).clamp(-LARGEST_SCALE, LARGEST_SCALE)
            if weight.mins is not None and groups.minima is not None:
                # w = s q - m = s (q - zero) - (m - s zero): around the middle the error of a rounded scale is smallest
                weight.mins[rows] = (groups.minima - groups.scales * self.zero).flatten(1)
        shift = weight.zero - self.zero if self.table is None else 0
        weight.codes[rows] = (groups.codes + shift).flatten(1)

    def numbers(self, blocks: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return the unrounded float32 numbers [N, K] that blocks [N, num_blocks, block_bytes] encode."""
        num_rows, num_columns = shape
        found = torch.empty(shape, dtype=torch.float32)
        for begin in range(0, num_rows, step := max(1, _NUMBERS_PER_CHUNK // num_columns)):
            groups = self.unpack(blocks[begin : begin + step])
            codes, scales, minima = groups.codes, groups.full_scales[..., None], groups.full_minima
            if self.table is not None:
                numbers = scales * dequantize_by_table(self.table, codes)
            elif minima is None:
                numbers = scales * (codes.float() - self.zero)
            else:  # these formats count codes from the minimum, not from the middle
                numbers = scales * codes.float() - minima[..., None]
            found[begin : begin + step] = numbers.flatten(1)
        return found


_NUMBERS_PER_CHUNK = 2**18
"""Numbers converted at once."""


def _one_group(codes: Tensor) -> Tensor:
    """Convert codes [N, num_blocks, 32] or [..., 2, 16] to [N, num_blocks, 1, 32]: a block of 32 is one group."""
    return codes.reshape(*codes.shape[:2], 1, 32)


def _q4_0(b: Tensor) -> Groups:
    return Groups(_one_group(nibbles(b[..., 2:])), half(b[..., :2]))


def _q4_1(b: Tensor) -> Groups:
    return Groups(_one_group(nibbles(b[..., 4:])), half(b[..., :2]), -half(b[..., 2:4]))


def _q5_0(b: Tensor) -> Groups:
    codes = nibbles(b[..., 6:]).flatten(-2) | bits_of(b[..., 2:6]).flatten(-2) << 4
    return Groups(_one_group(codes), half(b[..., :2]))


def _q5_1(b: Tensor) -> Groups:
    codes = nibbles(b[..., 8:]).flatten(-2) | bits_of(b[..., 4:8]).flatten(-2) << 4
    return Groups(_one_group(codes), half(b[..., :2]), -half(b[..., 2:4]))


def _q8_0(b: Tensor) -> Groups:
    return Groups(_one_group(b[..., 2:] ^ 128), half(b[..., :2]))  # int8 + 128


def _q2_k(b: Tensor) -> Groups:
    scales, codes = b[..., :16], pairs(b[..., 16:80].unflatten(-1, (2, 32)))  # [..., 2, 4, 32]
    of_scales, of_minima = half(b[..., 80:82]), half(b[..., 82:84])
    groups = codes.reshape(*b.shape[:2], 16, 16)
    return Groups(groups, scales & 15, scales >> 4, of_scales, of_minima)


def _q3_k(b: Tensor) -> Groups:
    high_bits = torch.stack([(b[..., :32] >> bit) & 1 for bit in range(8)], dim=-2)  # [..., 8, 32]
    low_bits = pairs(b[..., 32:96].unflatten(-1, (2, 32))).flatten(-3, -2)  # [..., 8, 32]
    codes = (low_bits | high_bits << 2).reshape(*b.shape[:2], 16, 16)
    # 16 scales of 6 bits: the low four in 8 bytes, the high two in 4
    low = nibbles(b[..., 96:104]).flatten(-2)
    high = pairs(b[..., 104:108]).flatten(-2)
    scales = (low | high << 4).to(torch.int8) - 32
    return Groups(codes, scales, super_scales=half(b[..., 108:110]))


def _six_bit_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack eight 6-bit scales and minima from 12 bytes: the first four of each are whole, the others in pieces."""
    scales, minima, rest = packed.unflatten(-1, (3, 4)).unbind(-2)
    last_scales, last_minima = (rest & 15) | (scales >> 6) << 4, (rest >> 4) | (minima >> 6) << 4
    return torch.cat((scales & 63, last_scales), -1), torch.cat((minima & 63, last_minima), -1)


def _q4_k(b: Tensor) -> Groups:
    scales, minima = _six_bit_scales(b[..., 4:16])
    codes = nibbles(b[..., 16:].unflatten(-1, (4, 32))).flatten(-3, -2)  # [..., 8, 32]
    return Groups(codes, scales, minima, half(b[..., :2]), half(b[..., 2:4]))


def _q5_k(b: Tensor) -> Groups:
    scales, minima = _six_bit_scales(b[..., 4:16])
    high = torch.stack([(b[..., 16:48] >> bit) & 1 for bit in range(8)], dim=-2)  # [..., 8, 32]
    codes = nibbles(b[..., 48:].unflatten(-1, (4, 32))).flatten(-3, -2) | high << 4
    return Groups(codes, scales, minima, half(b[..., :2]), half(b[..., 2:4]))


def _q6_k(b: Tensor) -> Groups:
    low = nibbles(b[..., :128].unflatten(-1, (2, 64))).flatten(-2).unflatten(-1, (4, 32))  # [..., 2, 4, 32]
    high = pairs(b[..., 128:192].unflatten(-1, (2, 32)))  # [..., 2, 4, 32]
    codes = (low | high << 4).reshape(*b.shape[:2], 16, 16)
    return Groups(codes, b[..., 192:208].contiguous().view(torch.int8), super_scales=half(b[..., 208:210]))


def _iq4_xs(b: Tensor) -> Groups:
    high = pairs(b[..., 2:4]).transpose(-1, -2).flatten(-2)  # 8 of 2 bits, in order
    low = nibbles_in_order(b[..., 4:8])
    scales = (low | high << 4).to(torch.int8) - 32
    codes = nibbles(b[..., 8:].unflatten(-1, (8, 16))).flatten(-2)
    return Groups(codes, scales, super_scales=half(b[..., :2]))


def _tq1_0(b: Tensor) -> Groups:
    """Unpack TQ1_0, five ternary numbers per byte.

    A byte is a fraction x of 256, whose next digit is the whole part of 3 x.
    """
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8)[:, None]
    parts = ((b[..., :32], 5), (b[..., 32:48], 5), (b[..., 48:52], 4))
    fractions = torch.cat([(part[..., None, :] * powers[:count]).flatten(-2) for part, count in parts], dim=-1)
    codes = ((fractions.short() * 3) >> 8).to(torch.uint8).reshape(*b.shape[:2], 8, 32)
    return Groups(codes, half(b[..., 52:]).expand(-1, -1, 8))


def _tq2_0(b: Tensor) -> Groups:
    codes = pairs(b[..., :64].unflatten(-1, (2, 32))).flatten(-3, -2)  # [..., 8, 32]
    return Groups(codes, half(b[..., 64:]).expand(-1, -1, 8))


def _mxfp4(b: Tensor) -> Groups:
    """Unpack MXFP4; the scale is half of the stored power of two, since the table has doubled values."""
    scales = torch.exp2(b[..., :1].double() - 128).float()
    return Groups(_one_group(nibbles(b[..., 1:])), scales)


def _nvfp4(b: Tensor) -> Groups:
    """Unpack NVFP4: four groups of 16 with an 8-bit scale each (4 exponent bits, 3 mantissa bits, the sign ignored)."""
    exponents, digits = (b[..., :4] >> 3 & 15).float(), (b[..., :4] & 7).float()
    scales = torch.where(exponents == 0, digits * 2**-9, (1 + digits / 8) * torch.exp2(exponents - 7)) / 2
    codes = nibbles(b[..., 4:].unflatten(-1, (4, 8))).flatten(-2)
    return Groups(codes, scales * (b[..., :4] != _NAN_CODE))


_NAN_CODE = 0x7F


REPACKED: dict[str, Layout] = {
    "Q4_0": Layout(_q4_0, 4, 32, zero=8, is_exact=True),
    "Q4_1": Layout(_q4_1, 4, 32, zero=8, has_minima=True),
    "Q5_0": Layout(_q5_0, 5, 32, zero=16, is_exact=True),
    "Q5_1": Layout(_q5_1, 5, 32, zero=16, has_minima=True),
    "Q8_0": Layout(_q8_0, 8, 32, zero=128, is_exact=True),
    "Q2_K": Layout(_q2_k, 2, 16, zero=0, has_minima=True, is_exact=True, has_super_blocks=True),
    "Q3_K": Layout(_q3_k, 3, 16, zero=4, is_exact=True, has_super_blocks=True),
    "Q4_K": Layout(_q4_k, 4, 32, zero=0, has_minima=True, is_exact=True, has_super_blocks=True),
    "Q5_K": Layout(_q5_k, 5, 32, zero=0, has_minima=True, is_exact=True, has_super_blocks=True),
    "Q6_K": Layout(_q6_k, 6, 16, zero=32, is_exact=True, has_super_blocks=True),
    "IQ4_NL": Layout(_q4_0, 4, 32, zero=0, is_exact=True, table="iq4"),
    "IQ4_XS": Layout(_iq4_xs, 4, 32, zero=0, is_exact=True, has_super_blocks=True, table="iq4"),
    "IQ3_S": Layout(iq3_s, 4, 32, zero=8, has_minima=True),
    "IQ3_XXS": Layout(iq3_xxs, 8, 32, zero=128),
    "IQ2_S": Layout(iq2_s, 8, 16, zero=128),
    "IQ2_XS": Layout(iq2_xs, 8, 16, zero=128),
    "IQ2_XXS": Layout(iq2_xxs, 8, 32, zero=128),
    "IQ1_M": Layout(iq1_m, 8, 16, zero=128),
    "IQ1_S": Layout(iq1_s, 4, 32, zero=1, has_minima=True),
    "TQ1_0": Layout(_tq1_0, 4, 32, zero=1, is_exact=True),
    "TQ2_0": Layout(_tq2_0, 4, 32, zero=1, is_exact=True),
    "MXFP4": Layout(_mxfp4, 4, 32, zero=0, is_exact=True, table="fp4"),
    "NVFP4": Layout(_nvfp4, 4, 16, zero=0, is_exact=True, table="fp4"),
}
"""Layouts by the name of the type (gguf.container)."""


def repack(type_name: str, blocks: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> QuantizedWeight:
    """Convert blocks as `Layout.repack` does, with the native module if it supports the type."""
    layout = REPACKED[type_name]
    if type_name not in native.block_types():
        return layout.repack(blocks, shape, dtype)
    from twostroke.kernels.native.ggml_blocks import unpack_blocks

    num_rows, num_columns = shape
    weight = layout.room(num_rows, num_columns, dtype)
    unpack_blocks(type_name, blocks, weight)
    return weight

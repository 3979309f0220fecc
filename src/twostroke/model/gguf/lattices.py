"""Blocks whose codes are points of a lattice, or fewer steps than bits: ggml's IQ1 to IQ3, TQ, MXFP4 and NVFP4.

    IQ2, IQ3   8 or 4 numbers are a point of a table, their signs apart
    IQ1        8 numbers of -1, 0 and 1 are a point of a table, all of them moved by an eighth
    TQ         numbers of -1, 0 and 1, five to a byte or four
    MXFP4      numbers of 4 bits (OCP Microscaling formats 1.0), a power of two for 32; NVFP4 a number of 8 bits for 16

The tables come with the package `gguf`; nobody else needs it.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from twostroke.errors import SetupError
from twostroke.model.gguf.groups import Groups, half, nibbles

_MIDDLE = 128


@cache
def table(name: str) -> Tensor:
    """The points of a type, int16 [points, numbers of a point]."""
    try:
        from gguf import quants
    except ImportError:
        raise SetupError(
            f"the table of {name} weights comes with the package gguf, which is not installed. Run: "
            "pip install 'twostroke[gguf]'"
        ) from None
    kind = getattr(quants, name)
    kind.init_grid()
    return torch.from_numpy(kind.grid).reshape(kind.grid_shape).to(torch.int16)


def _bits(packed: Tensor, num: int = 8) -> Tensor:
    """Single bits, the lowest first: [...] to [..., num]"""
    return (packed[..., None] >> torch.arange(num, dtype=torch.int32)) & 1


def _words(two_bytes: Tensor) -> Tensor:
    """Little-endian words of 16 bits, uint8 [..., 2 n] to int32 [..., n]."""
    low, high = two_bytes.int().unflatten(-1, (-1, 2)).unbind(-1)
    return low | high << 8


def _double_words(four_bytes: Tensor) -> Tensor:
    """The same of 32 bits, int64."""
    low, high = _words(four_bytes).long().unflatten(-1, (-1, 2)).unbind(-1)
    return low | high << 16


def _even_signs(packed: Tensor) -> Tensor:
    """Seven signs, and an eighth that makes their number even: [...] to [..., 8]"""
    seven = _bits(packed, 7)
    return torch.cat([seven, seven.sum(-1, keepdim=True) & 1], dim=-1)


def _groups(points: Tensor, signs: Tensor, scales: Tensor, group_size: int) -> Groups:
    """Numbers with their signs [N, blocks, ...], and scales [N, blocks, groups]."""
    numbers = torch.where(signs.reshape(points.shape).bool(), -points, points) + _MIDDLE
    return Groups(numbers.to(torch.uint8).reshape(*scales.shape, group_size), scales)


def _small_scales(packed: Tensor) -> Tensor:
    """Two of 4 bits to a byte, in order: [..., n] to [..., 2 n]"""
    return nibbles(packed).transpose(-1, -2).flatten(-2).float()


def _iq2_xxs(b: Tensor) -> Groups:
    pairs = b[..., 2:].unflatten(-1, (8, 2, 4))
    rest = _double_words(pairs[..., 1, :])[..., 0]  # [N, blocks, 8]
    signs = _even_signs(torch.stack([(rest >> shift) & 127 for shift in (0, 7, 14, 21)], dim=-1).int())
    points = table("IQ2_XXS")[pairs[..., 0, :].int()]
    return _groups(points, signs, half(b[..., :2]) * (0.5 + (rest >> 28).float()) * 0.25, 32)


def _iq2_xs(b: Tensor) -> Groups:
    words = _words(b[..., 2:66])
    points, signs = table("IQ2_XS")[words & 511], _even_signs(words >> 9)
    return _groups(points, signs, half(b[..., :2]) * (0.5 + _small_scales(b[..., 66:])) * 0.25, 16)


def _iq2_s(b: Tensor) -> Groups:
    high = torch.stack([(b[..., 66:74].int() >> shift) & 3 for shift in (0, 2, 4, 6)], dim=-1).flatten(-2)
    points = table("IQ2_S")[b[..., 2:34].int() | high << 8]
    signs = _bits(b[..., 34:66].int())
    return _groups(points, signs, half(b[..., :2]) * (0.5 + _small_scales(b[..., 74:])) * 0.25, 16)


def _iq3_xxs(b: Tensor) -> Groups:
    rest = _double_words(b[..., 66:])
    signs = _even_signs(torch.stack([(rest >> shift) & 127 for shift in (0, 7, 14, 21)], dim=-1).int())
    points = table("IQ3_XXS")[b[..., 2:66].int()]
    return _groups(points, signs, half(b[..., :2]) * (0.5 + (rest >> 28).float()) * 0.5, 32)


def _iq3_s(b: Tensor) -> Groups:
    points = table("IQ3_S")[b[..., 2:66].int() | _bits(b[..., 66:74].int()).flatten(-2) << 8]
    return _groups(points, _bits(b[..., 74:106].int()), half(b[..., :2]) * (1 + 2 * _small_scales(b[..., 106:])), 32)


def _moved(points: Tensor, is_below: Tensor, scales: Tensor, group_size: int) -> Groups:
    """Points of -1, 0 and 1, an eighth more or less: eighths are the steps."""
    numbers = 8 * points + torch.where(is_below, -1, 1).to(torch.int16) + _MIDDLE
    return Groups(numbers.to(torch.uint8).reshape(*scales.shape, group_size), scales / 8)


def _iq1_s(b: Tensor) -> Groups:
    rest = _words(b[..., 34:])  # [N, blocks, 8]
    high = torch.stack([(rest >> shift) & 7 for shift in (0, 3, 6, 9)], dim=-1).flatten(-2)
    points = table("IQ1_S")[b[..., 2:34].int() | high << 8]  # [N, blocks, 32, 8]
    is_below = (rest >> 15).bool().repeat_interleave(4, dim=-1)[..., None]
    return _moved(points, is_below, half(b[..., :2]) * (2 * ((rest >> 12) & 7) + 1), 32)


def _iq1_m(b: Tensor) -> Groups:
    rest = _words(b[..., 48:])  # [N, blocks, 4]: three bits for each of four scales, and a quarter of the float16
    whole = (rest >> 12 << torch.tensor([0, 4, 8, 12])).sum(-1, keepdim=True)
    of_block = half(torch.stack([whole & 255, whole >> 8], dim=-1).to(torch.uint8).flatten(-2))
    scales = torch.stack([(rest >> shift) & 7 for shift in (0, 3, 6, 9)], dim=-1).flatten(-2)
    high = nibbles(b[..., 32:48]).transpose(-1, -2).flatten(-2).int()  # [N, blocks, 32]
    points = table("IQ1_M")[b[..., :32].int() | (high & 7) << 8]
    return _moved(points, (high >> 3).bool()[..., None], of_block * (2 * scales + 1), 16)


def _ternary(codes: Tensor, scale: Tensor) -> Groups:
    """Codes of 0 to 2 [N, blocks, 256] with one scale."""
    groups = codes.reshape(*codes.shape[:2], 8, 32)
    return Groups(groups, scale.expand(*codes.shape[:2], 8))


def _tq1_0(b: Tensor) -> Groups:
    def digits(packed: Tensor, num: int) -> Tensor:
        """The first digits of a fraction to base 3: [..., n] to [..., num * n]"""
        powers = torch.tensor([3**i for i in range(num)], dtype=torch.int32)
        return (((packed.int()[..., None, :] * powers[:, None]) & 255) * 3 >> 8).flatten(-2)

    parts = (digits(b[..., :32], 5), digits(b[..., 32:48], 5), digits(b[..., 48:52], 4))
    return _ternary(torch.cat(parts, dim=-1).to(torch.uint8), half(b[..., 52:]))


def _tq2_0(b: Tensor) -> Groups:
    packed = b[..., :64].unflatten(-1, (2, 1, 32))
    codes = (packed >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]) & 3
    return _ternary(codes.flatten(-3), half(b[..., 64:]))


_FP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice what the 4 bits stand for."""


def _fp4(codes: Tensor) -> Tensor:
    return (torch.tensor(_FP4_VALUES) + _MIDDLE).to(torch.uint8)[codes.int()]


def _mxfp4(b: Tensor) -> Groups:
    exponents = b[..., :1].float() - 128
    return Groups(_fp4(nibbles(b[..., 1:]).flatten(-2))[..., None, :], torch.exp2(exponents))


def _nvfp4(b: Tensor) -> Groups:
    packed = b[..., :4].int()
    exponent, fraction = (packed >> 3) & 15, (packed & 7).float()
    normal = torch.ldexp(1 + fraction / 8, exponent - 8)
    scales = torch.where(exponent == 0, fraction * 2**-10, normal)
    scales = torch.where((packed == 0) | (packed == 127), 0.0, scales)
    return Groups(_fp4(nibbles(b[..., 4:].unflatten(-1, (4, 8))).flatten(-2)), scales)


TAKEN_APART = {
    "IQ1_S": (_iq1_s, 8, 32, _MIDDLE),
    "IQ1_M": (_iq1_m, 8, 16, _MIDDLE),
    "IQ2_XXS": (_iq2_xxs, 8, 32, _MIDDLE),
    "IQ2_XS": (_iq2_xs, 8, 16, _MIDDLE),
    "IQ2_S": (_iq2_s, 8, 16, _MIDDLE),
    "IQ3_XXS": (_iq3_xxs, 8, 32, _MIDDLE),
    "IQ3_S": (_iq3_s, 8, 32, _MIDDLE),
    "TQ1_0": (_tq1_0, 4, 32, 1),
    "TQ2_0": (_tq2_0, 4, 32, 1),
    "MXFP4": (_mxfp4, 8, 32, _MIDDLE),
    "NVFP4": (_nvfp4, 8, 16, _MIDDLE),
}
"""By the name of the type: how it is taken apart; bits, group size and middle of our codes."""

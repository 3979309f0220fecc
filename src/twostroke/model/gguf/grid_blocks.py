"""ggml's blocks of 1 to 3 bits whose codes are rows of a table: the IQ types.

A row has 4 or 8 numbers, mostly magnitudes whose signs come apart. The tables (`grids.npz`) are those of ggml-common.h,
chosen there from a lattice: no formula makes them.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

import numpy as np
import torch
from torch import Tensor

from twostroke.model.gguf.groups import Groups, bits_of, half, nibbles_in_order, whole_numbers

_MIDDLE = 128
"""The code of 0 in 8 bits."""


@cache
def _grid(name: str) -> Tensor:
    """int16 [rows, numbers of a row]"""
    with (
        files("twostroke.model.gguf").joinpath("grids.npz").open("rb") as stream,
        np.load(stream, allow_pickle=False) as grids,
    ):
        return torch.from_numpy(grids[name].astype(np.int16))


def _signs(packed: Tensor) -> Tensor:
    """A sign for each bit of bytes: [..., n] to int16 [..., n, 8] of 1 and -1."""
    return 1 - 2 * bits_of(packed).short()


def _even_signs(seven_bits: Tensor) -> Tensor:
    """The same of 7 bits, where the eighth makes the number of minuses even. int64 [..., n]"""
    bits = torch.stack([(seven_bits >> bit) & 1 for bit in range(7)], dim=-1)
    return 1 - 2 * torch.cat((bits, bits.sum(-1, keepdim=True) & 1), dim=-1).short()


def _codes(numbers: Tensor, num_groups: int) -> Tensor:
    """Whole numbers [N, num_blocks, ...] of 256 a block as codes of 8 bits."""
    return (numbers + _MIDDLE).to(torch.uint8).reshape(*numbers.shape[:2], num_groups, -1)


def iq2_xxs(b: Tensor) -> Groups:
    """Four rows of 8 for a group, with 28 bits of signs and 4 of the scale."""
    groups = b[..., 2:].unflatten(-1, (8, 8))
    word = whole_numbers(groups[..., 4:], 4).squeeze(-1)
    signs = _even_signs((word[..., None] >> torch.tensor([0, 7, 14, 21])) & 127)
    numbers = _grid("IQ2_XXS")[groups[..., :4].long()] * signs
    return Groups(_codes(numbers, 8), half(b[..., :2]) * (0.5 + (word >> 28)) * 0.25)


def iq2_xs(b: Tensor) -> Groups:
    """A row of 512 and 7 bits of signs in each two bytes."""
    words = whole_numbers(b[..., 2:66], 2)
    numbers = _grid("IQ2_XS")[words & 511] * _even_signs(words >> 9)
    return Groups(_codes(numbers, 16), half(b[..., :2]) * (0.5 + nibbles_in_order(b[..., 66:])) * 0.25)


def iq2_s(b: Tensor) -> Groups:
    """A row of 1024, with two of its bits apart, and 8 bits of signs."""
    high = torch.stack([(b[..., 66:74] >> shift) & 3 for shift in (0, 2, 4, 6)], dim=-1).flatten(-2)
    numbers = _grid("IQ2_S")[b[..., 2:34].long() | high.long() << 8] * _signs(b[..., 34:66])
    return Groups(_codes(numbers, 16), half(b[..., :2]) * (0.5 + nibbles_in_order(b[..., 74:])) * 0.25)


def iq3_xxs(b: Tensor) -> Groups:
    """As IQ2_XXS, with eight rows of 4 for a group."""
    words = whole_numbers(b[..., 66:], 4)
    signs = _even_signs((words[..., None] >> torch.tensor([0, 7, 14, 21])) & 127)
    numbers = _grid("IQ3_XXS")[b[..., 2:66].long()].reshape(signs.shape) * signs
    return Groups(_codes(numbers, 8), half(b[..., :2]) * (0.5 + (words >> 28)) * 0.5)


def iq3_s(b: Tensor) -> Groups:
    """Odd numbers from -15 to 15, which are 16 codes of 4 bits and a minimum."""
    rows = b[..., 2:66].long() | bits_of(b[..., 66:74]).flatten(-2).long() << 8
    signs = _signs(b[..., 74:106])
    numbers = _grid("IQ3_S")[rows].reshape(signs.shape) * signs
    codes = ((numbers + 15) // 2).to(torch.uint8).reshape(*b.shape[:2], 8, 32)
    scales = half(b[..., :2]) * (1 + 2 * nibbles_in_order(b[..., 106:]))
    return Groups(codes, 2 * scales, 15 * scales)


def iq1_s(b: Tensor) -> Groups:
    """-1, 0 and 1, and an eighth that is added to all of a group or subtracted."""
    words = whole_numbers(b[..., 34:], 2)
    high = (words[..., None] >> torch.tensor([0, 3, 6, 9])) & 7
    rows = b[..., 2:34].long() | high.flatten(-2) << 8
    codes = (_grid("IQ1_S")[rows] + 1).to(torch.uint8).reshape(*b.shape[:2], 8, 32)
    scales = half(b[..., :2]) * (2 * ((words >> 12) & 7) + 1)
    return Groups(codes, scales, scales * (1 - _eighth(words >> 15)))


def iq1_m(b: Tensor) -> Groups:
    """The same with an eighth for each 8 numbers; the float16 for the block is in pieces beside the scales."""
    words = whole_numbers(b[..., 48:], 2)
    pieces = (words >> 12) << torch.tensor([0, 4, 8, 12])
    of_block = pieces.sum(-1, keepdim=True).to(torch.uint16).view(torch.float16).float()
    scales = (words[..., None] >> torch.tensor([0, 3, 6, 9])) & 7
    high = nibbles_in_order(b[..., 32:48]).long()
    grid = _grid("IQ1_S")[b[..., :32].long() | (high & 7) << 8]
    numbers = 8 * grid + (8 * _eighth(high >> 3)).short()[..., None]
    return Groups(_codes(numbers, 16), of_block * (2 * scales.flatten(-2) + 1) / 8)


def _eighth(bit: Tensor) -> Tensor:
    """1/8 where a bit is 0, else -1/8."""
    return 0.125 * (1 - 2 * bit)

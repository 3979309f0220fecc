"""Groups: what blocks stand for, and the few ways in which ggml packs bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Groups:
    """What some blocks stand for: scales * (codes - zero) - minima."""

    codes: Tensor
    """uint8 [N, num_blocks, groups of a block, group_size]"""
    scales: Tensor
    """float32 [N, num_blocks, groups of a block]"""
    minima: Tensor | None = None
    """As scales."""


def half(two_bytes: Tensor) -> Tensor:
    """float16 in bytes [..., 2] as float32 [..., 1]."""
    return two_bytes.contiguous().view(torch.float16).float()


def nibbles(packed: Tensor) -> Tensor:
    """[..., n] to [..., 2, n]: the low halves of the bytes, then the high ones."""
    return torch.stack((packed & 15, packed >> 4), dim=-2)


def nibbles_in_order(packed: Tensor) -> Tensor:
    """[..., n] to [..., 2 n]: the low half of a byte, its high half, then the next byte's."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def pairs(packed: Tensor) -> Tensor:
    """[..., n] to [..., 4, n]: bits 0 and 1 of the bytes, then 2 and 3, and so on."""
    return torch.stack([(packed >> shift) & 3 for shift in (0, 2, 4, 6)], dim=-2)


def bits_of(packed: Tensor) -> Tensor:
    """[..., n] to [..., n, 8]: bit 0 of a byte first."""
    return torch.stack([(packed >> bit) & 1 for bit in range(8)], dim=-1)


def whole_numbers(packed: Tensor, size: int) -> Tensor:
    """Little-endian numbers without sign, of `size` bytes: [..., n] to int64 [..., n / size]."""
    parts = packed.unflatten(-1, (-1, size)).long()
    return (parts << (8 * torch.arange(size))).sum(-1)

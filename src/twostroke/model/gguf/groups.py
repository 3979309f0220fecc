"""Groups: what blocks stand for, and the few ways in which ggml packs bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Groups:
    """What some blocks stand for: scales * (codes - zero) - minima.

    Of the K types, scales and minima are whole numbers, and times those of their super-block.
    """

    codes: Tensor
    """uint8 [N, num_blocks, groups of a block, group_size]"""
    scales: Tensor
    """float32 [N, num_blocks, groups of a block], or whole numbers of a byte"""
    minima: Tensor | None = None
    """As scales."""
    super_scales: Tensor | None = None
    """float32 [N, num_blocks, 1], where blocks are super-blocks"""
    super_minima: Tensor | None = None
    """float32 [N, num_blocks, 1]: what minima are multiplied by"""

    @property
    def whole_scales(self) -> Tensor:
        """As float32 numbers."""
        return self.scales if self.super_scales is None else self.scales.float() * self.super_scales

    @property
    def whole_minima(self) -> Tensor | None:
        """As float32 numbers."""
        return self.minima if self.minima is None or self.super_minima is None else self.minima * self.super_minima


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

"""Groups, the unpacked form of blocks, and the bit-packing schemes that ggml uses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Groups:
    """Unpacked blocks; their numbers are scales * (codes - zero) - minima.

    In the K types, scales and minima are whole numbers, to be multiplied by those of their super-block.
    """

    codes: Tensor
    """uint8 [N, num_blocks, groups of a block, group_size]."""
    scales: Tensor
    """float32 [N, num_blocks, groups of a block], or whole numbers of one byte."""
    minima: Tensor | None = None
    """Minima, with shape and type of scales."""
    super_scales: Tensor | None = None
    """float32 [N, num_blocks, 1], if blocks are super-blocks."""
    super_minima: Tensor | None = None
    """float32 [N, num_blocks, 1]: factors of minima."""

    @property
    def full_scales(self) -> Tensor:
        """Scales including the factor of their super-block, float32."""
        return self.scales if self.super_scales is None else self.scales.float() * self.super_scales

    @property
    def full_minima(self) -> Tensor | None:
        """Minima including the factor of their super-block, float32."""
        return self.minima if self.minima is None or self.super_minima is None else self.minima * self.super_minima


def half(two_bytes: Tensor) -> Tensor:
    """Convert float16 in bytes [..., 2] to float32 [..., 1]."""
    return two_bytes.contiguous().view(torch.float16).float()


def nibbles(packed: Tensor) -> Tensor:
    """Unpack [..., n] to [..., 2, n]: the low halves of the bytes, then the high ones."""
    return torch.stack((packed & 15, packed >> 4), dim=-2)


def nibbles_in_order(packed: Tensor) -> Tensor:
    """Unpack [..., n] to [..., 2 n]: the low half of a byte, its high half, then the next byte's."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def pairs(packed: Tensor) -> Tensor:
    """Unpack [..., n] to [..., 4, n]: bits 0 and 1 of the bytes, then 2 and 3, and so on."""
    return torch.stack([(packed >> shift) & 3 for shift in (0, 2, 4, 6)], dim=-2)


def bits_of(packed: Tensor) -> Tensor:
    """Unpack [..., n] to [..., n, 8]: bit 0 of a byte first."""
    return torch.stack([(packed >> bit) & 1 for bit in range(8)], dim=-1)


def whole_numbers(packed: Tensor, size: int) -> Tensor:
    """Convert unsigned little-endian numbers of `size` bytes, [..., n], to int64 [..., n / size]."""
    parts = packed.unflatten(-1, (-1, size)).long()
    return (parts << (8 * torch.arange(size))).sum(-1)

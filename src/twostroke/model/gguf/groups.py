"""Groups: what the blocks of a type stand for, and what taking them apart shares."""

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

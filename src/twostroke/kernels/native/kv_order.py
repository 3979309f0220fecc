"""K and V of native blocks, for code that compares, shows or moves them; csrc/kernels/kv_format.hpp defines the
order."""

from __future__ import annotations

import torch
from torch import Tensor

from twostroke.config.kv_format import KVFormat, is_quantized, slot_bytes
from twostroke.kernels.head_order import HeadOrder, Section
from twostroke.kernels.reference.kv_codec import inverse_hadamard

LANES = 16
_DTYPES: dict[KVFormat, torch.dtype] = {"f32": torch.float32, "bf16": torch.bfloat16}
_BYTES_OF_KEY_UNIT: dict[KVFormat, int] = {"f32": 4, "bf16": 4, "int8": 2, "int4": 1}
_INT4_GROUP = 16
"""Dimensions of V in a group whose low and high halves share bytes."""


def head_order(kv_format: KVFormat, head_dim: int, block_size: int) -> HeadOrder:
    """Return the position of a token's bytes within a KV head of a block."""
    lanes = min(LANES, block_size)
    row_bytes = slot_bytes(kv_format, head_dim) - (4 if is_quantized(kv_format) else 0)
    unit_bytes = _BYTES_OF_KEY_UNIT[kv_format]
    keys = Section(lanes, row_bytes // unit_bytes, unit_bytes)
    values = Section(min(2, block_size), head_dim, 2) if kv_format == "bf16" else Section(1, 1, row_bytes)
    scales_and_zeros = (Section(block_size, 2, 2),) if is_quantized(kv_format) else ()
    halves = _INT4_GROUP if kv_format == "int4" else 0
    return HeadOrder((keys, *scales_and_zeros), (values, *scales_and_zeros), halves)


def read_heads(heads: Tensor, kv_format: KVFormat, head_dim: int, *, values: bool) -> Tensor:
    """Decode KV heads of blocks to numbers.

    Args:
        heads: uint8 [n, block_size * slot bytes], each one head's K, or one head's V.
        kv_format: format they are stored in.
        head_dim: numbers in a vector.
        values: whether they are V.

    Returns:
        float32 [n, block_size, head_dim].
    """
    num_heads, num_bytes = heads.shape
    block_size = num_bytes // slot_bytes(kv_format, head_dim)
    lanes = min(LANES, block_size)
    if not is_quantized(kv_format):
        numbers = heads.contiguous().view(_DTYPES[kv_format])
        order = _values(numbers, kv_format, block_size) if values else _keys(numbers, kv_format, block_size, lanes)
        return order.reshape(num_heads, block_size, head_dim).float()
    codes, params = heads[:, : -4 * block_size], heads[:, -4 * block_size :]
    if kv_format == "int4":
        codes = _int4_values(codes, block_size, head_dim) if values else _int4_keys(codes, block_size, lanes)
    elif not values:
        codes = _keys(codes, kv_format, block_size, lanes)
    scale, zero = params.contiguous().view(torch.float16).float().view(num_heads, 2, block_size, 1).unbind(1)
    stored = codes.reshape(num_heads, block_size, head_dim).float() * scale + zero
    return inverse_hadamard(stored) if kv_format == "int4" else stored


def _keys(numbers: Tensor, kv_format: KVFormat, block_size: int, lanes: int) -> Tensor:
    """Reorder [n, tiles, units, lanes, dimensions of a unit] to [n, tiles, lanes, units, dimensions of a unit]."""
    dims = 1 if kv_format == "f32" else 2
    return numbers.view(len(numbers), block_size // lanes, -1, lanes, dims).transpose(2, 3)


def _values(numbers: Tensor, kv_format: KVFormat, block_size: int) -> Tensor:
    """Reorder V; bfloat16 has two tokens side by side: [n, pairs, head_dim, 2] to [n, pairs, 2, head_dim]."""
    if kv_format == "f32" or block_size == 1:
        return numbers
    return numbers.view(len(numbers), block_size // 2, -1, 2).transpose(2, 3)


def _int4_keys(codes: Tensor, block_size: int, lanes: int) -> Tensor:
    units = codes.reshape(len(codes), block_size // lanes, -1, lanes).transpose(2, 3)
    return torch.stack((units & 15, units >> 4), dim=-1)


def _int4_values(codes: Tensor, block_size: int, head_dim: int) -> Tensor:
    rows = codes.reshape(len(codes), block_size, head_dim // 2)
    halves = [part for group in rows.split(_INT4_GROUP // 2, dim=2) for part in (group & 15, group >> 4)]
    return torch.cat(halves, dim=2)

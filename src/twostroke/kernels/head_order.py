"""Byte order of a token within one KV head of a block, in as much detail as moving tokens needs.

The bytes of a head are a row of sections. A section holds one kind of bytes for all tokens of the block:

```
tiles of `lanes` tokens; in a tile unit after unit; in a unit token after token     [t / lanes][unit][t % lanes]
```

With one lane, tokens lie one after the other. With as many lanes as the block has tokens, each unit of all tokens lies
together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from twostroke.config.kv_format import KVFormat, slot_bytes


@dataclass(frozen=True, slots=True)
class Section:
    """One kind of bytes of a KV head."""

    lanes: int
    """Tokens per tile; a divisor of the block size."""
    units: int
    """Units of each token."""
    unit_bytes: int

    @property
    def bytes_per_token(self) -> int:
        """Bytes of each token in this section."""
        return self.units * self.unit_bytes


@dataclass(frozen=True, slots=True)
class HeadOrder:
    """Sections of a head's K and of its V, for one block size."""

    keys: tuple[Section, ...]
    values: tuple[Section, ...]
    halves: int = 0
    """Dimensions of V in int4 whose low and high halves share bytes; 0 for the plain order, where adjacent dimensions
    share them."""

    def fits(self, kv_format: KVFormat, head_dim: int, block_size: int) -> bool:
        """Return whether this order is possible for blocks of this format; an order from another process may be
        invalid."""
        sections = (*self.keys, *self.values)
        are_whole = all(min(s.lanes, s.units, s.unit_bytes) > 0 and block_size % s.lanes == 0 for s in sections)
        wanted = slot_bytes(kv_format, head_dim)
        sizes = [sum(section.bytes_per_token for section in of_kind) for of_kind in (self.keys, self.values)]
        has_halves = kv_format == "int4" and self.halves > 0 and self.halves % 2 == 0
        return are_whole and sizes == [wanted, wanted] and (has_halves or not self.halves)

    def slots(self, heads: NDArray[np.uint8], block_size: int, *, values: bool) -> NDArray[np.uint8]:
        """Return the tokens of KV heads in plain order.

        Args:
            heads: [n, bytes of a head], each the K or the V of one head of a block.
            block_size: tokens in each.
            values: whether they are V.

        Returns:
            [n, block_size, slot bytes]; `kernels/reference/kv_codec.py` defines the bytes.
        """
        found: list[NDArray[np.uint8]] = []
        at = 0
        for section in self.values if values else self.keys:
            end = at + block_size * section.bytes_per_token
            run = heads[:, at:end].reshape(_tiles(len(heads), section, block_size))
            found.append(run.transpose(0, 1, 3, 2, 4).reshape(len(heads), block_size, section.bytes_per_token))
            at = end
        slots = np.concatenate(found, axis=2)
        if values and self.halves:
            slots[:, :, :-_PARAMS_BYTES] = _halves_to_neighbours(slots[:, :, :-_PARAMS_BYTES], self.halves)
        return slots

    def heads(self, slots: NDArray[np.uint8], *, values: bool) -> NDArray[np.uint8]:
        """Return the bytes of KV heads from tokens in plain order: the inverse of `slots`.

        Args:
            slots: [n, block_size, slot bytes].
            values: whether they are V.

        Returns:
            [n, bytes of a head].
        """
        num_heads, block_size = slots.shape[:2]
        if values and self.halves:
            codes = _neighbours_to_halves(slots[:, :, :-_PARAMS_BYTES], self.halves)
            slots = np.concatenate((codes, slots[:, :, -_PARAMS_BYTES:]), axis=2)
        found: list[NDArray[np.uint8]] = []
        at = 0
        for section in self.values if values else self.keys:
            end = at + section.bytes_per_token
            tiles, lanes = block_size // section.lanes, section.lanes
            run = slots[:, :, at:end].reshape(num_heads, tiles, lanes, section.units, section.unit_bytes)
            found.append(run.transpose(0, 1, 3, 2, 4).reshape(num_heads, -1))
            at = end
        return np.concatenate(found, axis=1)


def plain_order(kv_format: KVFormat, head_dim: int) -> HeadOrder:
    """Return the order with one slot after the other, valid for any block size."""
    slots = (Section(1, 1, slot_bytes(kv_format, head_dim)),)
    return HeadOrder(slots, slots)


_PARAMS_BYTES = 4
"""Bytes of scale and zero, after the codes of a quantized slot."""


def _tiles(num_heads: int, section: Section, block_size: int) -> Sequence[int]:
    return num_heads, block_size // section.lanes, section.units, section.lanes, section.unit_bytes


def _halves_to_neighbours(codes: NDArray[np.uint8], halves: int) -> NDArray[np.uint8]:
    """Convert int4 codes so that dimensions 2i and 2i + 1 share byte i.

    Args:
        codes: [..., bytes]; in each group of halves / 2 bytes the low four bits are the group's first dimensions. The
            last group may be narrower.
        halves: dimensions per group.
    """
    groups = _groups(codes, halves // 2)
    dims = np.concatenate([half for group in groups for half in _unpack(group)], axis=-1)
    return _pack(dims[..., 0::2], dims[..., 1::2])


def _neighbours_to_halves(codes: NDArray[np.uint8], halves: int) -> NDArray[np.uint8]:
    """Convert int4 codes so that the halves of each group share bytes: the inverse of `_halves_to_neighbours`."""
    dims = np.stack(_unpack(codes), axis=-1).reshape(*codes.shape[:-1], -1)
    pairs = [np.split(group, 2, axis=-1) for group in _groups(dims, halves)]
    return np.concatenate([_pack(low, high) for low, high in pairs], axis=-1)


def _groups(numbers: NDArray[np.uint8], width: int) -> list[NDArray[np.uint8]]:
    """Split the last axis into parts of `width` numbers."""
    return [numbers[..., at : at + width] for at in range(0, numbers.shape[-1], width)]


def _unpack(codes: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return the low and the high four bits of each byte, as two arrays."""
    return np.bitwise_and(codes, np.uint8(15)), np.right_shift(codes, np.uint8(4))


def _pack(low: NDArray[np.uint8], high: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return bytes from pairs of 4-bit codes."""
    return np.bitwise_or(low, np.left_shift(high, np.uint8(4)))

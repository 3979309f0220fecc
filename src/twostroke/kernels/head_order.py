"""Where the bytes of a token are inside a KV head of a block, as far as whoever moves them has to know.

A head's run is a row of sections, and a section holds one kind of bytes of all the block's tokens:

```
tiles of `lanes` tokens; in a tile unit after unit; in a unit token after token     [t / lanes][unit][t % lanes]
```

With one lane tokens lie one after the other; with as many as the block has, every unit of all tokens lies together.
"""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.config.kv_format import KVFormat, slot_bytes


@dataclass(frozen=True, slots=True)
class Section:
    """One kind of bytes."""

    lanes: int
    """Tokens of a tile; divides the block size."""
    units: int
    """Of each token."""
    unit_bytes: int

    @property
    def bytes_per_token(self) -> int:
        """In this section."""
        return self.units * self.unit_bytes


@dataclass(frozen=True, slots=True)
class HeadOrder:
    """The sections of a head's K and of its V, for one block size."""

    keys: tuple[Section, ...]
    values: tuple[Section, ...]


def plain_order(kv_format: KVFormat, head_dim: int) -> HeadOrder:
    """One slot after the other, whatever the block size."""
    slots = (Section(1, 1, slot_bytes(kv_format, head_dim)),)
    return HeadOrder(slots, slots)

"""Blocks that are held for a hand-over between two pools, by nobody who runs.

A request that is computed in one process and goes on in another leaves its blocks on loan, until they have been
fetched. There, blocks are taken for what comes, before the request runs:

```
process that prefills                                 process that decodes
  request ──ends──► loan: its full blocks               import: cached prefix + new blocks, nameless
                      │      ─────── bytes ───────►       │ complete: they get their names
                      ▼                                   ▼
                    over: ordinary cached blocks        over: ordinary cached blocks, which the request finds
```

Both are a block table without a request. What is held cannot be taken from its holder, so it is bounded: beside it
the longest request always has room (scheduler/kv_handover.py), so whoever runs alone never waits for a holder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twostroke.kv_cache.block_pool import BlockTable
from twostroke.kv_cache.layout import KVLayout
from twostroke.kv_cache.prefix_cache import CachedPrefix, SharedPrefixCache
from twostroke.kv_cache.reservation import Reservation


@dataclass(frozen=True, slots=True)
class KVImport:
    """Where the blocks of a prefix are to be put that another process has computed."""

    num_tokens: int
    """Of the prefix: whole blocks."""
    num_cached_tokens: int
    """Of these, here already."""
    rows: tuple[tuple[int, ...], ...]
    """Per KV group, its blocks of the prefix."""
    first_missing: tuple[int, ...]
    """Per KV group, the first entry that is to be filled; all behind it are, too."""

    @property
    def num_blocks(self) -> int:
        """To be filled, over all groups."""
        return sum(len(row) - first for row, first in zip(self.rows, self.first_missing, strict=True))

    def in_pages(self, layout: KVLayout) -> KVImport:
        """Return the same with page ids in place of blocks, as those who move KV see it."""
        rows = tuple(
            tuple(layout.page_ids(group).of_blocks(row)) for group, row in zip(layout.groups, self.rows, strict=True)
        )
        missing = zip(layout.groups, self.first_missing, strict=True)
        first_missing = tuple(first * group.pages_per_block for group, first in missing)
        return KVImport(self.num_tokens, self.num_cached_tokens, rows, first_missing)


class KVHolds:
    """Loans and imports, by their numbers, which are never used again."""

    def __init__(self, layout: KVLayout, reservation: Reservation, prefix_cache: SharedPrefixCache | None) -> None:
        self._layout = layout
        self._reservation = reservation
        self._prefix_cache = prefix_cache
        self._tables: dict[int, BlockTable] = {}

    def __contains__(self, hold_id: object) -> bool:
        """It is held."""
        return hold_id in self._tables

    @property
    def num_blocks(self) -> int:
        """Held, a block of several holds counted for each."""
        return sum(table.num_held for table in self._tables.values())

    @property
    def tables(self) -> list[BlockTable]:
        """All of them."""
        return list(self._tables.values())

    def num_blocks_for_import(self, cached: CachedPrefix, num_tokens: int) -> tuple[int, int]:
        """Blocks that `begin_import` takes out of the free ones, and blocks that are held then.

        Those that are shared with somebody who runs now count as well: it ends, and they are still held.
        """
        return self._reservation.num_to_hold(cached, num_tokens)

    def begin_import(self, hold_id: int, cached: CachedPrefix, num_tokens: int) -> KVImport:
        """Takes blocks for a prefix of whole blocks; there is room for them.

        Args:
            hold_id: a new number.
            cached: what of the prefix is here.
            num_tokens: of the prefix.
        """
        assert hold_id not in self._tables, f"hold {hold_id} is not new"
        table = self._tables[hold_id] = self._reservation.open_for(cached, num_tokens)
        named = (table.num_named // size for size in table.block_tokens)
        first_missing = tuple(max(*firsts) for firsts in zip(table.first_held, named, strict=True))
        rows = tuple(tuple(row) for row in table.rows)
        return KVImport(num_tokens, cached.num_tokens, rows, first_missing)

    def complete_import(self, hold_id: int, block_hashes: Sequence[bytes]) -> None:
        """All blocks are filled: they can be found by these names, one per page."""
        table = self._tables[hold_id]
        assert self._prefix_cache is not None, "without a prefix cache nothing is fetched into it"
        self._prefix_cache.name_full_blocks(table, block_hashes, table.num_tokens)

    def lend(self, hold_id: int, table: BlockTable) -> None:
        """Keeps the full blocks of a request that ends; what is not full is given back."""
        assert hold_id not in self._tables, f"hold {hold_id} is not new"
        whole = self._layout.prefix_tokens
        table.num_tokens = table.num_tokens // whole * whole
        table.num_named = min(table.num_named, table.num_tokens)
        self._reservation.shrink(table, table.num_tokens)
        self._tables[hold_id] = table

    def end(self, hold_id: int) -> None:
        """Its blocks are ordinary ones: cached where they have names, else free. Unknown numbers are ignored."""
        table = self._tables.pop(hold_id, None)
        if table is not None:
            self._reservation.close(table)

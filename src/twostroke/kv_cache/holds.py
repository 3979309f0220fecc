"""Blocks that are held for a hand-over between two pools, without a running request.

A request that is computed in one process and continues in another leaves its blocks on loan until they have been
fetched. The other process allocates blocks for them before the request runs:

```
process that prefills                                 process that decodes
  request ──ends──► loan: its full blocks               import: cached prefix + new blocks, not hashed yet
                      │      ─────── bytes ───────►       │ complete: they get their hashes
                      ▼                                   ▼
                    over: ordinary cached blocks        over: ordinary cached blocks, which the request finds
```

Both are a block table without a request. Held blocks cannot be preempted, so their number is bounded: the longest
request always fits in addition to them (scheduler/kv_handover.py), and a request that runs alone never waits for them.
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
    """Places for the blocks of a prefix that another process has computed."""

    num_tokens: int
    """Tokens of the prefix: whole blocks."""
    num_cached_tokens: int
    """Tokens of the prefix that are cached here already."""
    rows: tuple[tuple[int, ...], ...]
    """Blocks of the prefix, per KV group."""
    first_missing: tuple[int, ...]
    """First entry to be filled, per KV group; all later entries are to be filled, too."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks to be filled, over all groups."""
        return sum(len(row) - first for row, first in zip(self.rows, self.first_missing, strict=True))

    def in_pages(self, layout: KVLayout) -> KVImport:
        """Return the same import with page ids in place of block ids, as KV transfers need it."""
        rows = tuple(
            tuple(layout.page_ids(group).of_blocks(row)) for group, row in zip(layout.groups, self.rows, strict=True)
        )
        missing = zip(layout.groups, self.first_missing, strict=True)
        first_missing = tuple(first * group.pages_per_block for group, first in missing)
        return KVImport(self.num_tokens, self.num_cached_tokens, rows, first_missing)


class KVHolds:
    """Loans and imports, by numbers that are never reused."""

    def __init__(self, layout: KVLayout, reservation: Reservation, prefix_cache: SharedPrefixCache | None) -> None:
        self._layout = layout
        self._reservation = reservation
        self._prefix_cache = prefix_cache
        self._tables: dict[int, BlockTable] = {}

    def __contains__(self, hold_id: object) -> bool:
        return hold_id in self._tables

    @property
    def num_blocks(self) -> int:
        """Number of held blocks; a block of several holds counts for each."""
        return sum(table.num_held for table in self._tables.values())

    @property
    def tables(self) -> list[BlockTable]:
        """Block tables of all holds."""
        return list(self._tables.values())

    def num_blocks_for_import(self, cached: CachedPrefix, num_tokens: int) -> tuple[int, int]:
        """Return the blocks that `begin_import` takes from the free ones, and the blocks that are held then.

        Blocks shared with a running request count as held: they are still held when that request ends.
        """
        return self._reservation.num_to_hold(cached, num_tokens)

    def begin_import(self, hold_id: int, cached: CachedPrefix, num_tokens: int) -> KVImport:
        """Allocate blocks for a prefix of whole blocks; there must be room for them.

        Args:
            hold_id: a new number.
            cached: the part of the prefix that is cached here.
            num_tokens: of the prefix.
        """
        assert hold_id not in self._tables, f"hold {hold_id} is not new"
        table = self._tables[hold_id] = self._reservation.open_prefix(cached, num_tokens)
        hashed = (table.num_hashed_tokens // size for size in table.block_tokens)
        first_missing = tuple(max(*firsts) for firsts in zip(table.first_held, hashed, strict=True))
        rows = tuple(tuple(row) for row in table.rows)
        return KVImport(num_tokens, cached.num_tokens, rows, first_missing)

    def complete_import(self, hold_id: int, block_hashes: Sequence[bytes]) -> None:
        """Make all blocks, which are filled now, findable by these hashes, one per page."""
        table = self._tables[hold_id]
        assert self._prefix_cache is not None, "without a prefix cache nothing is fetched into it"
        self._prefix_cache.cache_full_blocks(table, block_hashes, table.num_tokens)

    def lend(self, hold_id: int, table: BlockTable) -> None:
        """Keep the full blocks of a request that ends; free the last one if it is not full."""
        assert hold_id not in self._tables, f"hold {hold_id} is not new"
        whole = self._layout.prefix_tokens
        table.num_tokens = table.num_tokens // whole * whole
        table.num_hashed_tokens = min(table.num_hashed_tokens, table.num_tokens)
        self._reservation.shrink(table, table.num_tokens)
        self._tables[hold_id] = table

    def end(self, hold_id: int) -> None:
        """Turn held blocks into ordinary ones: cached if they are hashed, else free. Unknown numbers are ignored."""
        table = self._tables.pop(hold_id, None)
        if table is not None:
            self._reservation.close(table)

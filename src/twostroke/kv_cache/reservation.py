"""How a request comes by its blocks: one at a time as it grows."""

from __future__ import annotations

from typing import Protocol

from twostroke.kv_cache.block_pool import NO_BLOCK, BlockPool, BlockTable
from twostroke.kv_cache.layout import KVLayout
from twostroke.kv_cache.prefix_cache import IN_HOST, CachedPrefix


class Reservation(Protocol):
    """Gives blocks to tables and takes them back."""

    @property
    def num_free_blocks(self) -> int:
        """Blocks that a request could be given now."""
        ...

    @property
    def num_evicted(self) -> int:
        """Cached blocks that had to go for others, so far."""
        ...

    def counts(self) -> tuple[int, int, int, int]:
        """Free, used, cached and quarantined blocks; their sum is the pool."""
        ...

    def num_blocks_to_compute(self, num_tokens: int, max_tokens_per_step: int) -> int:
        """Most blocks that a request of `num_tokens` tokens holds at once, over all groups."""
        ...

    def num_in_use(self, cached: CachedPrefix) -> int:
        """Blocks of a cached prefix that others hold anyway: sharing these takes nothing from the free ones."""
        ...

    def num_taken(self, table: BlockTable) -> int:
        """Blocks of a table that count against what its request was promised."""
        ...

    def open(self, cached: CachedPrefix) -> BlockTable:
        """A table that begins with the cached prefix, which is shared from now on."""
        ...

    def num_to_hold(self, cached: CachedPrefix, num_tokens: int) -> tuple[int, int]:
        """Blocks that `open_for` takes out of the free ones, and blocks that its table holds.

        The difference is shared with others, who may let go of them at any time.
        """
        ...

    def open_for(self, cached: CachedPrefix, num_tokens: int) -> BlockTable:
        """A table for the first `num_tokens` tokens, whole blocks, as far as the query behind them sees them.

        It begins with the cached prefix; the rest is allocated, and there are as many free blocks as num_to_hold says.
        """
        ...

    def try_grow(self, table: BlockTable, start: int, end: int) -> bool:
        """Makes room up to token `end` for a step that begins at token `start`; False, and no change, without room."""
        ...

    def shrink(self, table: BlockTable, num_tokens: int) -> None:
        """Gives back whole blocks right of `num_tokens`."""
        ...

    def close(self, table: BlockTable) -> None:
        """Gives everything back."""
        ...

    def check_invariants(self, tables: list[BlockTable]) -> None:
        """The pool and these tables, all there are, tell the same story."""
        ...


class PagedReservation:
    """Blocks come one at a time from a shared pool; per request and group less than a block's slots are idle."""

    def __init__(self, layout: KVLayout, pool: BlockPool) -> None:
        self._layout = layout
        self._pool = pool
        self._window_groups = [(g, group) for g, group in enumerate(layout.groups) if group.window is not None]
        self._block_tokens = tuple(map(layout.tokens_per_block, layout.groups))

    @property
    def num_free_blocks(self) -> int:
        """Free and evictable blocks."""
        return self._pool.num_free_blocks

    @property
    def num_evicted(self) -> int:
        """The pool's."""
        return self._pool.num_evicted

    def counts(self) -> tuple[int, int, int, int]:
        """The pool's."""
        pool = self._pool
        return pool.num_free, pool.num_used, pool.num_cached, pool.num_quarantined

    def num_blocks_to_compute(self, num_tokens: int, max_tokens_per_step: int) -> int:
        """The layout's peak."""
        return self._layout.peak_blocks(num_tokens, max_tokens_per_step)

    def num_in_use(self, cached: CachedPrefix) -> int:
        """Those with references, in groups that see everything.

        A group with a window lets go of a shared block one day, which frees nothing, and takes one of its own.
        """
        rows = (row for row, group in zip(cached.rows, self._layout.groups, strict=True) if group.window is None)
        ids = (block_id for row in rows for block_id in row if block_id != IN_HOST)
        return sum(self._pool.ref_count(block_id) > 0 for block_id in ids)

    def num_taken(self, table: BlockTable) -> int:
        """All held blocks but those that a group with a window shares with others, for the reason above."""
        shared = sum(
            self._pool.ref_count(block_id) > 1
            for group_id, _ in self._window_groups
            for block_id in table.rows[group_id][table.first_held[group_id] :]
        )
        return table.num_held - shared

    def open(self, cached: CachedPrefix) -> BlockTable:
        """Shares the cached blocks."""
        assert not any(IN_HOST in row for row in cached.rows), f"{cached.offloaded} are not loaded"
        self._pool.share(cached.block_ids)
        table = BlockTable([list(row) for row in cached.rows], list(cached.first_held), self._block_tokens)
        table.num_tokens = table.num_named = cached.num_tokens
        return table

    def num_to_hold(self, cached: CachedPrefix, num_tokens: int) -> tuple[int, int]:
        """New blocks, and cached ones that nobody holds; and all of them."""
        held, new = self._to_hold(cached, num_tokens)
        num_new = sum(map(len, new))
        num_woken = sum(self._pool.ref_count(block_id) == 0 for row in held for block_id in row)
        return num_new + num_woken, num_new + sum(map(len, held))

    def open_for(self, cached: CachedPrefix, num_tokens: int) -> BlockTable:
        """See Reservation.

        ```
        entry             0   1   2   3   4   5          x cached, n new, num_tokens ends behind entry 5
        full group        x   x   x   n   n   n
        window, sees 2    .   .   .   .   n   n          of what is cached it needs no entry: nobody will see it
        ```
        """
        held, new = self._to_hold(cached, num_tokens)
        for row in held:
            self._pool.share(row)
        rows: list[list[int]] = []
        first_held: list[int] = []
        for group, shared, missing in zip(self._layout.groups, held, new, strict=True):
            found = [*shared, *self._pool.allocate(len(missing))]
            first_held.append(self._layout.num_blocks_of_prefix(group, num_tokens) - len(found))
            rows.append([NO_BLOCK] * first_held[-1] + found)
        table = BlockTable(rows, first_held, self._block_tokens)
        table.num_tokens = num_tokens
        table.num_named = min(num_tokens, cached.num_tokens)
        return table

    def _to_hold(self, cached: CachedPrefix, num_tokens: int) -> tuple[list[list[int]], list[range]]:
        """Per group the cached blocks, and the entries that are missing."""
        held: list[list[int]] = []
        new: list[range] = []
        for group, row, first_cached in zip(self._layout.groups, cached.rows, cached.first_held, strict=True):
            num_entries = self._layout.num_blocks_of_prefix(group, num_tokens)
            first = min(num_entries, self._layout.first_needed_block(group, num_tokens))
            assert first >= first_cached, "a longer prefix needs no earlier block"
            held.append(list(row[first:]))
            new.append(range(max(first, len(row)), num_entries))
        return held, new

    def try_grow(self, table: BlockTable, start: int, end: int) -> bool:
        """Gives back what left the window of the query at `start`, then takes what is missing.

        ```
        window group:  [ out of window | seen by query `start` ... ][ new ..... end )
                        given back first                             then taken
        ```
        """
        num_new = [
            max(0, self._layout.num_blocks_of_prefix(group, end) - len(row))
            for group, row in zip(self._layout.groups, table.rows, strict=True)
        ]
        if any(num_new):
            leaving = self._leaving(table, start) if self._window_groups else []
            freed = sum(self._pool.ref_count(block_id) == 1 for block_id in leaving)
            if sum(num_new) > self._pool.num_free_blocks + freed:
                return False
            if leaving:
                self._give_back_left_of_window(table, start, leaving)
            for row, num in zip(table.rows, num_new, strict=True):
                row.extend(self._pool.allocate(num))
        return True

    def _leaving(self, table: BlockTable, start: int) -> list[int]:
        """Blocks that the query at `start` and all later ones do not see, last entry first."""
        leaving: list[int] = []
        for group_id, group in self._window_groups:
            first = min(self._layout.first_needed_block(group, start), len(table.rows[group_id]))
            leaving.extend(reversed(table.rows[group_id][table.first_held[group_id] : first]))
        return leaving

    def _give_back_left_of_window(self, table: BlockTable, start: int, leaving: list[int]) -> None:
        self._pool.free(leaving)
        for group_id, group in self._window_groups:
            row, held = table.rows[group_id], table.first_held[group_id]
            first = max(held, min(self._layout.first_needed_block(group, start), len(row)))
            row[held:first] = [NO_BLOCK] * (first - held)
            table.first_held[group_id] = first

    def shrink(self, table: BlockTable, num_tokens: int) -> None:
        """Whole blocks right of the new end go back.

        ```
        0 ............ accepted | rejected .......
        [ block 0 ][ block 1    |  ][ block 2    ]
                        stays         goes back
        ```
        """
        assert num_tokens >= table.num_named, f"{num_tokens} tokens kept, {table.num_named} are in the prefix cache"
        num_kept = [self._layout.num_blocks_of_prefix(group, num_tokens) for group in self._layout.groups]
        if any(num < len(row) for num, row in zip(num_kept, table.rows, strict=True)):
            self._pool.free(table.tail_first(num_tokens))
            for row, num in zip(table.rows, num_kept, strict=True):
                del row[num:]

    def close(self, table: BlockTable) -> None:
        """Tail first, so that a prefix outlives what follows it."""
        self._pool.free(table.tail_first())

    def check_invariants(self, tables: list[BlockTable]) -> None:
        """References are exactly the entries of the tables, and no table has a block it does not need."""
        self._pool.check_invariants()
        ref_counts = [0] * self._pool.num_blocks
        for table in tables:
            for row, size in zip(table.rows, table.block_tokens, strict=True):
                assert len(row) == -(-table.num_tokens // size), f"{table.num_tokens} tokens in {len(row)} x {size}"
            for block_id in table.tail_first():
                ref_counts[block_id] += 1
        for block_id, ref_count in enumerate(ref_counts):
            known = self._pool.ref_count(block_id)
            assert known == ref_count, f"block {block_id}: ref_count={known}, stands in {ref_count} tables"

"""Reservation of blocks for requests: the interface, and the paged one, which allocates blocks as requests grow."""

from __future__ import annotations

from typing import Protocol

from twostroke.kv_cache.block_pool import NO_BLOCK, BlockPool, BlockTable
from twostroke.kv_cache.layout import KVLayout
from twostroke.kv_cache.prefix_cache import IN_HOST, CachedPrefix


class Reservation(Protocol):
    """Policy that gives blocks to block tables and takes them back."""

    @property
    def num_free_blocks(self) -> int:
        """Blocks that a request could be given now."""
        ...

    @property
    def num_evicted(self) -> int:
        """Cached blocks evicted so far."""
        ...

    def counts(self) -> tuple[int, int, int, int]:
        """Return the free, used, cached and quarantined blocks; their sum is the pool."""
        ...

    def num_blocks_to_compute(self, num_tokens: int, max_tokens_per_step: int) -> int:
        """Return the most blocks that a request of `num_tokens` tokens holds at once, over all groups."""
        ...

    def num_in_use(self, cached: CachedPrefix) -> int:
        """Return the blocks of a cached prefix that are in use: sharing them takes no free block."""
        ...

    def num_taken(self, table: BlockTable) -> int:
        """Return the blocks of a table that count against its request's promise."""
        ...

    def open(self, cached: CachedPrefix) -> BlockTable:
        """Return a table that begins with the cached prefix, which is shared from now on."""
        ...

    def num_to_hold(self, cached: CachedPrefix, num_tokens: int) -> tuple[int, int]:
        """Return the blocks that `open_prefix` takes from the free ones, and the blocks that its table holds.

        The difference is shared with other requests, which may release them at any time.
        """
        ...

    def open_prefix(self, cached: CachedPrefix, num_tokens: int) -> BlockTable:
        """Return a table for the first `num_tokens` tokens, whole blocks, as far as the next query sees them.

        It begins with the cached prefix; the rest is allocated. There must be as many free blocks as num_to_hold
        returns.
        """
        ...

    def try_grow(self, table: BlockTable, start: int, end: int) -> bool:
        """Provide slots up to token `end` for a step that begins at token `start`; without free blocks return
        False, unchanged."""
        ...

    def shrink(self, table: BlockTable, num_tokens: int) -> None:
        """Free whole blocks after `num_tokens`."""
        ...

    def close(self, table: BlockTable) -> None:
        """Free all blocks of a table."""
        ...

    def check_invariants(self, tables: list[BlockTable]) -> None:
        """Check that the pool agrees with these tables, which are all there are."""
        ...


class PagedReservation:
    """Allocation of single blocks from a shared pool; each request leaves less than a block per group unused."""

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
        return self._pool.num_evicted

    def counts(self) -> tuple[int, int, int, int]:
        pool = self._pool
        return pool.num_free, pool.num_used, pool.num_cached, pool.num_quarantined

    def num_blocks_to_compute(self, num_tokens: int, max_tokens_per_step: int) -> int:
        return self._layout.peak_blocks(num_tokens, max_tokens_per_step)

    def num_in_use(self, cached: CachedPrefix) -> int:
        """Return the blocks with references in groups without a window.

        A group with a window later releases a shared block, which frees nothing, and takes one of its own.
        """
        rows = (row for row, group in zip(cached.rows, self._layout.groups, strict=True) if group.window is None)
        ids = (block_id for row in rows for block_id in row if block_id != IN_HOST)
        return sum(self._pool.ref_count(block_id) > 0 for block_id in ids)

    def num_taken(self, table: BlockTable) -> int:
        """Return all held blocks but those that a group with a window shares, for the same reason."""
        shared = sum(
            self._pool.ref_count(block_id) > 1
            for group_id, _ in self._window_groups
            for block_id in table.rows[group_id][table.first_held[group_id] :]
        )
        return table.num_held - shared

    def open(self, cached: CachedPrefix) -> BlockTable:
        assert not any(IN_HOST in row for row in cached.rows), f"{cached.offloaded} are not loaded"
        self._pool.share(cached.block_ids)
        table = BlockTable([list(row) for row in cached.rows], list(cached.first_held), self._block_tokens)
        table.num_tokens = table.num_hashed_tokens = cached.num_tokens
        return table

    def num_to_hold(self, cached: CachedPrefix, num_tokens: int) -> tuple[int, int]:
        """Return new blocks plus cached ones without references; and all blocks of the table."""
        held, new = self._to_hold(cached, num_tokens)
        num_new = sum(map(len, new))
        num_revived = sum(self._pool.ref_count(block_id) == 0 for row in held for block_id in row)
        return num_new + num_revived, num_new + sum(map(len, held))

    def open_prefix(self, cached: CachedPrefix, num_tokens: int) -> BlockTable:
        """Return a table for the first `num_tokens` tokens.

        ```
        entry             0   1   2   3   4   5          x cached, n new, num_tokens ends behind entry 5
        full group        x   x   x   n   n   n
        window, sees 2    .   .   .   .   n   n          it needs none of the cached entries: no later query sees them
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
        table.num_hashed_tokens = min(num_tokens, cached.num_tokens)
        return table

    def _to_hold(self, cached: CachedPrefix, num_tokens: int) -> tuple[list[list[int]], list[range]]:
        """Return the cached blocks and the missing entries, per group."""
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
        """Free blocks that left the window of the query at `start`, then allocate the missing ones.

        ```
        window group:  [ out of window | seen by query `start` ... ][ new ..... end )
                        freed first                                  then allocated
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
        """Return the blocks that the query at `start` and all later ones do not see, last entry first."""
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
        """Free whole blocks after the new end.

        ```
        0 ............ accepted | rejected .......
        [ block 0 ][ block 1    |  ][ block 2    ]
                        stays         is freed
        ```
        """
        assert num_tokens >= table.num_hashed_tokens, (
            f"{num_tokens} tokens kept, {table.num_hashed_tokens} are in the prefix cache"
        )
        num_kept = [self._layout.num_blocks_of_prefix(group, num_tokens) for group in self._layout.groups]
        if any(num < len(row) for num, row in zip(num_kept, table.rows, strict=True)):
            self._pool.free(table.tail_first(num_tokens))
            for row, num in zip(table.rows, num_kept, strict=True):
                del row[num:]

    def close(self, table: BlockTable) -> None:
        """Free all blocks, tail first, so that a prefix outlives what follows it."""
        self._pool.free(table.tail_first())

    def check_invariants(self, tables: list[BlockTable]) -> None:
        """Check that references equal the entries of the tables, and no table has a block it does not need."""
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

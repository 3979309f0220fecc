"""State of every KV block, and the requests that hold it, as reconstructed from the event log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import IntEnum
from itertools import groupby

from twostroke.batch import KVLoad, KVMoves, ScheduledRequest
from twostroke.events import EngineStarted, KVImportBegan
from twostroke.kv_cache.block_pool import NO_BLOCK, BlockPool, BlockTable
from twostroke.kv_cache.holds import KVHolds
from twostroke.kv_cache.prefix_cache import SharedPrefixCache
from twostroke.kv_cache.reservation import PagedReservation
from twostroke.scheduler.replay import layout_of


class BlockState(IntEnum):
    """Use of a block."""

    FREE = 0
    USED = 1
    SHARED = 2  # in several block tables
    CACHED = 3  # in no block table, but in the prefix cache
    OUT_OF_USE = 4  # quarantined because it was corrupt
    HELD = 5  # on loan to another process, or being filled from one


class ReplayedPool(BlockPool):
    """Block pool that hands out the blocks named in a log.

    A log may have gaps, so it accepts sequences of operations that no engine performs.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.changed: set[int] = set()
        """Blocks whose state may have changed since this set was last emptied."""

    def take(self, block_id: int, *, is_shared: bool) -> None:
        """Add a reference; a block that is not shared loses its content and its hash."""
        key = None if is_shared else self._keys[block_id]
        if key is not None:
            del self._block_ids[key]
            self._keys[block_id] = None
        self._ref_counts[block_id] += 1
        self.changed.add(block_id)

    def name(self, block_id: int, group_id: int, block_hash: bytes) -> None:
        """Register the hash of a block that has none."""
        if self._keys[block_id] is None:
            super().name(block_id, group_id, block_hash)

    def free(self, block_ids: Iterable[int]) -> None:
        """Drop one reference of each block; the log says which free block is used next."""
        for block_id in block_ids:
            self._ref_counts[block_id] -= 1
            self.changed.add(block_id)

    def forget_hashes(self) -> int:
        """Remove all blocks from the prefix cache."""
        self.changed.update(self._block_ids.values())
        return super().forget_hashes()

    def quarantine(self, block_id: int) -> None:
        """Take a block out of use."""
        self._quarantined.add(block_id)
        self.changed.add(block_id)

    def state(self, block_id: int, num_holds: int) -> BlockState:
        """Return the state of a block, given how many of its references belong to holds."""
        refs = self._ref_counts[block_id]
        if refs:
            if num_holds == refs:
                return BlockState.HELD
            return BlockState.USED if refs == 1 else BlockState.SHARED
        if block_id in self._quarantined:
            return BlockState.OUT_OF_USE
        return BlockState.FREE if self._keys[block_id] is None else BlockState.CACHED


class BlockMap:
    """Blocks of one engine, tracked with the same parts of kv_cache/ that the engine uses.

    The log says which blocks a table gets. Which blocks are freed, hashed, lent or evicted follows from the rules of
    these parts.

    Args:
        started: start event of the engine, with the size and layout of its pool.
    """

    def __init__(self, started: EngineStarted) -> None:
        layout = self._layout = layout_of(started.layout)
        self.page_size = layout.block_size
        self.block_tokens = tuple(map(layout.tokens_per_block, layout.groups))
        """Tokens of a block, per KV group."""
        self.tables: dict[str, BlockTable] = {}
        """Block tables by request id."""
        self._gives_back = started.cache["kv_reservation"] != "contiguous"
        self._has_names: bool = started.cache["enable_prefix_caching"]
        self._pool = ReplayedPool(started.num_blocks)
        self._reservation = PagedReservation(layout, self._pool)
        self._names = SharedPrefixCache(layout, self._pool)
        self._holds = KVHolds(layout, self._reservation, self._names)
        self._imports: dict[int, tuple[bytes, ...]] = {}
        """Hashes of the pages being fetched, by import id."""
        self._prefetching: list[KVLoad] = []
        self._drops_prefetches = False

    @property
    def num_usable(self) -> int:
        """Number of blocks that are not quarantined."""
        return self._pool.num_blocks - self._pool.num_quarantined

    def runs(self) -> list[list[int]]:
        """Return the whole pool as runs: [state, number of blocks], from block 0 on."""
        states = self._states(range(self._pool.num_blocks))
        return [[int(state), sum(1 for _ in same)] for state, same in groupby(states)]

    def take_changes(self) -> list[list[int]]:
        """Return [first block, number of blocks, state] for all changes since the last call."""
        changes: list[list[int]] = []
        changed = sorted(self._pool.changed)
        for block_id, state in zip(changed, self._states(changed), strict=True):
            if changes and changes[-1][2] == state and changes[-1][0] + changes[-1][1] == block_id:
                changes[-1][1] += 1
            else:
                changes.append([block_id, 1, int(state)])
        self._pool.changed.clear()
        return changes

    def _states(self, block_ids: Iterable[int]) -> Iterable[BlockState]:
        tables = self._holds.tables
        held = Counter(load.block_id for load in self._prefetching)
        held.update(block_id for table in tables for block_id in table.tail_first())
        return [self._pool.state(block_id, held.get(block_id, 0)) for block_id in block_ids]

    # ------------------------------------------------------------------ what happens to a table

    def open(self, request_id: str) -> BlockTable:
        """Create an empty block table."""
        table = self.tables[request_id] = BlockTable(
            [[] for _ in self.block_tokens], [0] * len(self.block_tokens), self.block_tokens
        )
        return table

    def grow(self, share: ScheduledRequest, num_cached: int) -> BlockTable:
        """Add the blocks of a step's share to a request; return its block table.

        Args:
            share: the request's part of the batch. Blocks outside the attention window of its first query are freed.
            num_cached: tokens of the prompt found in the cache if it was just admitted; else 0.
        """
        table = self.tables.get(share.request_id) or self.open(share.request_id)
        for group_id, update in enumerate(share.block_tables):
            num_shared = num_cached // self.block_tokens[group_id]
            row, first = table.rows[group_id], table.first_held[group_id]
            self._pool.free(row[max(first, update.start) :])
            del row[update.start :]
            if len(row) < update.start:  # the beginning of the history is missing
                first = update.start
                row.extend([NO_BLOCK] * (update.start - len(row)))
            row.extend(update.block_ids)
            seen = self._first_seen(group_id, share.num_computed_tokens) if self._gives_back else 0
            table.first_held[group_id] = now_first = min(max(first, seen), len(row))
            self._pool.free(reversed(row[first : min(now_first, update.start)]))
            for entry in range(max(now_first, update.start), len(row)):
                self._pool.take(row[entry], is_shared=entry < num_shared)
        table.num_hashed_tokens = max(table.num_hashed_tokens, num_cached)
        return table

    def computed(self, request_id: str, hashes: Sequence[bytes], num_tokens: int) -> None:
        """Register the hashes of the full blocks among the first `num_tokens` tokens, which are computed and final."""
        table = self.tables.get(request_id)
        if table is None or num_tokens - table.num_hashed_tokens < self.page_size or not self._has_names:
            return
        end = min(num_tokens // self.page_size, len(hashes), table.num_slots // self.page_size) * self.page_size
        self._names.cache_full_blocks(table, hashes, end)

    def roll_back(self, request_id: str, num_tokens: int) -> None:
        """Free whole blocks after `num_tokens`, because drafts were rejected."""
        table = self.tables.get(request_id)
        if table is not None and self._gives_back:
            self._reservation.shrink(table, max(num_tokens, table.num_hashed_tokens))

    def close(self, request_id: str) -> None:
        """Free all blocks of a request."""
        self._reservation.close(self.tables.pop(request_id))

    # ------------------------------------------------------------------ holds

    def lend(self, request_id: str, hold_id: int, num_tokens: int) -> None:
        """Lend the full blocks of a request's first `num_tokens` tokens and free the rest."""
        table = self.tables.pop(request_id)
        table.num_tokens = num_tokens
        self._hold(hold_id, table)

    def begin_import(self, event: KVImportBegan) -> None:
        """Hold blocks for a prefix to fetch; blocks that already have its hashes are shared, the others are new."""
        table = BlockTable([list(row) for row in event.rows], [], self.block_tokens)
        table.num_tokens = event.num_tokens
        for group_id, (row, group) in enumerate(zip(event.rows, self._layout.groups, strict=True)):
            first = min(len(row), self._first_seen(group_id, event.num_tokens))
            table.first_held.append(first)
            for entry in range(first, len(row)):
                name = event.block_hashes[(entry + 1) * group.pages_per_block - 1]
                self._pool.take(row[entry], is_shared=self._pool.find(group_id, name) == row[entry])
        self._imports[event.import_id] = event.block_hashes
        self._hold(event.import_id, table)

    def complete_import(self, import_id: int) -> None:
        """Register the hashes of a prefix that has arrived completely."""
        if import_id in self._holds:
            self._holds.complete_import(import_id, self._imports[import_id])

    def end_hold(self, hold_id: int | None) -> None:
        """End a loan or an import."""
        if hold_id is not None:
            self._imports.pop(hold_id, None)
            self._holds.end(hold_id)

    def _hold(self, hold_id: int, table: BlockTable) -> None:
        self._holds.lend(hold_id, table)
        self._pool.changed.update(table.tail_first())

    # ------------------------------------------------------------------ what happens to the cache

    def moved(self, moves: KVMoves) -> None:
        """Take the blocks that are filled from host memory for a step; call this before its requests take theirs.

        Blocks loaded for the requests are cached at once. Prefetched blocks are held until `cache_prefetched`.
        """
        for load in (*moves.loads, *moves.prefetches):
            self._pool.take(load.block_id, is_shared=False)
        self._cache(moves.loads)
        self._prefetching += moves.prefetches

    def cache_prefetched(self) -> None:
        """Cache the blocks that were prefetched beside earlier steps."""
        if self._prefetching:
            self._cache(self._prefetching, are_forgotten=self._drops_prefetches)
            self._prefetching.clear()
        self._drops_prefetches = False

    def forget_hashes(self) -> None:
        """Remove all blocks from the prefix cache."""
        self._drops_prefetches = True
        self._names.forget()

    def quarantine(self, block_ids: Sequence[int]) -> None:
        """Take blocks out of use and clear the prefix cache."""
        self._drops_prefetches = True
        self._names.quarantine(block_ids)

    def _cache(self, loads: Sequence[KVLoad], *, are_forgotten: bool = False) -> None:
        """Register the hashes of filled blocks and drop their references."""
        for load in loads:
            if not are_forgotten:
                self._pool.name(load.block_id, load.group_id, load.block_hash)
        self._pool.free([load.block_id for load in loads])

    def _first_seen(self, group_id: int, start: int) -> int:
        return self._layout.first_needed_block(self._layout.groups[group_id], start)

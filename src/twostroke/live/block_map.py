"""Every KV block and whose it is, as the event log tells it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from itertools import groupby

from twostroke.batch import BlockTableUpdate, KVLoad, KVMoves
from twostroke.events import EngineStarted
from twostroke.scheduler.replay import layout_of


class BlockState(IntEnum):
    """What is in a block."""

    FREE = 0
    USED = 1
    SHARED = 2  # stands in several block tables
    CACHED = 3  # nobody uses it, and its content can be found again
    OUT_OF_USE = 4  # was found corrupt
    HELD = 5  # on loan to another process, or filled from there


class Table:
    """The blocks of one request, or of a hand-over: per KV group its row, and its first entry that is held."""

    __slots__ = ("first_held", "hashes", "num_named", "rows")

    def __init__(self, num_groups: int, hashes: list[bytes]) -> None:
        self.rows: list[list[int]] = [[] for _ in range(num_groups)]
        self.first_held = [0] * num_groups
        self.hashes = hashes
        """One per page."""
        self.num_named = 0
        """Tokens."""

    def held(self) -> Iterable[int]:
        """All blocks that it refers to."""
        for row, first in zip(self.rows, self.first_held, strict=True):
            yield from row[first:]


class BlockMap:
    """Follows the blocks of one engine; the rules are those of kv_cache/, read off from outside.

    What it tells apart from the log alone, the engine's own account tells, too: tests compare them.

    Args:
        started: which pool, and how it is divided.
    """

    def __init__(self, started: EngineStarted) -> None:
        layout = self._layout = layout_of(started.layout)
        self.num_blocks = started.num_blocks
        self.page_size = layout.block_size
        self.block_tokens = tuple(map(layout.tokens_per_block, layout.groups))
        """Per KV group, tokens of a block."""
        self._gives_back = started.cache["kv_reservation"] != "contiguous"
        self._has_names: bool = started.cache["enable_prefix_caching"]
        self._refs = [0] * self.num_blocks
        self._held_refs: dict[int, int] = {}
        self._names: list[tuple[int, bytes] | None] = [None] * self.num_blocks
        self._named: dict[tuple[int, bytes], int] = {}
        self._out_of_use: set[int] = set()
        self._coming: list[KVLoad] = []
        self._are_coming_forgotten = False
        self.changed: set[int] = set()
        """Blocks that may be in another state since somebody emptied this."""

    @property
    def num_usable(self) -> int:
        """Number of blocks that are not out of use."""
        return self.num_blocks - len(self._out_of_use)

    def table(self, hashes: Sequence[bytes]) -> Table:
        """A new one, without blocks."""
        return Table(len(self.block_tokens), list(hashes))

    def state(self, block_id: int) -> BlockState:
        """What is in it."""
        refs = self._refs[block_id]
        if refs:
            if self._held_refs.get(block_id, 0) == refs:
                return BlockState.HELD
            return BlockState.USED if refs == 1 else BlockState.SHARED
        if block_id in self._out_of_use:
            return BlockState.OUT_OF_USE
        return BlockState.FREE if self._names[block_id] is None else BlockState.CACHED

    def runs(self) -> list[list[int]]:
        """The whole pool: [state, how many blocks in a row], from block 0 on."""
        states = map(self.state, range(self.num_blocks))
        return [[int(state), sum(1 for _ in same)] for state, same in groupby(states)]

    def take_changes(self) -> list[list[int]]:
        """[first block, how many, state] of what changed since the last time."""
        changes: list[list[int]] = []
        for block_id in sorted(self.changed):
            state = int(self.state(block_id))
            if changes and changes[-1][2] == state and changes[-1][0] + changes[-1][1] == block_id:
                changes[-1][1] += 1
            else:
                changes.append([block_id, 1, state])
        self.changed.clear()
        return changes

    # ------------------------------------------------------------------ what happens to a table

    def grow(self, table: Table, updates: Sequence[BlockTableUpdate], start: int, num_cached: int) -> None:
        """A step that begins at token `start` gets blocks.

        Args:
            table: whose.
            updates: one per KV group, as the runner is told.
            start: position of its first query: what its windows do not see is given back.
            num_cached: tokens at the beginning that were found in the cache, when it was just admitted; else 0.
        """
        if not any(update.block_ids for update in updates):
            return
        for group_id, update in enumerate(updates):
            num_shared = num_cached // self.block_tokens[group_id]
            row, first = table.rows[group_id], table.first_held[group_id]
            self._drop(row[max(first, update.start) :])
            del row[update.start :]
            if len(row) < update.start:  # the history does not know its beginning
                table.first_held[group_id] = first = update.start
                row.extend([0] * (update.start - len(row)))
            seen = first if not self._gives_back else max(first, self._first_seen(group_id, start))
            leaving = row[first : min(seen, len(row))]
            self._drop(reversed(leaving))
            new_first = max(update.start, seen) - update.start if update.start == 0 else 0
            row.extend(update.block_ids)
            table.first_held[group_id] = min(seen, len(row))
            for entry, block_id in enumerate(update.block_ids[new_first:], update.start + new_first):
                self._take(block_id, is_shared=entry < num_shared)
        table.num_named = max(table.num_named, num_cached)

    def computed(self, table: Table, num_tokens: int) -> None:
        """Its first `num_tokens` tokens are computed and final: full blocks have names now."""
        if num_tokens - table.num_named < self.page_size or not self._has_names:
            return
        end = min(num_tokens // self.page_size, len(table.hashes)) * self.page_size
        for group_id, (row, size) in enumerate(zip(table.rows, self.block_tokens, strict=True)):
            for entry in range(max(table.first_held[group_id], table.num_named // size), min(end // size, len(row))):
                self._name(row[entry], (group_id, self._name_of(table, group_id, entry)))
        table.num_named = max(table.num_named, end)

    def roll_back(self, table: Table, num_tokens: int) -> None:
        """Drafts were rejected: whole blocks right of `num_tokens` are given back."""
        if not self._gives_back:
            return
        for group_id, row in enumerate(table.rows):
            num_kept = self._layout.num_blocks_of_prefix(self._layout.groups[group_id], num_tokens)
            self._drop(reversed(row[max(num_kept, table.first_held[group_id]) :]))
            del row[num_kept:]

    def close(self, table: Table) -> None:
        """All of its blocks are given back."""
        self._drop(table.held())
        table.rows = [[] for _ in self.block_tokens]
        table.first_held = [0] * len(self.block_tokens)
        table.num_named = 0

    def lend(self, table: Table, num_tokens: int) -> Table:
        """Its full blocks are on loan; the rest is given back. Returns the loan's table."""
        self.roll_back(table, num_tokens // self._layout.prefix_tokens * self._layout.prefix_tokens)
        loan = self.table(table.hashes)
        loan.rows, loan.first_held = [list(row) for row in table.rows], list(table.first_held)
        self._hold(loan)
        table.rows = [[] for _ in self.block_tokens]
        table.first_held = [0] * len(self.block_tokens)
        return loan

    def open_import(self, hashes: Sequence[bytes], rows: Sequence[Sequence[int]], num_tokens: int) -> Table:
        """Blocks for a prefix that is fetched; those that have its names are shared, the others are new."""
        table = self.table(hashes)
        for group_id, row in enumerate(rows):
            table.rows[group_id] = list(row)
            table.first_held[group_id] = first = min(len(row), self._first_seen(group_id, num_tokens))
            for entry in range(first, len(row)):
                is_shared = self._names[row[entry]] == (group_id, self._name_of(table, group_id, entry))
                self._take(row[entry], is_shared=is_shared)
        self._hold(table)
        return table

    def close_hold(self, table: Table) -> None:
        """A loan or an import is over."""
        for block_id in table.held():
            self._held_refs[block_id] -= 1
            if not self._held_refs[block_id]:
                del self._held_refs[block_id]
        self.close(table)

    # ------------------------------------------------------------------ what happens to the cache

    def moved(self, moves: KVMoves | None) -> None:
        """Blocks are filled from host memory with a step that was decided; its requests take theirs after this.

        What is loaded for them is cached; what comes beside the pass is held until `arrive`.
        """
        if moves is None:
            return
        for load in moves.loads:
            self._unname(load.block_id)
            self._name(load.block_id, (load.group_id, load.block_hash))
            self.changed.add(load.block_id)
        for load in moves.prefetches:
            self._take(load.block_id, is_shared=False)
            self._held_refs[load.block_id] = 1
        self._coming += moves.prefetches

    def arrive(self) -> None:
        """What came beside passes decided so far is cached."""
        for load in self._coming:
            del self._held_refs[load.block_id]
            if not self._are_coming_forgotten:
                self._name(load.block_id, (load.group_id, load.block_hash))
            self._drop((load.block_id,))
        self._coming.clear()
        self._are_coming_forgotten = False

    def forget_names(self) -> None:
        """Nothing can be found any more."""
        self._are_coming_forgotten = True
        self.changed.update(self._named.values())
        self._named.clear()
        self._names = [None] * self.num_blocks

    def quarantine(self, block_ids: Iterable[int]) -> None:
        """Blocks are out of use, and nothing can be found any more."""
        self.forget_names()
        self._out_of_use.update(block_ids)
        self.changed.update(block_ids)

    # ------------------------------------------------------------------ one block

    def _first_seen(self, group_id: int, start: int) -> int:
        return self._layout.first_needed_block(self._layout.groups[group_id], start)

    def _name_of(self, table: Table, group_id: int, entry: int) -> bytes:
        """Return the name of a block: that of its last page."""
        return table.hashes[(entry + 1) * self._layout.groups[group_id].pages_per_block - 1]

    def _take(self, block_id: int, *, is_shared: bool) -> None:
        if not is_shared:
            self._unname(block_id)
        self._refs[block_id] += 1
        self.changed.add(block_id)

    def _drop(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            self._refs[block_id] -= 1
            self.changed.add(block_id)

    def _hold(self, table: Table) -> None:
        for block_id in table.held():
            self._held_refs[block_id] = self._held_refs.get(block_id, 0) + 1
            self.changed.add(block_id)

    def _name(self, block_id: int, name: tuple[int, bytes]) -> None:
        if name not in self._named:  # whoever computed the same side by side and was first stays the one that is found
            self._named[name] = block_id
            self._names[block_id] = name

    def _unname(self, block_id: int) -> None:
        name = self._names[block_id]
        if name is not None:
            del self._named[name]
            self._names[block_id] = None

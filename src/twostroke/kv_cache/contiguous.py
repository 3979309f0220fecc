"""The contiguous baseline: a request gets all its blocks at once, in one run."""

from __future__ import annotations

import bisect
import itertools

from twostroke.kv_cache.block_pool import BlockTable
from twostroke.kv_cache.layout import KVLayout
from twostroke.kv_cache.prefix_cache import CachedPrefix


class ContiguousReservation:
    """Baseline reservation: at admission a run of consecutive blocks for max_model_len tokens.

    ```
    | request A: group 0, group 1 | free | request B: group 0, group 1 | free ..... |
                                    ^ too short for a run: external fragmentation
    ```
    """

    def __init__(self, layout: KVLayout, num_blocks: int, max_model_len: int) -> None:
        self._layout = layout
        self._num_blocks = num_blocks
        self._row_lens = [layout.num_blocks_of_prefix(group, max_model_len) for group in layout.groups]
        self._block_tokens = tuple(map(layout.tokens_per_block, layout.groups))
        self._run_len = layout.run_blocks(max_model_len)
        self._starts: list[int] = []  # of the runs given out, in order

    @property
    def num_free_blocks(self) -> int:
        """Blocks in gaps that hold a whole run; the other free blocks are unusable."""
        return sum((end - start) // self._run_len * self._run_len for start, end in self._gaps())

    @property
    def num_evicted(self) -> int:
        """0, since nothing is cached."""
        return 0

    def counts(self) -> tuple[int, int, int, int]:
        """Return the counts of free and used blocks; none are cached or quarantined."""
        num_used = len(self._starts) * self._run_len
        return self._num_blocks - num_used, num_used, 0, 0

    def num_blocks_to_compute(self, num_tokens: int, max_tokens_per_step: int) -> int:
        """Return the blocks of a run, the same for every request."""
        del num_tokens, max_tokens_per_step
        return self._run_len

    def num_in_use(self, cached: CachedPrefix) -> int:
        """Return 0, since nothing is shared."""
        del cached
        return 0

    def num_taken(self, table: BlockTable) -> int:
        """Return all blocks of the run, from the start."""
        return table.num_held

    def open(self, cached: CachedPrefix) -> BlockTable:
        """Take the first gap that holds a run."""
        assert cached.num_tokens == 0, "a contiguous table cannot begin with shared blocks"
        run = next((start for start, end in self._gaps() if end - start >= self._run_len), None)
        assert run is not None, f"no run of {self._run_len} blocks; {self._starts}"
        bisect.insort(self._starts, run)
        ends = list(itertools.accumulate(self._row_lens, initial=run))
        rows = [list(range(start, end)) for start, end in itertools.pairwise(ends)]
        return BlockTable(rows, [0] * len(rows), self._block_tokens)

    def num_to_hold(self, cached: CachedPrefix, num_tokens: int) -> tuple[int, int]:
        """Raise an error: without a prefix cache nothing is fetched into it."""
        raise AssertionError(f"{num_tokens} tokens to hold in contiguous runs, behind {cached.num_tokens}")

    def open_prefix(self, cached: CachedPrefix, num_tokens: int) -> BlockTable:
        """Raise an error, as num_to_hold does."""
        raise AssertionError(f"{num_tokens} tokens to hold in contiguous runs, behind {cached.num_tokens}")

    def try_grow(self, table: BlockTable, start: int, end: int) -> bool:
        """Return True, since the run has room for the longest request."""
        assert end <= table.num_slots, f"token {end} of a run for {table.num_slots}; the step began at {start}"
        return True

    def shrink(self, table: BlockTable, num_tokens: int) -> None:
        """Do nothing, since the run stays whole."""

    def close(self, table: BlockTable) -> None:
        """Turn the run into a gap."""
        self._starts.remove(table.rows[0][0])

    def check_invariants(self, tables: list[BlockTable]) -> None:
        """Check that each table is one run, and runs do not overlap."""
        assert sorted(table.rows[0][0] for table in tables) == self._starts, "tables and runs disagree"
        for gap_start, gap_end in self._gaps():
            assert gap_start <= gap_end, f"runs overlap at {gap_end}: {self._starts}"

    def _gaps(self) -> list[tuple[int, int]]:
        """Return the free intervals [start, end) between the runs."""
        starts = [*self._starts, self._num_blocks]
        ends = [0, *(start + self._run_len for start in self._starts)]
        return list(zip(ends, starts, strict=True))

"""The longest prefix of a request whose KV is still in the pool."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from twostroke.batch import CacheEnd, KVMoves
from twostroke.kv_cache.block_pool import BlockKey, BlockPool
from twostroke.kv_cache.block_table import NO_BLOCK
from twostroke.kv_cache.host_tier import HostTier
from twostroke.kv_cache.layout import KVLayout

IN_HOST = -1
"""Stands in entries whose block is in host memory, and has to be loaded before anybody reads it."""


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """A prefix that need not be computed; finding it changes nothing."""

    num_tokens: int
    """A multiple of KVLayout.prefix_tokens."""
    rows: tuple[tuple[int, ...], ...]
    """One per KV group, an entry per block; NO_BLOCK left of what the next query sees, IN_HOST where a block is
    still in host memory."""
    first_held: tuple[int, ...]
    """Per group: the first entry that is a block."""
    end: CacheEnd
    """Why it is not longer."""

    @property
    def block_ids(self) -> list[int]:
        """The blocks to share."""
        held = (row[first:] for row, first in zip(self.rows, self.first_held, strict=True))
        return [block_id for row in held for block_id in row if block_id != IN_HOST]

    @property
    def offloaded(self) -> list[tuple[int, int]]:
        """(KV group, entry) of what is in host memory, the entries that end first first."""
        found = [
            ((entry + 1) / len(row), group_id, entry)
            for group_id, (row, first) in enumerate(zip(self.rows, self.first_held, strict=True))
            for entry in range(first, len(row))
            if row[entry] == IN_HOST
        ]
        return [(group_id, entry) for _, group_id, entry in sorted(found)]


class PrefixCache(Protocol):
    """Finds prefixes, and is told of blocks that may begin one."""

    def longest_prefix(self, block_hashes: Sequence[bytes], num_tokens: int) -> CachedPrefix:
        """The longest usable prefix of a request that has `num_tokens` tokens; a question, changes nothing."""
        ...

    def insert(self, block_id: int, group_id: int, block_hash: bytes) -> None:
        """Makes a block findable whose tokens are all computed and final."""
        ...

    @property
    def num_evicted(self) -> int:
        """Blocks that could be found and had to go, so far."""
        ...

    def take_in_prefetched(self) -> None:
        """What was to be fetched beside passes decided so far can be found: later passes begin when it is there."""
        ...

    def load(self, cached: CachedPrefix, block_hashes: Sequence[bytes]) -> None:
        """What of a prefix is in host memory gets blocks, filled before the pass of the next step that runs.

        Args:
            cached: it has just been found, and there are as many free blocks.
            block_hashes: of the prefix.
        """
        ...

    def prefetch(self, cached: CachedPrefix, block_hashes: Sequence[bytes], max_blocks: int) -> int:
        """The same beside the pass of the step that is being decided, of the first `max_blocks`; returns how many."""
        ...

    def take_moves(self, *, runs: bool) -> KVMoves | None:
        """The copies to and from host memory of a step that was just decided, and runs or not."""
        ...

    @property
    def held_block_ids(self) -> Sequence[int]:
        """Blocks that are being filled, and nobody's yet."""
        ...

    def check_invariants(self) -> None:
        """What is here and in host memory tells one story."""
        ...

    def forget(self) -> int:
        """Nothing known so far is found any more; returns how many blocks that were."""
        ...

    def find_context(self, block_hashes: Sequence[bytes], page: int) -> tuple[tuple[int, ...], ...] | None:
        """Per KV group the blocks of pages 0 to `page` - 1, as far as the tokens of page `page` see them; NO_BLOCK for
        the others. None when one that they see is not there (any more)."""
        ...

    def find_page(self, block_hashes: Sequence[bytes], page: int) -> tuple[int | None, ...]:
        """Per KV group the block that holds a page."""
        ...

    def quarantine(self, block_ids: Sequence[int]) -> None:
        """Takes blocks that nobody refers to out of use, and forgets all names."""
        ...


class SharedPrefixCache:
    """Names in the block pool are the cache, and behind it those in host memory; this is the search over all KV groups.

    A hit of L tokens is usable when a block of each group ends there, and each group still has what the query right
    behind it, at position L, sees: a full group all blocks, a group with a window only the last few.

    ```
    block             0   1   2   3   4   5        x = in the pool
    full group        x   x   x   x   x   ·        L <= 5 blocks
    window, sees 2    ·   x   x   ·   x   x        L = 0, 3 or 6 (blocks 1,2 / 4,5), not 4, not 5
    answer: L = 3
    ```

    One scan from the left, O(blocks of all groups): per group the length of the run of blocks that ends here tells
    whether this L is usable.
    """

    def __init__(self, layout: KVLayout, pool: BlockPool, host: HostTier) -> None:
        self._layout = layout
        self._pool = pool
        self._host = host
        self._has_full_group = any(group.window is None for group in layout.groups)
        self._pages = tuple(group.pages_per_block for group in layout.groups)
        self._prefix_pages = layout.prefix_tokens // layout.block_size
        # Blocks that must end at the hit's end; a full group needs them all, which no run can exceed.
        self._seen = tuple(
            None if group.window is None else -(-(group.window - 1) // layout.tokens_per_block(group))
            for group in layout.groups
        )

    def longest_prefix(self, block_hashes: Sequence[bytes], num_tokens: int) -> CachedPrefix:
        """Searches what of the first num_tokens - 1 tokens is in whole blocks of all groups.

        The last-token rule: the last token is always computed, because its logits are what the step is for.
        """
        step = self._prefix_pages
        most = min(len(block_hashes), (num_tokens - 1) // self._layout.block_size) // step * step
        found: list[list[int]] = [[] for _ in self._seen]
        runs = [0] * len(self._seen)
        best = 0
        for num_pages in range(step, most + 1, step):
            if self._extend(found, runs, block_hashes, num_pages):
                best = num_pages
            elif self._has_full_group and not self._full_groups_reach(found, runs):
                break
        end = CacheEnd.COMPLETE if best == most else self._why_missing(block_hashes, best)
        return self._cut(found, best, end)

    def insert(self, block_id: int, group_id: int, block_hash: bytes) -> None:
        """Names the block."""
        self._pool.name(block_id, group_id, block_hash)

    @property
    def num_evicted(self) -> int:
        """The pool's."""
        return self._pool.num_evicted

    def take_in_prefetched(self) -> None:
        """See PrefixCache."""
        self._host.arrive()

    def load(self, cached: CachedPrefix, block_hashes: Sequence[bytes]) -> None:
        """See PrefixCache."""
        with self._kept(cached):
            self._host.load(self._names(cached.offloaded, block_hashes))

    def prefetch(self, cached: CachedPrefix, block_hashes: Sequence[bytes], max_blocks: int) -> int:
        """See PrefixCache."""
        names = self._names(cached.offloaded[:max_blocks], block_hashes)
        with self._kept(cached):
            self._host.prefetch(names)
        return len(names)

    def _names(self, entries: Sequence[tuple[int, int]], block_hashes: Sequence[bytes]) -> list[BlockKey]:
        """Of (KV group, entry): a block is named by its last page."""
        return [(group_id, block_hashes[(entry + 1) * self._pages[group_id] - 1]) for group_id, entry in entries]

    @contextmanager
    def _kept(self, cached: CachedPrefix) -> Generator[None]:
        """What of the prefix is in the pool stays there, and was used just now."""
        self._pool.share(cached.block_ids)
        yield
        self._pool.free(reversed(cached.block_ids))

    def take_moves(self, *, runs: bool) -> KVMoves | None:
        """See PrefixCache."""
        return self._host.take(runs=runs)

    @property
    def held_block_ids(self) -> Sequence[int]:
        """See PrefixCache."""
        return self._host.held_block_ids

    def check_invariants(self) -> None:
        """See PrefixCache."""
        self._host.check_invariants()

    def forget(self) -> int:
        """Takes all names away, those in host memory, too."""
        return self._host.forget() + self._pool.forget_names()

    def find_context(self, block_hashes: Sequence[bytes], page: int) -> tuple[tuple[int, ...], ...] | None:
        """Looks each of them up: a window's blocks may have been given back and still be there."""
        rows: list[tuple[int, ...]] = []
        num_tokens = page * self._layout.block_size
        for group_id, group in enumerate(self._layout.groups):
            end = self._layout.num_blocks_of_prefix(group, num_tokens)
            first = min(end, self._layout.first_needed_block(group, num_tokens))
            if end * group.pages_per_block > len(block_hashes):
                return None
            names = self._names([(group_id, entry) for entry in range(first, end)], block_hashes)
            found = [self._pool.find(*name) for name in names]
            known = [block_id for block_id in found if block_id is not None]
            if len(known) < len(found):
                return None
            rows.append((NO_BLOCK,) * first + tuple(known))
        return tuple(rows)

    def find_page(self, block_hashes: Sequence[bytes], page: int) -> tuple[int | None, ...]:
        """One look-up a group."""
        last_pages = [(page // per_block + 1) * per_block - 1 for per_block in self._pages]
        return tuple(
            self._pool.find(group_id, block_hashes[last]) if last < len(block_hashes) else None
            for group_id, last in enumerate(last_pages)
        )

    def quarantine(self, block_ids: Sequence[int]) -> None:
        """What was computed from them is suspect, and nobody knows what that is: no name survives."""
        self.forget()
        for block_id in block_ids:
            self._pool.quarantine(block_id)

    def _extend(self, found: list[list[int]], runs: list[int], block_hashes: Sequence[bytes], num_pages: int) -> bool:
        """Looks at the blocks of every group up to page `num_pages`; whether a hit may end there."""
        usable = True
        for group_id, (seen, per_block) in enumerate(zip(self._seen, self._pages, strict=True)):
            row = found[group_id]
            for entry in range(len(row), num_pages // per_block):
                block_hash = block_hashes[(entry + 1) * per_block - 1]
                block_id = self._pool.find(group_id, block_hash)
                if block_id is None and (group_id, block_hash) in self._host:
                    block_id = IN_HOST
                row.append(NO_BLOCK if block_id is None else block_id)
                runs[group_id] = 0 if block_id is None else runs[group_id] + 1
            length = len(row)
            if runs[group_id] < (length if seen is None or seen > length else seen):
                usable = False
        return usable

    def _full_groups_reach(self, found: list[list[int]], runs: list[int]) -> bool:
        rows = zip(found, runs, self._seen, strict=True)
        return all(run == len(row) for row, run, seen in rows if seen is None)

    def _why_missing(self, block_hashes: Sequence[bytes], num_pages: int) -> CacheEnd:
        """Why the next blocks behind the longest usable prefix are not there; in some group one is not.

        (If all groups had them, every run that ends the prefix would go on, and the prefix would be longer.)
        """
        keys = [
            (group_id, block_hashes[page - 1])
            for group_id, per_block in enumerate(self._pages)
            for page in range(num_pages + per_block, num_pages + self._prefix_pages + 1, per_block)
        ]
        missing = [key for key in keys if self._pool.find(*key) is None and key not in self._host]
        assert missing, "the prefix could have been longer"
        evicted = any(self._pool.was_evicted(*key) for key in missing)
        return CacheEnd.EVICTED if evicted else CacheEnd.UNKNOWN

    def _cut(self, found: list[list[int]], num_pages: int, end: CacheEnd) -> CachedPrefix:
        num_tokens = num_pages * self._layout.block_size
        lengths = [num_pages // per_block for per_block in self._pages]
        first_held = tuple(
            min(length, self._layout.first_needed_block(group, num_tokens))
            for group, length in zip(self._layout.groups, lengths, strict=True)
        )
        rows = tuple(
            (NO_BLOCK,) * first + tuple(row[first:length])
            for row, first, length in zip(found, first_held, lengths, strict=True)
        )
        return CachedPrefix(num_tokens, rows, first_held, end)


class NoPrefixCache:
    """enable_prefix_caching=False: nothing is found, nothing is kept."""

    def __init__(self, layout: KVLayout) -> None:
        num_groups = len(layout.groups)
        self._nothing = CachedPrefix(0, ((),) * num_groups, (0,) * num_groups, CacheEnd.DISABLED)

    def longest_prefix(self, block_hashes: Sequence[bytes], num_tokens: int) -> CachedPrefix:
        """Nothing."""
        del block_hashes, num_tokens
        return self._nothing

    def insert(self, block_id: int, group_id: int, block_hash: bytes) -> None:
        """Forgets it."""

    @property
    def num_evicted(self) -> int:
        """None."""
        return 0

    def take_in_prefetched(self) -> None:
        """Nothing comes."""

    def load(self, cached: CachedPrefix, block_hashes: Sequence[bytes]) -> None:
        """Never asked: nothing is found in host memory."""
        raise AssertionError(f"{cached.offloaded} of {len(block_hashes)} blocks are to be loaded")

    def prefetch(self, cached: CachedPrefix, block_hashes: Sequence[bytes], max_blocks: int) -> int:
        """Never asked."""
        raise AssertionError(f"{cached.offloaded} of {len(block_hashes)} blocks, {max_blocks} at most, are fetched")

    def take_moves(self, *, runs: bool) -> KVMoves | None:
        """None."""
        del runs

    @property
    def held_block_ids(self) -> Sequence[int]:
        """None."""
        return ()

    def check_invariants(self) -> None:
        """There is nothing."""

    def forget(self) -> int:
        """There is nothing."""
        return 0

    def find_context(self, block_hashes: Sequence[bytes], page: int) -> tuple[tuple[int, ...], ...] | None:
        """There is nothing."""
        del block_hashes, page
        return None

    def find_page(self, block_hashes: Sequence[bytes], page: int) -> tuple[int | None, ...]:
        """There is nothing."""
        del block_hashes, page
        return (None,) * len(self._nothing.rows)

    def quarantine(self, block_ids: Sequence[int]) -> None:
        """Nobody hits anything here, so nothing is ever checked."""
        raise AssertionError(f"{block_ids}: there is no prefix cache to be checked")

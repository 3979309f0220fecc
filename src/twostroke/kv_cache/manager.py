"""KVCacheManager: the scheduler's view of KV memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from twostroke.batch import BlockTableUpdate, CacheEnd
from twostroke.config.cache import CacheConfig
from twostroke.kv_cache.block_pool import BlockPool, BlockTable
from twostroke.kv_cache.contiguous import ContiguousReservation
from twostroke.kv_cache.holds import KVHolds
from twostroke.kv_cache.host_tier import HostTier, TwoTierPrefixCache, host_slots
from twostroke.kv_cache.layout import KVLayout
from twostroke.kv_cache.prefix_cache import CachedPrefix, SharedPrefixCache
from twostroke.kv_cache.reservation import PagedReservation, Reservation
from twostroke.kv_check import KVCheck


@dataclass(frozen=True, slots=True)
class KVUsage:
    """Counts of blocks by state, and how well the used ones are filled."""

    num_blocks: int
    num_free: int
    num_used: int
    num_cached: int
    num_unreachable: int
    """Free blocks that are unusable because no gap is long enough: external fragmentation. 0 when paged."""
    allocated_bytes: int
    """Bytes of used blocks."""
    filled_bytes: int
    """Bytes of used blocks that hold K and V of a token, or will at the end of the steps decided so far."""
    num_quarantined: int = 0
    """Blocks that were found corrupt and are out of use."""

    @property
    def waste(self) -> float:
        """Share of the allocated bytes that hold nothing: internal fragmentation."""
        return 1 - self.filled_bytes / self.allocated_bytes if self.allocated_bytes else 0.0


class KVCacheManager:
    """Block tables of all admitted requests.

    ```
    cached = find_cached(...)           changes nothing
    num_blocks_to_admit(...) <= num_free_blocks - blocks promised to other requests
    admit(request, cached, ...)         shares the cached blocks
    try_allocate(request, start, end)   before each step; the changes go to the runner
    cache_blocks(request, hashes, n)     after it: makes full, final blocks findable
    roll_back(request, n)               when drafts were rejected
    free(request), or lend(request, number) and holds.end(number) when another process has fetched its blocks
    find_check(...), quarantine(...)    the self-check of cached blocks
    ```
    """

    def __init__(self, layout: KVLayout, num_blocks: int, config: CacheConfig, max_model_len: int) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.max_model_len = max_model_len
        self.keeps_computed_kv = config.enable_kv_cache
        """Whether computed KV is kept; if not, every step begins at position 0 again."""
        self.check_rate = config.kv_check_rate
        """Share of the prefix cache's hits to check."""
        self._block_size = layout.block_size
        self._tables: dict[str, BlockTable] = {}
        self._unchanged = (BlockTableUpdate(0, ()),) * len(layout.groups)
        self._reservation, self._prefix_cache = _parts(layout, num_blocks, config, max_model_len)
        num_groups = len(layout.groups)
        self._nothing = CachedPrefix(0, ((),) * num_groups, (0,) * num_groups, CacheEnd.DISABLED)
        self._holds: KVHolds | None = None

    @property
    def holds(self) -> KVHolds:
        """Blocks on loan, and blocks being filled by another process; no request of this pool runs in them."""
        if self._holds is None:
            self._holds = KVHolds(self.layout, self._reservation, self._prefix_cache)
        return self._holds

    @property
    def host_prefixes(self) -> TwoTierPrefixCache | None:
        """The prefix cache, if evicted prefixes go to host memory."""
        return self._prefix_cache if isinstance(self._prefix_cache, TwoTierPrefixCache) else None

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated: free ones, and cached ones by eviction."""
        return self._reservation.num_free_blocks

    @property
    def num_usable_blocks(self) -> int:
        """Number of blocks, without those that were taken out of use."""
        return self.num_blocks - self._reservation.counts()[3]

    def find_cached(self, block_hashes: Sequence[bytes], num_tokens: int) -> CachedPrefix:
        """Return the longest cached prefix of a request with `num_tokens` tokens; change nothing.

        The last token is never taken from the cache: it has to be computed to be sampled from.
        """
        if self._prefix_cache is None:
            return self._nothing
        return self._prefix_cache.longest_prefix(block_hashes, num_tokens)

    def num_blocks_to_compute(self, num_tokens: int, max_tokens_per_step: int) -> int:
        """Return the most blocks that computing `num_tokens` tokens holds at once."""
        return self._reservation.num_blocks_to_compute(num_tokens, max_tokens_per_step)

    def num_blocks_to_admit(self, cached: CachedPrefix, num_blocks: int) -> int:
        """Return how many of `num_blocks` blocks come from the free ones.

        A cached block without references is among the free ones until it is shared, so it counts; a block that other
        requests hold does not.
        """
        return num_blocks - self._reservation.num_in_use(cached)

    def num_blocks_outstanding(self, request_id: str) -> int:
        """Return the blocks that were promised at admission and are not allocated yet."""
        table = self._tables[request_id]
        return max(0, table.num_promised - self._reservation.num_taken(table))

    def admit(self, request_id: str, cached: CachedPrefix, num_promised: int) -> None:
        """Open a block table that begins with the cached prefix."""
        assert request_id not in self._tables, f"{request_id} has a block table already"
        table = self._reservation.open(cached)
        table.num_promised = num_promised
        self._tables[request_id] = table

    def try_allocate(self, request_id: str, start: int, end: int) -> tuple[BlockTableUpdate, ...] | None:
        """Give every token up to `end` a slot, for a step whose first query is at `start`.

        Returns:
            The changes of the block table, one entry per KV group; None if there is not enough room, and then nothing
            has changed.
        """
        table = self._tables[request_id]
        if end <= table.num_slots and any(table.num_reported):
            table.num_tokens = end
            return self._unchanged
        if not self._reservation.try_grow(table, start, end):
            return None
        firsts, table.num_reported = table.num_reported, list(map(len, table.rows))
        table.num_tokens = end
        rows = zip(firsts, table.rows, strict=True)
        return tuple(BlockTableUpdate(first, tuple(row[first:])) for first, row in rows)

    def cache_blocks(self, request_id: str, block_hashes: Sequence[bytes], num_tokens: int) -> None:
        """Make the full blocks of the first `num_tokens` tokens, which are computed and final, findable."""
        table = self._tables[request_id]
        if self._prefix_cache is None or num_tokens - table.num_hashed_tokens < self._block_size:
            return
        end = min(num_tokens // self._block_size, len(block_hashes)) * self._block_size
        self._prefix_cache.cache_full_blocks(table, block_hashes, end)

    def roll_back(self, request_id: str, num_tokens: int) -> None:
        """Drop the tokens beyond `num_tokens`, and free whole blocks after them."""
        table = self._tables[request_id]
        self._reservation.shrink(table, num_tokens)
        table.num_reported = [min(*known) for known in zip(table.num_reported, map(len, table.rows), strict=True)]
        table.num_tokens = num_tokens

    @property
    def num_evicted_blocks(self) -> int:
        """Cached blocks evicted so far."""
        return self._reservation.num_evicted

    def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes; running requests keep their blocks. Return how many were forgotten."""
        return 0 if self._prefix_cache is None else self._prefix_cache.forget()

    def find_check(self, request_id: str, block_hashes: Sequence[bytes], entry: int) -> KVCheck | None:
        """Return the check of page `entry` of a prefix; None if its blocks, or a block that its tokens see, are
        gone."""
        if self._prefix_cache is None:
            return None
        block_ids = self._prefix_cache.find_page(block_hashes, entry)
        context = self._prefix_cache.find_context(block_hashes, entry)
        if context is None or all(block_id is None for block_id in block_ids):
            return None
        return KVCheck(request_id, entry, block_ids, context)

    def may_have_read(
        self,
        request_id: str,
        entry: int,
        block_ids: Sequence[int | None],
        *,
        block_hashes: Sequence[bytes],
        content: Sequence[bytes],
    ) -> bool:
        """Return whether a request with a block table may have read any of these blocks for its page `entry`.

        Args:
            request_id: of the request.
            entry: the page, which the blocks hold.
            block_ids: per KV group; None skips the group.
            block_hashes: of the request. Only the hash is known of a block that left the window.
            content: block hashes of the request whose check found these blocks.
        """
        table = self._tables[request_id]
        for group, row, first, block_id in zip(
            self.layout.groups, table.rows, table.first_held, block_ids, strict=True
        ):
            own = entry // group.pages_per_block
            if block_id is None or own >= len(row):
                continue
            last_page = (own + 1) * group.pages_per_block - 1
            name = block_hashes[last_page : last_page + 1]
            if row[own] == block_id if own >= first else name and name == content[last_page : last_page + 1]:
                return True
        return False

    def quarantine(self, block_ids: Sequence[int]) -> None:
        """Take blocks that no request holds out of use; forget all cached prefixes."""
        assert self._prefix_cache is not None, f"{block_ids}: there is no prefix cache to be checked"
        self._prefix_cache.quarantine(block_ids)

    def can_lend(self, request_id: str, their_prefix_tokens: int = 0) -> bool:
        """Return whether a request still holds all blocks that the receiver needs to continue after its last full
        block.

        Blocks must be full on both sides. A window may have moved past some of them in the request's last step.

        Args:
            request_id: of the request.
            their_prefix_tokens: KVLayout.prefix_tokens of the receiver; 0: as here.
        """
        table, layout = self._tables[request_id], self.layout
        whole = math.lcm(layout.prefix_tokens, their_prefix_tokens or layout.prefix_tokens)
        end = table.num_tokens // whole * whole
        for group, first_held, size in zip(layout.groups, table.first_held, table.block_tokens, strict=True):
            of_both = math.lcm(size, their_prefix_tokens or size)
            if first_held * size > layout.first_visible(group, end) // of_both * of_both:
                return False
        return True

    def lend(self, request_id: str, hold_id: int) -> None:
        """Lend the full blocks of a request that ends; see KVHolds."""
        self.holds.lend(hold_id, self._tables.pop(request_id))

    def free(self, request_id: str) -> None:
        """Release a request's blocks; hashed ones stay findable until they are evicted."""
        self._reservation.close(self._tables.pop(request_id))

    def num_blocks_held(self, request_id: str) -> int:
        """Return the number of blocks that the request refers to, shared ones included."""
        return self._tables[request_id].num_held

    def num_tokens_held(self, request_id: str) -> int:
        """Return the number of tokens with a slot, by steps decided so far."""
        return self._tables[request_id].num_tokens

    def block_tables(self, request_id: str) -> tuple[tuple[int, ...], ...]:
        """Return the rows as the runner has them, for tests and displays."""
        return tuple(tuple(row) for row in self._tables[request_id].rows)

    def usage(self) -> KVUsage:
        """Return counts of blocks and bytes. O(requests); O(blocks) if blocks have unused rests."""
        num_free, num_used, num_cached, num_quarantined = self._reservation.counts()
        allocated_bytes = num_used * self.layout.bytes_per_block
        return KVUsage(
            num_blocks=self.num_blocks,
            num_free=num_free,
            num_used=num_used,
            num_cached=num_cached,
            num_unreachable=num_free + num_cached - self.num_free_blocks,
            allocated_bytes=allocated_bytes,
            filled_bytes=allocated_bytes - self._idle_bytes(),
            num_quarantined=num_quarantined,
        )

    def _all_tables(self) -> list[BlockTable]:
        """Return the block tables of requests and of holds."""
        return [*self._tables.values(), *([] if self._holds is None else self._holds.tables)]

    def _idle_bytes(self) -> int:
        """Return the bytes of used blocks that hold nothing."""
        layout, idle = self.layout, 0
        # shared blocks, and those that are being filled, are full: only slots at the requests' ends are idle
        tables = self._all_tables()
        for group_id, group in enumerate(layout.groups):
            size = layout.tokens_per_block(group)
            num_slots = sum(len(table.rows[group_id]) * size - table.num_tokens for table in tables)
            idle += num_slots * layout.bytes_per_page(group) // layout.block_size
            rest = layout.bytes_per_block - group.pages_per_block * layout.bytes_per_page(group)
            if rest:
                held = {block_id for table in tables for block_id in table.rows[group_id][table.first_held[group_id] :]}
                idle += len(held) * rest
        return idle

    def check_invariants(self) -> None:
        """Check that the states of all blocks add up to the pool, and that references equal the tables' entries."""
        usage = self.usage()
        num_known = usage.num_free + usage.num_used + usage.num_cached + usage.num_quarantined
        assert num_known == self.num_blocks, f"{usage}"
        tables = self._all_tables()
        if self.host_prefixes is not None:
            for block_id in self.host_prefixes.held_block_ids:
                tables.append(BlockTable([[block_id]], [0], [self._block_size]))
                tables[-1].num_tokens = self._block_size
            self.host_prefixes.check_invariants()
        self._reservation.check_invariants(tables)
        for request_id, table in self._tables.items():
            assert table.num_tokens <= table.num_slots, f"{request_id}: {table.num_tokens} > {table.num_slots}"
            assert table.num_hashed_tokens <= table.num_tokens, f"{request_id}: named more than computed"


def _parts(
    layout: KVLayout, num_blocks: int, config: CacheConfig, max_model_len: int
) -> tuple[Reservation, SharedPrefixCache | None]:
    """Choose the reservation and the prefix cache, or a baseline."""
    if config.kv_reservation == "contiguous":
        return ContiguousReservation(layout, num_blocks, max_model_len), None
    pool = BlockPool(num_blocks)
    if not config.enable_prefix_caching:
        return PagedReservation(layout, pool), None
    num_slots = host_slots(config, layout)
    if num_slots:
        return PagedReservation(layout, pool), TwoTierPrefixCache(layout, pool, HostTier(pool, num_slots))
    return PagedReservation(layout, pool), SharedPrefixCache(layout, pool)

"""HostTier: a second level of the prefix cache, in host memory.

    pool     USED ──► CACHED ──evicted: store──► slot in host memory ──evicted: forgotten
               ▲         ▲                          │
               │         └── load, prefetch ────────┘      its slot stays, so that the next eviction copies nothing
               └── share (a request hits it)

A block that is evicted from the pool is copied to a slot; slots are evicted by least recent use. A prefix is searched
in both places. Its blocks in host memory are copied back to blocks of the pool: with the step of its request if nothing
else runs, and otherwise during the passes of other requests, before its request is admitted, so that no request waits
for a copy.

The order of copies is fixed: the stores of a step, its loads, its pass; its prefetches run during that pass and end
before the next step. Slots that are read between two steps are not reused (`_guarded`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from twostroke.batch import KVLoad, KVMoves, KVStore
from twostroke.config.cache import CacheConfig
from twostroke.kv_cache.block_pool import BlockKey, BlockPool
from twostroke.kv_cache.layout import KVLayout
from twostroke.kv_cache.prefix_cache import IN_HOST, CachedPrefix, SharedPrefixCache


def host_slots(config: CacheConfig, layout: KVLayout) -> int:
    """Return the number of blocks that host memory holds in addition to the pool.

    >>> from twostroke.config.layer_spec import KVSpec
    >>> layout = KVLayout.of([KVSpec(num_kv_heads=2, head_dim=64)], block_size=16, kv_format="bf16")
    >>> [host_slots(CacheConfig(kv_offloading_size=size), layout) for size in (2 * layout.bytes_per_block + 1, None)]
    [2, 0]
    """
    return (config.kv_offloading_size or 0) // layout.bytes_per_block


class HostTier:
    """Index of the blocks in host memory, and the copies that the next step begins with.

    Args:
        pool: its evictions go to host memory; blocks for loads are allocated from it.
        num_slots: blocks that host memory holds.
    """

    def __init__(self, pool: BlockPool, num_slots: int) -> None:
        self._pool = pool
        pool.on_evict = self.on_eviction
        self.num_slots = num_slots
        self.num_stored = 0
        """Blocks stored to host memory so far."""
        self.num_loaded = 0
        """Blocks loaded back so far."""
        self._slots: OrderedDict[BlockKey, int] = OrderedDict()  # the first is the least recently used one
        self._free = list(range(num_slots - 1, -1, -1))
        self._guarded: set[BlockKey] = set()  # read by copies that have not been handed out
        self._forgotten: list[int] = []  # guarded slots whose keys were forgotten
        self._stores: list[KVStore] = []
        self._loads: list[KVLoad] = []
        self._prefetches: list[KVLoad] = []
        self._prefetching: list[KVLoad] = []
        """Prefetches in flight; their blocks have one reference and cannot be found yet."""
        self._drops_prefetches = False

    def __contains__(self, key: object) -> bool:
        return key in self._slots

    @property
    def num_used(self) -> int:
        """Number of occupied slots."""
        return len(self._slots)

    @property
    def held_block_ids(self) -> list[int]:
        """Blocks of the pool that are being filled during a pass."""
        return [load.block_id for load in (*self._prefetches, *self._prefetching)]

    def on_eviction(self, key: BlockKey, block_id: int) -> None:
        """Store the content of an evicted block of the pool, if there is a slot."""
        if key in self._slots:
            self._slots.move_to_end(key)
            return
        slot = self._slot()
        if slot is not None:
            self._slots[key] = slot
            self._stores.append(KVStore(block_id, slot))
            self.num_stored += 1

    def load(self, keys: Sequence[BlockKey]) -> None:
        """Load each key into a block of the pool, cached and filled before the pass of the next step that runs.

        Args:
            keys: in host memory; the pool has as many free blocks, besides those that must stay.
        """
        loads = self._planned(keys)
        for load in loads:
            self._pool.name(load.block_id, load.group_id, load.block_hash)
        self._loads += loads
        self._pool.free([load.block_id for load in reversed(loads)])  # the last entry is evicted first

    def prefetch(self, keys: Sequence[BlockKey]) -> None:
        """Load each key during the pass of the step that is being decided; `cache_prefetched` makes the blocks
        findable."""
        self._prefetches += self._planned(keys)

    def cache_prefetched(self) -> None:
        """Cache the prefetched blocks: every step decided from now on runs after their copies."""
        coming, self._prefetching = self._prefetching, []
        for load in coming:
            if not self._drops_prefetches:
                self._pool.name(load.block_id, load.group_id, load.block_hash)
        self._pool.free([load.block_id for load in reversed(coming)])
        self._drops_prefetches = False

    def take_moves(self, *, runs: bool) -> KVMoves | None:
        """Return the copies of a step that was just decided.

        A step that does not run gets none: stores and loads wait for the next one, and prefetches during its pass
        are dropped.
        """
        if not runs:
            self._pool.free([load.block_id for load in reversed(self._prefetches)])
            self._prefetches.clear()
            return None
        if not (self._stores or self._loads or self._prefetches):
            return None
        moves = KVMoves(tuple(self._stores), tuple(self._loads), tuple(self._prefetches))
        self.num_loaded += len(moves.loads) + len(moves.prefetches)
        self._prefetching += self._prefetches
        for copies in (self._stores, self._loads, self._prefetches):
            copies.clear()
        self._guarded.clear()
        self._free += self._forgotten
        self._forgotten.clear()
        return moves

    def forget(self) -> int:
        """Forget all keys, including those in flight; return how many there were."""
        num_names = len(self._slots)
        for key, slot in self._slots.items():
            (self._forgotten if key in self._guarded else self._free).append(slot)
        self._slots.clear()
        self._guarded.clear()
        self._drops_prefetches = True
        return num_names

    def _planned(self, keys: Sequence[BlockKey]) -> list[KVLoad]:
        """Return loads into newly allocated blocks, each with one reference."""
        for key in keys:
            self._slots.move_to_end(key)
            self._guarded.add(key)
        block_ids = self._pool.allocate(len(keys))
        pairs = zip(keys, block_ids, strict=True)
        return [KVLoad(self._slots[key], block_id, *key) for key, block_id in pairs]

    def _slot(self) -> int | None:
        """Return a free slot, or the least recently used one; None if all of them are being read."""
        if self._free:
            return self._free.pop()
        oldest = next(iter(self._slots), None)
        if oldest is None or oldest in self._guarded:
            return None
        return self._slots.pop(oldest)

    def check_invariants(self) -> None:
        """Check that each slot is free or occupied, and that slots being read stay."""
        slots = [*self._slots.values(), *self._free, *self._forgotten]
        assert sorted(slots) == list(range(self.num_slots)), f"{len(slots)} slots of {self.num_slots}"
        assert self._guarded <= self._slots.keys(), f"read and gone: {self._guarded - self._slots.keys()}"


class TwoTierPrefixCache(SharedPrefixCache):
    """Prefix cache with a second index, of blocks in host memory.

    Args:
        layout: of the pool's blocks.
        pool: of blocks.
        host: tier that receives the pool's evictions.
    """

    def __init__(self, layout: KVLayout, pool: BlockPool, host: HostTier) -> None:
        super().__init__(layout, pool)
        self._host = host

    def finish_prefetches(self) -> None:
        """Make blocks findable that were prefetched during earlier passes: later passes begin when they are there."""
        self._host.cache_prefetched()

    def load(self, cached: CachedPrefix, block_hashes: Sequence[bytes]) -> None:
        """Load the offloaded blocks of a prefix, filled before the pass of the next step that runs.

        Args:
            cached: it has just been found, and there are as many free blocks; afterwards all of it is found in the
                pool.
            block_hashes: of the prefix.
        """
        with self._kept(cached):
            self._host.load(self._names(cached.offloaded, block_hashes))

    def prefetch(self, cached: CachedPrefix, block_hashes: Sequence[bytes], max_tokens: int) -> int:
        """Load the first offloaded blocks during the pass of the step that is being decided; return how many.

        Args:
            cached: the prefix that was found.
            block_hashes: of the prefix.
            max_tokens: at most max_tokens // block_size blocks, but at least one.
        """
        max_blocks = max(1, max_tokens // self._layout.block_size)
        names = self._names(cached.offloaded[:max_blocks], block_hashes)
        with self._kept(cached):
            self._host.prefetch(names)
        return len(names)

    def take_moves(self, *, runs: bool) -> KVMoves | None:
        """Return the host memory copies of a step that was just decided; `runs` is False for an empty step."""
        return self._host.take_moves(runs=runs)

    @property
    def held_block_ids(self) -> Sequence[int]:
        """Blocks that are being filled and belong to no request yet."""
        return self._host.held_block_ids

    def check_invariants(self) -> None:
        """Check the index of host memory."""
        self._host.check_invariants()

    def forget(self) -> int:
        """Forget all keys, including those in host memory; return how many there were."""
        return self._host.forget() + super().forget()

    def _find(self, group_id: int, block_hash: bytes) -> int | None:
        block_id = super()._find(group_id, block_hash)
        return IN_HOST if block_id is None and (group_id, block_hash) in self._host else block_id

    @contextmanager
    def _kept(self, cached: CachedPrefix) -> Generator[None]:
        """Keep the pool's blocks of the prefix during an allocation, and mark them as just used."""
        self._pool.share(cached.block_ids)
        yield
        self._pool.free(reversed(cached.block_ids))

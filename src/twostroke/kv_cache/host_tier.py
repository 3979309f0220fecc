"""HostTier: the prefix cache goes on in host memory, behind the blocks of the pool.

    pool     USED ──► CACHED ──evicted: store──► slot in host memory ──evicted: forgotten
               ▲         ▲                          │
               │         └── load, prefetch ────────┘      its slot stays, so that the next eviction copies nothing
               └── share (a request hits it)

A block that is evicted from the pool leaves its content in a slot; slots go by least recent use. A prefix is found in
both places. What of it is in host memory gets blocks and is copied back: with the step of its request where nothing
else runs, and else beside the passes of others before its request is admitted, so that nobody waits for a copy.

Whatever is said here happens in order: the stores of a step, its loads, its pass; its prefetches beside that pass and
before the next step. Between two steps that run, slots that are read are not given on (`_guarded`).
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
    """Blocks that host memory holds behind the pool.

    >>> from twostroke.config.layer_spec import KVSpec
    >>> layout = KVLayout.of([KVSpec(num_kv_heads=2, head_dim=64)], block_size=16, kv_format="bf16")
    >>> [host_slots(CacheConfig(kv_offloading_size=size), layout) for size in (2 * layout.bytes_per_block + 1, None)]
    [2, 0]
    """
    return (config.kv_offloading_size or 0) // layout.bytes_per_block


class HostTier:
    """Names of what is in host memory, and the copies that the next step begins with.

    Args:
        pool: whose evictions go here, and where blocks for what comes back are taken.
        num_slots: blocks that host memory holds.
    """

    def __init__(self, pool: BlockPool, num_slots: int) -> None:
        self._pool = pool
        pool.on_evict = self.evicted
        self.num_slots = num_slots
        self.num_stored = 0
        """Blocks that went to host memory, so far."""
        self.num_loaded = 0
        """Blocks that came back."""
        self._slots: OrderedDict[BlockKey, int] = OrderedDict()  # the first is the least recently used one
        self._free = list(range(num_slots - 1, -1, -1))
        self._guarded: set[BlockKey] = set()  # they are read by copies that have not been handed out
        self._forgotten: list[int] = []  # slots of such, whose names are gone
        self._stores: list[KVStore] = []
        self._loads: list[KVLoad] = []
        self._prefetches: list[KVLoad] = []
        self._coming: list[KVLoad] = []
        """Prefetches that were handed out; their blocks have one reference, and no names yet."""
        self._are_coming_forgotten = False

    def __contains__(self, key: object) -> bool:
        """It is in host memory."""
        return key in self._slots

    @property
    def num_used(self) -> int:
        """Slots that hold something."""
        return len(self._slots)

    @property
    def held_block_ids(self) -> list[int]:
        """Blocks of the pool that are being filled beside a pass."""
        return [load.block_id for load in (*self._prefetches, *self._coming)]

    def evicted(self, key: BlockKey, block_id: int) -> None:
        """A block of the pool loses its content, which is kept here if there is a slot."""
        if key in self._slots:
            self._slots.move_to_end(key)
            return
        slot = self._slot()
        if slot is not None:
            self._slots[key] = slot
            self._stores.append(KVStore(block_id, slot))
            self.num_stored += 1

    def load(self, keys: Sequence[BlockKey]) -> None:
        """Gives each a block of the pool, cached and filled before the pass of the next step that runs.

        Args:
            keys: they are here; the pool has as many free blocks, besides those that must stay.
        """
        loads = self._planned(keys)
        for load in loads:
            self._pool.name(load.block_id, load.group_id, load.block_hash)
        self._loads += loads
        self._pool.free([load.block_id for load in reversed(loads)])  # the last entry is evicted first

    def prefetch(self, keys: Sequence[BlockKey]) -> None:
        """The same beside the pass of the step that is being decided; they can be found behind `arrive`."""
        self._prefetches += self._planned(keys)

    def arrive(self) -> None:
        """No more is decided that runs before what was handed out is done: it is cached now."""
        coming, self._coming = self._coming, []
        for load in coming:
            if not self._are_coming_forgotten:
                self._pool.name(load.block_id, load.group_id, load.block_hash)
        self._pool.free([load.block_id for load in reversed(coming)])
        self._are_coming_forgotten = False

    def take(self, *, runs: bool) -> KVMoves | None:
        """The copies of a step that was just decided.

        One that does not run takes none along: stores and loads wait for the next, and what was to be fetched beside
        its pass is not.
        """
        if not runs:
            self._pool.free([load.block_id for load in reversed(self._prefetches)])
            self._prefetches.clear()
            return None
        if not (self._stores or self._loads or self._prefetches):
            return None
        moves = KVMoves(tuple(self._stores), tuple(self._loads), tuple(self._prefetches))
        self.num_loaded += len(moves.loads) + len(moves.prefetches)
        self._coming += self._prefetches
        for copies in (self._stores, self._loads, self._prefetches):
            copies.clear()
        self._guarded.clear()
        self._free += self._forgotten
        self._forgotten.clear()
        return moves

    def forget(self) -> int:
        """Nothing is found here any more, and nothing that is on its way; returns how many names there were."""
        num_names = len(self._slots)
        for key, slot in self._slots.items():
            (self._forgotten if key in self._guarded else self._free).append(slot)
        self._slots.clear()
        self._guarded.clear()
        self._are_coming_forgotten = True
        return num_names

    def _planned(self, keys: Sequence[BlockKey]) -> list[KVLoad]:
        """Blocks, each with one reference, and from where they are filled."""
        for key in keys:
            self._slots.move_to_end(key)
            self._guarded.add(key)
        block_ids = self._pool.allocate(len(keys))
        pairs = zip(keys, block_ids, strict=True)
        return [KVLoad(self._slots[key], block_id, *key) for key, block_id in pairs]

    def _slot(self) -> int | None:
        """A free one, or that of what was used least recently; None when all of them are being read."""
        if self._free:
            return self._free.pop()
        oldest = next(iter(self._slots), None)
        if oldest is None or oldest in self._guarded:
            return None
        return self._slots.pop(oldest)

    def check_invariants(self) -> None:
        """Each slot is free or somebody's, and what is read stays."""
        slots = [*self._slots.values(), *self._free, *self._forgotten]
        assert sorted(slots) == list(range(self.num_slots)), f"{len(slots)} slots of {self.num_slots}"
        assert self._guarded <= self._slots.keys(), f"read and gone: {self._guarded - self._slots.keys()}"


class TwoTierPrefixCache(SharedPrefixCache):
    """The prefix cache with names in host memory behind those of the pool.

    Args:
        layout: of the pool's blocks.
        pool: of blocks.
        host: what its evictions go to.
    """

    def __init__(self, layout: KVLayout, pool: BlockPool, host: HostTier) -> None:
        super().__init__(layout, pool)
        self._host = host

    def take_in_prefetched(self) -> None:
        """Let what was to be fetched beside passes decided so far be found: later passes begin when it is there."""
        self._host.arrive()

    def load(self, cached: CachedPrefix, block_hashes: Sequence[bytes]) -> None:
        """Get blocks for what of a prefix is in host memory, filled before the pass of the next step that runs.

        Args:
            cached: it has just been found, and there are as many free blocks; it is found whole then.
            block_hashes: of the prefix.
        """
        with self._kept(cached):
            self._host.load(self._names(cached.offloaded, block_hashes))

    def prefetch(self, cached: CachedPrefix, block_hashes: Sequence[bytes], max_tokens: int) -> int:
        """Load the first blocks beside the pass of the step that is being decided; return how many.

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
        """Return the copies to and from host memory of a step that was just decided, and runs or not."""
        return self._host.take(runs=runs)

    @property
    def held_block_ids(self) -> Sequence[int]:
        """Blocks that are being filled, and nobody's yet."""
        return self._host.held_block_ids

    def check_invariants(self) -> None:
        """What is here and in host memory tells one story."""
        self._host.check_invariants()

    def forget(self) -> int:
        """Take all names away, those in host memory, too."""
        return self._host.forget() + super().forget()

    def _find(self, group_id: int, block_hash: bytes) -> int | None:
        block_id = super()._find(group_id, block_hash)
        return IN_HOST if block_id is None and (group_id, block_hash) in self._host else block_id

    @contextmanager
    def _kept(self, cached: CachedPrefix) -> Generator[None]:
        """What of the prefix is in the pool stays there, and was used just now."""
        self._pool.share(cached.block_ids)
        yield
        self._pool.free(reversed(cached.block_ids))

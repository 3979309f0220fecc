"""The fixed pool of KV blocks: free blocks, used blocks, and cached content that can be found again.

A block is in one of three states, or has been taken out of use, and at any time
`num_free + num_cached + num_used + num_quarantined == num_blocks`:

                 allocate                      free, content is hashed
      FREE ─────────────────────► USED ─────────────────────────────────► CACHED
        ▲                          │ ▲                                     │   │
        └──────────────────────────┘ └─────────────────────────────────────┘   │
          free, content is not hashed      share (a request's prefix hits it)  │
        ▲                                                                      │
        └───────────── allocate, when nothing is FREE: the oldest is evicted ──┘

Used blocks have references, one per block table that contains them. Cached blocks have none and keep their content
until the memory is needed: free blocks are taken first, then the cached block that was freed longest ago.

`BlockTable` has the blocks of one request, one row per KV group.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

BlockKey = tuple[int, bytes]
"""(group_id, block_hash): groups hold different layers, so the same tokens need a block in each."""


class BlockPool:
    """Reference counts, free list and content hashes of `num_blocks` blocks; every operation is O(1) per block."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0, f"num_blocks={num_blocks}"
        self.num_blocks = num_blocks
        self.on_evict: Callable[[BlockKey, int], object] | None = None
        """Called with the key and id of each cached block that is evicted, before the block is reused."""
        self._ref_counts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack; any free block will do
        self._evictable: OrderedDict[int, None] = OrderedDict()  # cached; the first is evicted first
        self._keys: list[BlockKey | None] = [None] * num_blocks
        self._block_ids: dict[BlockKey, int] = {}
        self._quarantined: set[int] = set()
        self._evicted: OrderedDict[BlockKey, None] = OrderedDict()  # keys of the latest evictions, oldest first
        self.num_evicted = 0
        """Cached blocks evicted so far."""

    @property
    def num_free(self) -> int:
        """Blocks without content worth keeping."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks without references whose content can still be found."""
        return len(self._evictable)

    @property
    def num_used(self) -> int:
        """Blocks in at least one block table."""
        return self.num_blocks - len(self._free) - self.num_cached - len(self._quarantined)

    @property
    def num_quarantined(self) -> int:
        """Blocks that were found corrupt and are never allocated again."""
        return len(self._quarantined)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated: free ones, and cached ones by eviction."""
        return len(self._free) + self.num_cached

    def ref_count(self, block_id: int) -> int:
        """Return the number of block tables that contain the block."""
        return self._ref_counts[block_id]

    def allocate(self, num_blocks: int) -> list[int]:
        """Allocate blocks, each with one reference; evict cached content if necessary."""
        assert num_blocks <= self.num_free_blocks, f"{num_blocks} asked, {self.num_free_blocks} can be had"
        block_ids = [self._free.pop() if self._free else self._evict() for _ in range(num_blocks)]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Add a reference to blocks that were found by `find`; cached ones become used."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._evictable[block_id]
            self._ref_counts[block_id] += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Drop one reference of each block. Among those without references left, the first given is evicted first.

        A request gives its blocks tail first: a prefix without its tail is still a prefix, a tail without its head
        can never be found.
        """
        for block_id in block_ids:
            assert self._ref_counts[block_id] > 0, f"block {block_id} is freed twice"
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                if self._keys[block_id] is None:
                    self._free.append(block_id)
                else:
                    self._evictable[block_id] = None

    def find(self, group_id: int, block_hash: bytes) -> int | None:
        """Return the block that holds this content for this group."""
        return self._block_ids.get((group_id, block_hash))

    def name(self, block_id: int, group_id: int, block_hash: bytes) -> None:
        """Make the content of a used block findable by its hash.

        If two requests compute the same prefix at the same time, the block named first is the one that is found; the
        other is an ordinary block and becomes free with its request.
        """
        assert self._ref_counts[block_id] > 0, f"block {block_id} is named while no request uses it"
        key = (group_id, block_hash)
        known = self._keys[block_id]
        assert known is None or known == key, f"block {block_id} is renamed"
        if key not in self._block_ids:
            self._block_ids[key] = block_id
            self._keys[block_id] = key
            self._evicted.pop(key, None)

    def was_evicted(self, group_id: int, block_hash: bytes) -> bool:
        """Return whether this content was evicted, as far as remembered: the last `num_blocks` evictions.

        It affects no decision; it explains to users why a prefix was not found. (A list of keys without content is what
        ARC calls a ghost list: Megiddo and Modha, FAST 2003.)
        """
        return (group_id, block_hash) in self._evicted

    def forget_hashes(self) -> int:
        """Forget all content: cached blocks become free, used ones stay their holders'.

        Returns:
            The number of forgotten keys.
        """
        num_names = len(self._block_ids)
        self._block_ids.clear()
        self._keys = [None] * self.num_blocks
        self._free.extend(self._evictable)
        self._evictable.clear()
        return num_names

    def quarantine(self, block_id: int) -> None:
        """Take a block without references out of use permanently."""
        assert self._ref_counts[block_id] == 0, f"block {block_id} is in use and quarantined"
        assert block_id not in self._quarantined, f"block {block_id} is quarantined twice"
        key = self._keys[block_id]
        if key is None:
            self._free.remove(block_id)
        else:
            del self._evictable[block_id], self._block_ids[key]
            self._keys[block_id] = None
        self._quarantined.add(block_id)

    def _evict(self) -> int:
        block_id, _ = self._evictable.popitem(last=False)
        self.num_evicted += 1
        key = self._keys[block_id]
        assert key is not None, f"block {block_id} is cached without a name"
        del self._block_ids[key]
        self._keys[block_id] = None
        self._evicted[key] = None
        if len(self._evicted) > self.num_blocks:
            self._evicted.popitem(last=False)
        if self.on_evict is not None:
            self.on_evict(key, block_id)
        return block_id

    def check_invariants(self) -> None:
        """Check that every block is in exactly one state, and that keys and blocks point at each other."""
        free, cached, quarantined = set(self._free), set(self._evictable), self._quarantined
        assert len(free) == len(self._free), "a block is in the free list twice"
        assert not free & cached, f"free and cached at once: {sorted(free & cached)}"
        assert not quarantined & (free | cached), f"quarantined and to be had: {sorted(quarantined & (free | cached))}"
        idle = free | cached | quarantined
        for block_id, ref_count in enumerate(self._ref_counts):
            assert (ref_count == 0) == (block_id in idle), f"{block_id}: ref_count={ref_count}"
        named = {block_id: key for block_id, key in enumerate(self._keys) if key is not None}
        assert named == {block_id: key for key, block_id in self._block_ids.items()}, "names and blocks disagree"
        assert cached <= set(named), f"cached without a name: {sorted(cached - set(named))}"
        assert not self._evicted.keys() & self._block_ids.keys(), "evicted and there at once"
        assert len(self._evicted) <= self.num_blocks, f"{len(self._evicted)} evictions remembered"
        nameless = free | quarantined
        assert not nameless & set(named), f"free or quarantined with a name: {sorted(nameless & set(named))}"


# ------------------------------------------------------------------ tables of requests


NO_BLOCK = 0
"""Block id in entries that left the window. It is a valid id, so a kernel that gathers before it masks stays in
bounds; no query sees its content."""


class BlockTable:
    """Map from a request's tokens to blocks, one row per KV group.

    ```
    full group     [ 17            ] [  4            ] [ 30            ]   first_held 0
    window group   [  · ] [  · ] [  9 ] [ 22 ] [  6 ] [ 13 ]               first_held 2: entries 0 and 1 were freed
                   0 .................................... num_slots tokens have room in all rows
                   0 ........................... num_tokens have a slot
    ```
    """

    __slots__ = (
        "block_tokens",
        "first_held",
        "num_hashed_tokens",
        "num_promised",
        "num_reported",
        "num_tokens",
        "rows",
    )

    def __init__(self, rows: list[list[int]], first_held: list[int], block_tokens: Sequence[int]) -> None:
        self.rows = rows
        self.first_held = first_held
        self.block_tokens = block_tokens
        """Tokens of a block, per row."""
        self.num_tokens = 0
        self.num_reported = [0] * len(rows)
        """Entries that the runner knows, per row."""
        self.num_hashed_tokens = 0
        """Tokens of whole pages whose full blocks went into the prefix cache or came from it."""
        self.num_promised = 0
        """Blocks that admission reserved to compute everything known then."""

    @property
    def num_slots(self) -> int:
        """Tokens that have room in all rows."""
        return min(len(row) * size for row, size in zip(self.rows, self.block_tokens, strict=True))

    @property
    def num_held(self) -> int:
        """Blocks that the request refers to, over all groups."""
        return sum(len(row) - first for row, first in zip(self.rows, self.first_held, strict=True))

    def tail_first(self, num_tokens: int = 0) -> list[int]:
        """Return held blocks that begin at token `num_tokens` or later, last one first, with the groups interleaved."""
        if len(self.rows) == 1:
            first = max(self.first_held[0], -(-num_tokens // self.block_tokens[0]))
            return self.rows[0][first:][::-1]
        held = [
            (-entry * size, group_id, row[entry])
            for group_id, (row, first, size) in enumerate(
                zip(self.rows, self.first_held, self.block_tokens, strict=True)
            )
            for entry in range(max(first, -(-num_tokens // size)), len(row))
        ]
        return [block_id for _, _, block_id in sorted(held)]

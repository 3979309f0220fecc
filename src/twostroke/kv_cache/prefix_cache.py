"""Prefix cache: the longest prefix of a request whose KV is still in the pool.

A block's content is identified by a chained hash of every token up to its end.

    salt ──► root ──► h0 = H(root, tokens 0..15) ──► h1 = H(h0, tokens 16..31) ──► …

K and V of a token depend on all tokens before it, so a block's hash must as well: equal hashes mean equal prefixes,
not only equal blocks. A salt gives a tenant its own cache: nothing hashed under one salt is found under another.

Collisions: blake2b with 16 bytes. By accident two different prefixes collide with probability n² / 2^129, 1e-21 for a
billion blocks; a deliberate collision takes about 2^64 hashes. A hit is therefore trusted, and tokens are not compared.
For stronger guarantees, give each tenant a salt that the others do not know.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from twostroke.batch import CacheEnd
from twostroke.kv_cache.block_pool import NO_BLOCK, BlockKey, BlockPool, BlockTable
from twostroke.kv_cache.layout import KVLayout

IN_HOST = -1
"""Block id in entries whose block is in host memory and has to be loaded before use."""


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """A prefix that need not be computed; finding it changes nothing."""

    num_tokens: int
    """Length of the prefix, a multiple of KVLayout.prefix_tokens."""
    rows: tuple[tuple[int, ...], ...]
    """One row per KV group, with an entry per block; NO_BLOCK before what the next query sees, IN_HOST if a block is
    still in host memory."""
    first_held: tuple[int, ...]
    """First entry that is a block, per group."""
    end: CacheEnd
    """Reason why it is not longer."""

    @property
    def block_ids(self) -> list[int]:
        """The blocks to share."""
        held = (row[first:] for row, first in zip(self.rows, self.first_held, strict=True))
        return [block_id for row in held for block_id in row if block_id != IN_HOST]

    @property
    def offloaded(self) -> list[tuple[int, int]]:
        """(KV group, entry) of blocks in host memory, ordered by their ends."""
        found = [
            ((entry + 1) / len(row), group_id, entry)
            for group_id, (row, first) in enumerate(zip(self.rows, self.first_held, strict=True))
            for entry in range(first, len(row))
            if row[entry] == IN_HOST
        ]
        return [(group_id, entry) for _, group_id, entry in sorted(found)]


class SharedPrefixCache:
    """Search for cached prefixes over all KV groups; the keys in the block pool are the cache.

    A hit of L tokens is usable when a block of each group ends there, and each group still has the blocks that the next
    query, at position L, sees: all blocks of a full group, only the last few of a group with a window.

    ```
    block             0   1   2   3   4   5        x = in the pool
    full group        x   x   x   x   x   ·        L <= 5 blocks
    window, sees 2    ·   x   x   ·   x   x        L = 0, 3 or 6 (blocks 1,2 / 4,5), not 4, not 5
    answer: L = 3
    ```

    One scan from the left, O(blocks of all groups): for each group, the length of the run of blocks that ends here
    decides whether this L is usable.
    """

    def __init__(self, layout: KVLayout, pool: BlockPool) -> None:
        self._layout = layout
        self._pool = pool
        self._has_full_group = any(group.window is None for group in layout.groups)
        self._pages = tuple(group.pages_per_block for group in layout.groups)
        self._prefix_pages = layout.prefix_tokens // layout.block_size
        # Blocks that must end at the hit's end; a full group needs them all, which no run can exceed.
        self._seen = tuple(
            None if group.window is None else -(-(group.window - 1) // layout.tokens_per_block(group))
            for group in layout.groups
        )

    def longest_prefix(self, block_hashes: Sequence[bytes], num_tokens: int) -> CachedPrefix:
        """Return the longest cached prefix of the first num_tokens - 1 tokens, in whole blocks of all groups.

        The last token is always computed, because the step needs its logits.
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

    def cache_full_blocks(self, table: BlockTable, block_hashes: Sequence[bytes], num_tokens: int) -> None:
        """Make the full blocks of the first `num_tokens` tokens findable, unless they are already.

        Args:
            table: of a request, or of a hold.
            block_hashes: one per page: a block's hash is that of its last page.
            num_tokens: computed and final; whole pages.
        """
        for group_id, (per_block, size) in enumerate(zip(self._pages, table.block_tokens, strict=True)):
            row = table.rows[group_id]
            for entry in range(max(table.first_held[group_id], table.num_hashed_tokens // size), num_tokens // size):
                self._pool.name(row[entry], group_id, block_hashes[(entry + 1) * per_block - 1])
        table.num_hashed_tokens = max(table.num_hashed_tokens, num_tokens)

    def _names(self, entries: Sequence[tuple[int, int]], block_hashes: Sequence[bytes]) -> list[BlockKey]:
        """Return the keys of (KV group, entry); a block's hash is that of its last page."""
        return [(group_id, block_hashes[(entry + 1) * self._pages[group_id] - 1]) for group_id, entry in entries]

    def forget(self) -> int:
        """Forget all keys; return how many there were."""
        return self._pool.forget_hashes()

    def find_context(self, block_hashes: Sequence[bytes], page: int) -> tuple[tuple[int, ...], ...] | None:
        """Return the block tables that the queries of a page see; None if a block is gone.

        Each block is looked up: a window's blocks may have been freed and still be cached.
        """
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
        """Return the block of each group that holds a page; None where there is none."""
        last_pages = [(page // per_block + 1) * per_block - 1 for per_block in self._pages]
        return tuple(
            self._pool.find(group_id, block_hashes[last]) if last < len(block_hashes) else None
            for group_id, last in enumerate(last_pages)
        )

    def quarantine(self, block_ids: Sequence[int]) -> None:
        """Take blocks out of use and forget all keys, since it is unknown what was computed from these blocks."""
        self.forget()
        for block_id in block_ids:
            self._pool.quarantine(block_id)

    def _find(self, group_id: int, block_hash: bytes) -> int | None:
        return self._pool.find(group_id, block_hash)

    def _extend(self, found: list[list[int]], runs: list[int], block_hashes: Sequence[bytes], num_pages: int) -> bool:
        """Look up the blocks of every group up to page `num_pages`; return whether a hit may end there."""
        usable = True
        for group_id, (seen, per_block) in enumerate(zip(self._seen, self._pages, strict=True)):
            row = found[group_id]
            for entry in range(len(row), num_pages // per_block):
                block_hash = block_hashes[(entry + 1) * per_block - 1]
                block_id = self._find(group_id, block_hash)
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
        """Return why a block after the longest usable prefix is missing in some group.

        (If all groups had it, every run that ends the prefix would continue, and the prefix would be longer.)
        """
        keys = [
            (group_id, block_hashes[page - 1])
            for group_id, per_block in enumerate(self._pages)
            for page in range(num_pages + per_block, num_pages + self._prefix_pages + 1, per_block)
        ]
        missing = [key for key in keys if self._find(*key) is None]
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


# ------------------------------------------------------------------ names of blocks' contents


HASH_BYTES = 16


def hash_blocks(
    token_ids: Sequence[int], block_size: int, salt: str | None = None, parent: bytes | None = None
) -> tuple[bytes, ...]:
    """Return the hashes of the full blocks of `token_ids`; a last block that is not full has none.

    Args:
        token_ids: tokens from a block border on; each fits into 32 bits.
        block_size: tokens in a block.
        salt: separates caches; an empty one is none. It only matters at the start of the chain.
        parent: hash of the previous block; None at the start of the chain.

    >>> whole = hash_blocks(range(8), block_size=4)
    >>> len(whole), len(hash_blocks(range(7), block_size=4))
    (2, 1)
    >>> hash_blocks(range(4, 8), block_size=4, parent=whole[0]) == whole[1:]
    True
    >>> hash_blocks(range(8), block_size=4, salt="tenant") == whole
    False
    """
    if len(token_ids) < block_size:
        return ()
    chain = parent if parent is not None else _root(salt)
    pack = struct.Struct(f"<{block_size}I").pack
    hashes: list[bytes] = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        tokens = pack(*token_ids[start : start + block_size])
        chain = hashlib.blake2b(chain + tokens, digest_size=HASH_BYTES).digest()
        hashes.append(chain)
    return tuple(hashes)


BlockHasher = Callable[[str, Sequence[int], int, str | None], tuple[bytes, ...]]
"""Function that returns the hashes of a request's full blocks from its id, its tokens, the block size and the cache
salt."""


def hash_by_tokens(request_id: str, token_ids: Sequence[int], block_size: int, salt: str | None) -> tuple[bytes, ...]:
    """Return the hashes of a request's full blocks from their tokens, regardless of the request."""
    del request_id
    return hash_blocks(token_ids, block_size, salt)


def drift_salt(salt: str | None, numerics: Mapping[str, str]) -> str:
    """Return the salt for hashes of blocks whose KV may have other numerics than their worker.

    Args:
        salt: salt of the request.
        numerics: numerics of the worker that computes and lends the KV.

    >>> drift_salt(None, {"dtype": "float32"}) == drift_salt("tenant", {"dtype": "float32"})
    False
    """
    found = hashlib.blake2b((salt or "").encode(), digest_size=HASH_BYTES, person=b"twostroke-drift")
    for name, value in sorted(numerics.items()):
        found.update(f"{name}={value}\n".encode())
    return found.hexdigest()


def _root(salt: str | None) -> bytes:
    """Return the start of the chain; it has its own hash domain, so that no block can collide with a root."""
    return hashlib.blake2b((salt or "").encode(), digest_size=HASH_BYTES, person=b"twostroke-root").digest()

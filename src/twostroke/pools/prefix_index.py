"""Prefixes that a member probably has: the hashes of its latest requests, up to a limit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from twostroke.config.checks import check_int


class PrefixIndex:
    """Chained block hashes; the least recently used are forgotten first.

    The index is an estimate: the member evicts blocks by its own rules, and reports it later or never. An error
    costs an
    unexpected prefill, never a wrong token.

    A chain is added from its end to its start, so a block is always older than the block before it, and the limit
    removes
    chains from their ends. So the known part of a chain is its beginning, and bisection finds its length. (A hash
    that is
    dropped alone may leave later ones of its chain; until they are forgotten, the prefix may be overestimated.)

    Args:
        max_hashes: the limit, at least 1.

    >>> index = PrefixIndex(3)
    >>> index.add([b"a", b"b", b"c"]), index.add([b"x"])
    ([], [b'c'])
    >>> index.depth([b"a", b"b", b"c"]), len(index)
    (2, 3)
    """

    __slots__ = ("_hashes", "max_hashes")

    def __init__(self, max_hashes: int) -> None:
        check_int("max_hashes", max_hashes, 1)
        self.max_hashes = max_hashes
        self._hashes: OrderedDict[bytes, None] = OrderedDict()
        """Hashes in order; the first one is forgotten next."""

    def __len__(self) -> int:
        return len(self._hashes)

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self._hashes

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._hashes)

    def depth(self, hashes: Sequence[bytes]) -> int:
        """Return the number of a chain's hashes, from the first on, that the member probably has. O(log n)."""
        known = self._hashes
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high + 1) // 2
            if hashes[middle - 1] in known:
                low = middle
            else:
                high = middle - 1
        return low

    def add(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Add the chain of a request that the member computes; return the hashes that the limit removes."""
        known = self._hashes
        for block_hash in reversed(hashes[: self.max_hashes]):
            known[block_hash] = None
            known.move_to_end(block_hash)
        return [known.popitem(last=False)[0] for _ in range(len(known) - self.max_hashes)]

    def drop(self, hashes: Iterable[bytes]) -> None:
        """Remove hashes that the member has evicted; ignore unknown ones."""
        for block_hash in hashes:
            self._hashes.pop(block_hash, None)

    def check_invariants(self) -> None:
        """Check that the limit holds."""
        assert len(self._hashes) <= self.max_hashes, f"{len(self._hashes)} hashes, at most {self.max_hashes}"

"""Which prefixes a member is believed to have: the last hashes it was told to compute, and no more than a bound."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from twostroke.config.checks import whole_number


class PrefixIndex:
    """Chained hashes, least recently used forgotten first.

    A belief, not a fact: the member evicts by its own rules and says so later, if at all. A belief that is wrong costs
    a prefill that was not expected, never a wrong token.

    A chain is taken in from its end to its start, so a block is always older than the block before it, and the bound
    cuts chains at their ends. Hence what is known of a chain is its first part, and the length of that is found by
    bisection. (A hash that was dropped alone may leave later ones of its chain behind; until they are forgotten the
    prefix may be taken for longer than it is.)

    Args:
        max_hashes: the bound, at least 1.

    >>> index = PrefixIndex(3)
    >>> index.add([b"a", b"b", b"c"]), index.add([b"x"])
    ([], [b'c'])
    >>> index.depth([b"a", b"b", b"c"]), len(index)
    (2, 3)
    """

    __slots__ = ("_hashes", "max_hashes")

    def __init__(self, max_hashes: int) -> None:
        whole_number("max_hashes", max_hashes, 1)
        self.max_hashes = max_hashes
        self._hashes: OrderedDict[bytes, None] = OrderedDict()
        """The one to be forgotten next is first."""

    def __len__(self) -> int:
        return len(self._hashes)

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self._hashes

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._hashes)

    def depth(self, hashes: Sequence[bytes]) -> int:
        """How many of a chain's hashes, from its first on, are believed to be there. O(log n)."""
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
        """A request with this chain was computed there, or is going to be; returns what the bound pushed out."""
        known = self._hashes
        for block_hash in reversed(hashes[: self.max_hashes]):
            known[block_hash] = None
            known.move_to_end(block_hash)
        return [known.popitem(last=False)[0] for _ in range(len(known) - self.max_hashes)]

    def drop(self, hashes: Iterable[bytes]) -> None:
        """The member has evicted these; unknown ones are passed over."""
        for block_hash in hashes:
            self._hashes.pop(block_hash, None)

    def check_invariants(self) -> None:
        """The bound holds."""
        assert len(self._hashes) <= self.max_hashes, f"{len(self._hashes)} hashes, at most {self.max_hashes}"

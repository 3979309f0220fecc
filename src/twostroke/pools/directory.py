"""Members that probably have a prefix, found by its hash in time independent of the number of members."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from twostroke.pools.prefix_index import PrefixIndex


class PrefixDirectory:
    """A PrefixIndex of each member, and for each hash the members that got it last.

    Only the last few are kept. A prefix that all members have (a system prompt) is found at any idle member, and
    holders of a rare prefix are all kept. So a list never grows with the pool.

    Args:
        max_holders: most members kept for one hash.
    """

    def __init__(self, max_holders: int) -> None:
        self._max_holders = max_holders
        self._indexes: dict[str, PrefixIndex] = {}
        self._holders: dict[bytes, list[str]] = {}
        """Members by hash, the latest last; no list is empty."""

    def __len__(self) -> int:
        """Return the number of hashes with a known holder."""
        return len(self._holders)

    def depth(self, member_id: str, hashes: Sequence[bytes]) -> int:
        """Return the number of the chain's hashes that the member probably has."""
        index = self._indexes.get(member_id)
        return 0 if index is None or not hashes else index.depth(hashes)

    def holders(self, hashes: Sequence[bytes], most: int) -> list[str]:
        """Return the members with the longest known part of the chain, the latest first.

        Members with the first half of that part follow, then a quarter and so on, until there are `most`. Shorter parts
        count, because the member with the longest may be the busiest. O(log n + most).

        >>> directory = PrefixDirectory(max_holders=2)
        >>> directory.open("p0", max_hashes=8), directory.open("p1", max_hashes=8)
        (None, None)
        >>> directory.add("p0", [b"a", b"b"])
        >>> directory.add("p1", [b"a"])
        >>> directory.holders([b"a", b"b", b"c"], most=4)
        ['p0', 'p1']
        """
        known = self._holders
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high + 1) // 2
            if hashes[middle - 1] in known:
                low = middle
            else:
                high = middle - 1
        found: dict[str, None] = {}
        while low and len(found) < most:
            found.update(dict.fromkeys(reversed(known.get(hashes[low - 1], ()))))
            low //= 2
        return list(found)[:most]

    def open(self, member_id: str, max_hashes: int) -> None:
        """Add a member with an empty cache; a known member keeps its index.

        Args:
            member_id: its id.
            max_hashes: limit of its index. It must not exceed the member's cache, or the index would overestimate it.
        """
        if member_id not in self._indexes:
            self._indexes[member_id] = PrefixIndex(max_hashes)

    def add(self, member_id: str, hashes: Sequence[bytes]) -> None:
        """Add the chain of a request that the member computes; ignore an unknown member."""
        index = self._indexes.get(member_id)
        if index is None:
            return
        for block_hash in hashes[: index.max_hashes]:
            holders = self._holders.get(block_hash)
            if holders is None:
                self._holders[block_hash] = [member_id]
            elif holders[-1] != member_id:
                if member_id in holders:
                    holders.remove(member_id)
                holders.append(member_id)
                del holders[: -self._max_holders]
        self._unlist(member_id, index.add(hashes))

    def drop(self, member_id: str, hashes: Iterable[bytes]) -> None:
        """Remove hashes that the member has evicted."""
        index = self._indexes.get(member_id)
        if index is not None:
            gone = [block_hash for block_hash in hashes if block_hash in index]
            index.drop(gone)
            self._unlist(member_id, gone)

    def reset(self, member_id: str) -> None:
        """Forget all hashes of a member, because its cache is empty."""
        index = self._indexes.get(member_id)
        if index is not None:
            self._unlist(member_id, index)
            self._indexes[member_id] = PrefixIndex(index.max_hashes)

    def close(self, member_id: str) -> None:
        """Remove a member."""
        self.reset(member_id)
        self._indexes.pop(member_id, None)

    def _unlist(self, member_id: str, hashes: Iterable[bytes]) -> None:
        for block_hash in hashes:
            holders = self._holders.get(block_hash)
            if holders is not None and member_id in holders:
                holders.remove(member_id)
                if not holders:
                    del self._holders[block_hash]

    def check_invariants(self) -> None:
        """Check that every listed member has the hash, and that the limits hold."""
        for index in self._indexes.values():
            index.check_invariants()
        for block_hash, holders in self._holders.items():
            assert 0 < len(holders) <= self._max_holders, f"{len(holders)} holders, at most {self._max_holders}"
            assert len(set(holders)) == len(holders), f"listed twice: {holders}"
            for member_id in holders:
                assert block_hash in self._indexes[member_id], f"{member_id} is listed for what it does not have"

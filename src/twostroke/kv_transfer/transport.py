"""KVTransport: what an engine asks of those who move KV, whichever way they do it.

`KVLender` and `KVBorrower` are the two sides over sockets, with the bytes sent or the memory shared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from twostroke.kv_cache.holds import KVImport
from twostroke.kv_transfer.address import Address


class KVSource(msgspec.Struct, frozen=True, array_like=True):
    """Where a prefix can be fetched."""

    address: Address
    epoch: int
    """Of the process: another one at the same address has not lent it."""
    lease_id: int
    block_size: int = 0
    """Tokens of a page there, as far as whoever names the source knows; 0: as many as here."""
    prefix_tokens: int = 0
    """Likewise where blocks of all KV groups end there, see KVLayout; 0: where each page does."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """What came of fetching a prefix."""

    problem: str
    """Why it is worth nothing; empty: all of it is there."""
    num_bytes: int = 0
    first_byte_s: float = 0.0
    """When the first of it was there; 0: nothing came."""
    drift: str = ""
    """How the lender's numerics differ."""
    busy_s: float = 0.0
    """While bytes came: without the time in which the lender had still to compute them."""
    last_byte_s: float = 0.0
    """Time at which all of it had arrived and the lender had confirmed it, or fetching had failed; 0: not known."""


class FetchingSide(Protocol):
    """Of an engine that takes KV from others."""

    def fetch(
        self, source: KVSource, into: KVImport, digest: bytes, is_done: Callable[[Fetched], object]
    ) -> Callable[[], None]:
        """Begins to fetch, and comes back at once.

        Args:
            source: where from.
            into: the pages; they are written to until `is_done` is called, and not afterwards.
            digest: the lender's name of the prefix's last block, by its own block size.
            is_done: called once, in any thread.

        Returns:
            A call that gives it up; `is_done` is called all the same.
        """
        ...

    def close(self) -> None:
        """Nothing is fetched any more."""
        ...

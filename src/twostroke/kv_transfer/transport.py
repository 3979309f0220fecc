"""KVTransport: the engine's interface to the transfer of KV, independent of how bytes are moved.

`KVLender` and `KVBorrower` are its two sides over sockets, with the bytes sent or the memory shared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from twostroke.kv_cache.holds import KVImport
from twostroke.kv_transfer.address import Address


class KVSource(msgspec.Struct, frozen=True, array_like=True):
    """Address and lease under which a prefix can be fetched."""

    address: Address
    epoch: int
    """Epoch of the lending process: another process at the same address does not know the lease."""
    lease_id: int
    block_size: int = 0
    """Tokens per page at the lender, as far as known here; 0: same as here."""
    prefix_tokens: int = 0
    """Granularity in tokens at which blocks of all KV groups end at the lender, see KVLayout; 0: every page."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """Outcome of fetching a prefix."""

    problem: str
    """Reason why the fetch failed; empty: it succeeded."""
    num_bytes: int = 0
    first_byte_s: float = 0.0
    """Time at which the first bytes arrived; 0: none arrived."""
    drift: str = ""
    """Differences between the lender's numerics and ours."""
    busy_s: float = 0.0
    """Seconds during which bytes arrived, without the time that the lender still computed."""
    last_byte_s: float = 0.0
    """Time at which all of it had arrived and the lender had confirmed it, or fetching had failed; 0: not known."""


class BorrowerSide(Protocol):
    """The borrowing side of an engine."""

    def fetch(
        self, source: KVSource, into: KVImport, digest: bytes, is_done: Callable[[Fetched], object]
    ) -> Callable[[], None]:
        """Start a fetch and return at once.

        Args:
            source: address and lease.
            into: pages to fill; they are written to until `is_done` is called, and not afterwards.
            digest: the lender's hash of the prefix's last block, by its own block size.
            is_done: called once, in any thread.

        Returns:
            A function that cancels the fetch; `is_done` is called nevertheless.
        """
        ...

    def close(self) -> None:
        """Stop fetching prefixes."""
        ...

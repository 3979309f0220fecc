"""The lender's accounts: which blocks may be read under which lease, and for how long.

    granted ──► parts become ready while the prompt is computed ──► complete ──► returned
                         │                                             │            (fetched, or timed out)
                         └───────────────── dead ◄────────────────────┘
                       the request was aborted, preempted, or failed

A lease is valid only as a whole. A borrower that has read all parts asks at the end whether the lease stayed valid,
and discards what it read if not. So nothing is locked while bytes travel, and blocks that may have changed are never
used.

Pure: the caller passes the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

LEASE_S = 10.0
"""Seconds until a lease expires, from its reader's last progress, or from its completion if nothing reads it."""
_MAX_ENDED_LEASES = 1024
"""Ended leases that are remembered, so that late borrowers are refused at once. For an unknown lease a borrower waits,
because it may still be granted."""


@dataclass(frozen=True, slots=True)
class LeasePart:
    """Pages that one step fills, in all layers, in table order."""

    first: int
    """First entry, an index into the page tables."""
    rows: tuple[tuple[int, ...], ...]
    """Page ids of entries `first`, `first` + 1, … per KV group."""

    @property
    def end(self) -> int:
        """Entry behind the last one."""
        return self.first + len(self.rows[0])


@dataclass(slots=True, eq=False)
class Lease:
    """The lease of one prompt's pages."""

    num_blocks: int
    """Number of entries: whole pages of the prompt."""
    expires_s: float
    parts: list[LeasePart] = field(default_factory=list[LeasePart])
    num_layers_ready: int = 0
    """Layers ready in the last part; earlier parts are ready in all layers."""
    digest: bytes = b""
    """Hash of the last block, which covers all tokens before it; empty: not complete."""
    failure: str = ""
    """Reason why the lease is dead; empty: it is valid."""
    num_readers: int = 0
    is_returned: bool = False

    @property
    def num_entries_begun(self) -> int:
        """Number of entries in all parts."""
        return self.parts[-1].end if self.parts else 0

    @property
    def is_complete(self) -> bool:
        """Whether all layers of all blocks are final."""
        return bool(self.digest)


class LeaseBook:
    """All leases of a process. Lease ids are never reused while it lives."""

    def __init__(self, num_layers: int, lease_s: float = LEASE_S) -> None:
        self._num_layers = num_layers
        self._lease_s = lease_s
        self._leases: dict[int, Lease] = {}
        self._ended: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def get(self, lease_id: int) -> Lease | None:
        """Return a lease that has not ended, or None."""
        return self._leases.get(lease_id)

    def grant(self, lease_id: int, num_blocks: int, now_s: float) -> None:
        """Grant a lease of `num_blocks` entries; it does not expire before they are complete."""
        assert lease_id not in self._leases, f"lease {lease_id} is not new"
        self._leases[lease_id] = Lease(num_blocks, now_s + self._lease_s)

    def begin_part(self, lease_id: int, rows: Sequence[Sequence[int]], end: int, *, is_computed: bool) -> None:
        """Add the entries up to `end` that the next step fills, or that are filled already.

        Args:
            lease_id: id of the lease.
            rows: per KV group the whole block table.
            end: entry behind the last full one after this step.
            is_computed: whether the entries are filled already, because the prefix cache had them.
        """
        lease = self._leases[lease_id]
        first, end = lease.num_entries_begun, min(end, lease.num_blocks)
        if end > first:
            lease.parts.append(LeasePart(first, tuple(tuple(row[first:end]) for row in rows)))
            lease.num_layers_ready = self._num_layers if is_computed else 0

    def layer_ready(self, lease_id: int, num_layers: int) -> None:
        """Record how many layers of the last part are ready."""
        lease = self._leases.get(lease_id)
        if lease is not None and lease.num_layers_ready < num_layers:
            lease.num_layers_ready = num_layers

    def complete(self, lease_id: int, digest: bytes, now_s: float) -> None:
        """Record that all entries are final and on loan."""
        lease = self._leases[lease_id]
        assert lease.num_entries_begun == lease.num_blocks, f"lease {lease_id} has {lease.num_entries_begun} entries"
        lease.digest = digest
        lease.expires_s = now_s + self._lease_s

    def invalidate(self, lease_id: int, failure: str) -> None:
        """Declare a lease dead, so that what was read under it is discarded. A lease that has ended or is dead stays
        so."""
        lease = self._leases.get(lease_id)
        if lease is not None and not lease.failure:
            lease.failure = failure

    def invalidate_incomplete(self, failure: str) -> None:
        """Declare dead all leases that are still being computed."""
        for lease_id, lease in self._leases.items():
            if not lease.is_complete:
                self.invalidate(lease_id, failure)

    def open(self, lease_id: int) -> Lease | None:
        """Add a reader to a lease; None: the lease has ended or was never granted."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.is_returned:
            return None
        lease.num_readers += 1
        return lease

    def is_over(self, lease_id: int) -> bool:
        """Return whether a lease was granted and has ended; leases that ended long ago are forgotten."""
        lease = self._leases.get(lease_id)
        return lease_id in self._ended if lease is None else lease.is_returned

    def close(self, lease: Lease) -> None:
        """Remove a reader, whatever it has read."""
        lease.num_readers -= 1

    def renew(self, lease: Lease, now_s: float) -> None:
        """Extend a lease whose reader makes progress; a dead lease stays dead."""
        if not lease.failure:
            lease.expires_s = now_s + self._lease_s

    def settle(self, lease: Lease) -> str:
        """Return the lease after a reader has read everything; return why the bytes are invalid, or an empty string."""
        if not lease.failure:
            lease.is_returned = True
        return lease.failure

    def reap(self, now_s: float) -> list[int]:
        """Remove and return ended leases: returned, dead, or complete and expired. Looks at all leases each time."""
        over: list[int] = []
        for lease_id, lease in list(self._leases.items()):
            if lease.is_complete and now_s >= lease.expires_s and not lease.failure:
                lease.failure = "its time was over"
            if (lease.is_returned or lease.failure) and not lease.num_readers:
                del self._leases[lease_id]
                over.append(lease_id)
        self._ended.update(dict.fromkeys(over))
        while len(self._ended) > _MAX_ENDED_LEASES:
            del self._ended[next(iter(self._ended))]
        return over


class LenderSide:
    """The lending side of an engine: keeps the leases and notifies their readers. Called in the engine's thread.

    Args:
        book: all leases.
        clock: in seconds.
        lock: guards the book; held only briefly.
    """

    def __init__(self, book: LeaseBook, clock: Callable[[], float], lock: AbstractContextManager[object]) -> None:
        self._book = book
        self._clock = clock
        self._lock = lock

    def grant(self, lease_id: int, num_blocks: int) -> None:
        """Grant a lease of `num_blocks` pages per KV group to a request that has arrived."""
        with self._lock:
            self._book.grant(lease_id, num_blocks, self._clock())
            self._notify_readers(lease_id)

    def begin_part(self, lease_id: int, rows: Sequence[Sequence[int]], end: int, *, is_computed: bool) -> None:
        """Add pages that are filled, or that the next step fills; see LeaseBook."""
        with self._lock:
            self._book.begin_part(lease_id, rows, end, is_computed=is_computed)
            self._notify_readers(lease_id)

    def layer_ready(self, lease_ids: Sequence[int], num_layers: int) -> None:
        """Record how many layers of the last parts the current step has written."""
        with self._lock:
            for lease_id in lease_ids:
                self._book.layer_ready(lease_id, num_layers)
                self._notify_readers(lease_id)

    def complete(self, lease_id: int, digest: bytes) -> None:
        """Record that all entries are final and on loan; `digest` is the hash of the last block."""
        with self._lock:
            self._book.complete(lease_id, digest, self._clock())
            self._notify_readers(lease_id)

    def invalidate(self, lease_id: int, failure: str) -> None:
        """Declare a lease dead; its readers discard what they read."""
        with self._lock:
            self._book.invalidate(lease_id, failure)
            self._notify_readers(lease_id)

    def close(self) -> None:
        """Stop serving borrowers."""

    def _notify_readers(self, lease_id: int) -> None:
        """Notify the readers of a lease of a change; the lock is held."""

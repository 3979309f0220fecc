"""The lender's books: which blocks may be read by whoever holds a lease, and how long.

    granted ──► parts become ready while the prompt is computed ──► complete ──► returned
                         │                                             │            (fetched, or nobody came in time)
                         └───────────────── dead ◄────────────────────┘
                       the request was aborted, preempted, or failed

A lease is only good as a whole: who has read its parts asks in the end whether it was good all along, and throws away
what it read if not. So nothing has to be locked while bytes travel, and no doubt ever becomes an answer.

Pure: the clock is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

LEASE_S = 10.0
"""A lease ends so long after the last progress of whoever reads it, or after it was complete and nobody came."""
_OVER_REMEMBERED = 1024
"""Leases that are over, whose late borrowers are told so at once: others are waited for, they may be granted yet."""


@dataclass(frozen=True, slots=True)
class LeasePart:
    """Pages that a step fills, in all layers, one after the other."""

    first: int
    """Entry of the page tables."""
    rows: tuple[tuple[int, ...], ...]
    """Per KV group the pages of entries `first`, `first` + 1, …"""

    @property
    def end(self) -> int:
        """The entry behind the last."""
        return self.first + len(self.rows[0])


@dataclass(slots=True, eq=False)
class Lease:
    """One prompt's pages."""

    num_blocks: int
    """Entries in all: whole pages of the prompt."""
    expires_s: float
    parts: list[LeasePart] = field(default_factory=list[LeasePart])
    num_layers_ready: int = 0
    """Of the last part; those before it are there in all layers."""
    digest: bytes = b""
    """Name of the last block, which all tokens before it have a say in; empty: not complete."""
    trouble: str = ""
    """Why it is dead; empty: it is good."""
    num_readers: int = 0
    is_returned: bool = False

    @property
    def num_entries_begun(self) -> int:
        """Entries in parts."""
        return self.parts[-1].end if self.parts else 0

    @property
    def is_complete(self) -> bool:
        """All layers of all blocks are final."""
        return bool(self.digest)


class LeaseBook:
    """All leases of a process. Numbers are never used again in its life."""

    def __init__(self, num_layers: int, lease_s: float = LEASE_S) -> None:
        self._num_layers = num_layers
        self._lease_s = lease_s
        self._leases: dict[int, Lease] = {}
        self._over: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def get(self, lease_id: int) -> Lease | None:
        """One that is not over."""
        return self._leases.get(lease_id)

    def grant(self, lease_id: int, num_blocks: int, now_s: float) -> None:
        """A request begins that will lend so many blocks; it has time without end until they are complete."""
        assert lease_id not in self._leases, f"lease {lease_id} is not new"
        self._leases[lease_id] = Lease(num_blocks, now_s + self._lease_s)

    def begin_part(self, lease_id: int, rows: Sequence[Sequence[int]], end: int, *, is_computed: bool) -> None:
        """A step fills the entries up to `end`, or they are filled already.

        Args:
            lease_id: whose.
            rows: per KV group the whole block table.
            end: entry behind the last full one after this step.
            is_computed: they need no step: they were found in the prefix cache.
        """
        lease = self._leases[lease_id]
        first, end = lease.num_entries_begun, min(end, lease.num_blocks)
        if end > first:
            lease.parts.append(LeasePart(first, tuple(tuple(row[first:end]) for row in rows)))
            lease.num_layers_ready = self._num_layers if is_computed else 0

    def layer_ready(self, lease_id: int, num_layers: int) -> None:
        """Of the part that was begun last, so many layers are there."""
        lease = self._leases.get(lease_id)
        if lease is not None and lease.num_layers_ready < num_layers:
            lease.num_layers_ready = num_layers

    def complete(self, lease_id: int, digest: bytes, now_s: float) -> None:
        """All of it is final and on loan."""
        lease = self._leases[lease_id]
        assert lease.num_entries_begun == lease.num_blocks, f"lease {lease_id} has {lease.num_entries_begun} entries"
        lease.digest = digest
        lease.expires_s = now_s + self._lease_s

    def kill(self, lease_id: int, trouble: str) -> None:
        """What was read under it is worth nothing. One that is over, or dead, stays so."""
        lease = self._leases.get(lease_id)
        if lease is not None and not lease.trouble:
            lease.trouble = trouble

    def kill_incomplete(self, trouble: str) -> None:
        """All that are still being computed."""
        for lease_id, lease in self._leases.items():
            if not lease.is_complete:
                self.kill(lease_id, trouble)

    def open(self, lease_id: int) -> Lease | None:
        """Somebody reads; None: it is over, or was never granted."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.is_returned:
            return None
        lease.num_readers += 1
        return lease

    def is_over(self, lease_id: int) -> bool:
        """It was granted and will not be again; of those that are long over this is not known any more."""
        lease = self._leases.get(lease_id)
        return lease_id in self._over if lease is None else lease.is_returned

    def close(self, lease: Lease) -> None:
        """A reader is gone, whatever it has read."""
        lease.num_readers -= 1

    def progress(self, lease: Lease, now_s: float) -> None:
        """A reader gets on. A dead lease is not brought back by that."""
        if not lease.trouble:
            lease.expires_s = now_s + self._lease_s

    def settle(self, lease: Lease) -> str:
        """A reader has read everything: empty if it may believe it, which returns the lease; else why not."""
        if not lease.trouble:
            lease.is_returned = True
        return lease.trouble

    def reap(self, now_s: float) -> list[int]:
        """Leases that are over: returned, dead, or complete and out of time. All of them are looked at each time."""
        over: list[int] = []
        for lease_id, lease in list(self._leases.items()):
            if lease.is_complete and now_s >= lease.expires_s and not lease.trouble:
                lease.trouble = "its time was over"
            if (lease.is_returned or lease.trouble) and not lease.num_readers:
                del self._leases[lease_id]
                over.append(lease_id)
        self._over.update(dict.fromkeys(over))
        while len(self._over) > _OVER_REMEMBERED:
            del self._over[next(iter(self._over))]
        return over


class LendingSide:
    """Of an engine whose KV is fetched: keeps the book, and tells whoever reads. Called in the engine's thread.

    Args:
        book: of all leases.
        clock: in seconds.
        lock: guards the book; nobody holds it for long.
    """

    def __init__(self, book: LeaseBook, clock: Callable[[], float], lock: AbstractContextManager[object]) -> None:
        self._book = book
        self._clock = clock
        self._lock = lock

    def grant(self, lease_id: int, num_blocks: int) -> None:
        """A request has come that will lend so many pages of each KV group."""
        with self._lock:
            self._book.grant(lease_id, num_blocks, self._clock())
            self._tell_readers(lease_id)

    def begin_part(self, lease_id: int, rows: Sequence[Sequence[int]], end: int, *, is_computed: bool) -> None:
        """Pages are there, or filled by the step that is next; see LeaseBook."""
        with self._lock:
            self._book.begin_part(lease_id, rows, end, is_computed=is_computed)
            self._tell_readers(lease_id)

    def layer_ready(self, lease_ids: Sequence[int], num_layers: int) -> None:
        """The step that runs has written so many layers of what was begun last."""
        with self._lock:
            for lease_id in lease_ids:
                self._book.layer_ready(lease_id, num_layers)
                self._tell_readers(lease_id)

    def complete(self, lease_id: int, digest: bytes) -> None:
        """All of it is final and on loan; `digest` names its last block."""
        with self._lock:
            self._book.complete(lease_id, digest, self._clock())
            self._tell_readers(lease_id)

    def kill(self, lease_id: int, trouble: str) -> None:
        """Whoever reads it throws that away."""
        with self._lock:
            self._book.kill(lease_id, trouble)
            self._tell_readers(lease_id)

    def close(self) -> None:
        """Nobody is served any more."""

    def _tell_readers(self, lease_id: int) -> None:
        """There is news of a lease; the lock is held."""

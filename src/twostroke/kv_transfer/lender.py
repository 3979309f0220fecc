"""The side whose KV is fetched: one thread per reader of a lease, beside the engine's own."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass

from twostroke.errors import EngineError
from twostroke.kernels.head_order import HeadOrder
from twostroke.kv_transfer.address import Address, listen
from twostroke.kv_transfer.connection import Connection, Listener
from twostroke.kv_transfer.frames import (
    FROM_BORROWER,
    PROTOCOL,
    All,
    Copied,
    EntriesReady,
    Fetch,
    FetchRefused,
    LenderFrame,
    Terms,
    TransferBroken,
    Valid,
    Waiting,
    encode_frame,
    receive,
    send_pieces,
)
from twostroke.kv_transfer.geometry import KVGeometry
from twostroke.kv_transfer.leases import Lease, LeaseBook, LenderSide
from twostroke.kv_transfer.memory import KVMemory, SharedMemory
from twostroke.kv_transfer.nixl_reads import NixlAgent
from twostroke.log import get_logger

log = get_logger(__name__)

TIMEOUT_S = 10.0
"""Seconds a peer may send nothing, or accept nothing."""
WAITING_EVERY_S = 1.0
_REST_BYTES = 4096
"""Bytes per read while waiting for a borrower to close its connection."""
REAPS_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class LendableMemory:
    """KV memory of an engine, and how borrowers read it."""

    memory: KVMemory
    shared: SharedMemory | NixlAgent | None = None
    """Means by which other processes read the memory: mapping it, or NIXL's agent, which has it registered; None:
    neither."""
    orders: tuple[HeadOrder, ...] = ()
    """Places of tokens in a head of its pages, per KV group, for borrowers of another format."""


class KVLender(LenderSide):
    """The lending side of an engine: serves borrowers the KV that the engine's thread announces; `close` it.

    The engine's thread calls `grant`, `begin_part`, `layer_ready`, `complete` and `invalidate`; none of them blocks.

    Args:
        pool: the memory that is lent.
        geometry: of this side.
        epoch: of this process.
        clock: in seconds.
        is_over: called for each lease that will not be read any more, in a thread of the lender.
        timeout_s: seconds a borrower may send nothing, or accept nothing.
    """

    def __init__(
        self,
        pool: LendableMemory,
        geometry: KVGeometry,
        *,
        epoch: int,
        clock: Callable[[], float],
        is_over: Callable[[int], object],
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._mutex = threading.Lock()
        super().__init__(LeaseBook(pool.memory.num_layers), clock, self._mutex)
        self._memory = pool.memory
        self._orders = pool.orders
        self._nixl = pool.shared if isinstance(pool.shared, NixlAgent) else None
        self._shared = pool.shared if isinstance(pool.shared, SharedMemory) else None
        self._is_read_here = False
        """Whether borrowers in this process read the memory."""
        self._geometry = geometry
        self._epoch = epoch
        self._is_over = is_over
        self._patience_s = timeout_s
        self._granted = threading.Condition(self._mutex)
        """Notified when a lease is granted, or no more will be."""
        self._released = threading.Condition(self._mutex)
        """Notified when a lease or one of its readers ends."""
        self._lease_changed: dict[int, threading.Condition] = {}
        """Conditions that notify the readers of a lease, by lease. Each lease has its own: otherwise a layer of one
        prompt would wake up the readers of all others, and they would delay the thread that computes."""
        self._listeners: list[Listener] = []
        self._is_closed = False
        threading.Thread(target=self._reap, daemon=True, name="twostroke-lease-reaper").start()

    def listen(self, address: Address) -> Address:
        """Accept borrowers at an address; return it with the port that was chosen."""
        listener, bound = listen(address, self._memory)
        self._is_read_here |= bool(address.name)
        self._listeners.append(listener)
        threading.Thread(target=self._accept, args=(listener,), daemon=True, name="twostroke-lender").start()
        return bound

    # ------------------------------------------------------------------ the engine's thread

    def grant(self, lease_id: int, num_blocks: int) -> None:
        super().grant(lease_id, num_blocks)
        with self._lock:
            self._granted.notify_all()

    def invalidate(self, lease_id: int, failure: str) -> None:
        super().invalidate(lease_id, failure)
        with self._lock:
            self._released.notify_all()

    @property
    def num_leases(self) -> int:
        """Number of leases that have not ended."""
        with self._lock:
            return len(self._book)

    def close(self) -> None:
        """Stop accepting borrowers.

        Complete leases can be read to their end while the process lives. Incomplete ones fail, and their readers are
        told.
        """
        with self._lock:
            self._is_closed = True
            self._book.invalidate_incomplete("the process that computed it has stopped")
            for changed in (self._granted, self._released, *self._lease_changed.values()):
                changed.notify_all()
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()

    def _notify_readers(self, lease_id: int) -> None:
        condition = self._lease_changed.get(lease_id)
        if condition is not None:
            condition.notify_all()

    # ------------------------------------------------------------------ the lender's own threads

    def _reap(self) -> None:
        while not self._is_closed:
            with self._lock:
                over = self._book.reap(self._clock())
                if not over:
                    self._released.wait(REAPS_EVERY_S)
            for lease_id in over:
                self._is_over(lease_id)

    def _accept(self, listener: Listener) -> None:
        while not self._is_closed:
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if self._is_closed:
                    return
                # the connection broke, or no descriptor is free now: later ones may succeed
                log.warning("could not accept a borrower: %s", error)
                time.sleep(REAPS_EVERY_S)
                continue
            self.serve(connection)

    def serve(self, connection: Connection) -> None:
        """Serve one borrower in a new thread."""
        threading.Thread(target=self._serve, args=(connection,), daemon=True, name="twostroke-loan").start()

    def _serve(self, connection: Connection) -> None:
        connection.settimeout(self._patience_s)
        with connection, contextlib.nullcontext() if self._nixl is None else self._nixl.lending():
            try:
                self._lend(connection)
            except (OSError, EngineError) as error:
                log.info("lost a borrower: %s", error)
            if self._nixl is not None:
                _wait_for_close(connection)

    def _lend(self, connection: Connection) -> None:
        fetch = receive(connection, FROM_BORROWER)
        if not isinstance(fetch, Fetch):
            raise TransferBroken(f"expected Fetch, not {type(fetch).__name__}.")
        reason = self._refusal(fetch)
        if reason:
            _send(connection, FetchRefused(reason))
            return
        with self._opened(fetch) as lease:
            if lease is None:
                _send(connection, FetchRefused(f"lease {fetch.lease_id} is over, or was never granted here."))
                return
            reason = self._mismatch(fetch, lease)
            if reason:
                _send(connection, FetchRefused(reason))
                return
            self._send_terms(connection, fetch)
            failure = self._send_parts(connection, fetch, lease) or self._settle(connection, lease)
            _send(connection, FetchRefused(failure) if failure else Valid())

    def _refusal(self, fetch: Fetch) -> str:
        if fetch.protocol != PROTOCOL:
            return f"protocol {fetch.protocol} there, {PROTOCOL} here. Run the same version of twostroke in both pools."
        if fetch.epoch != self._epoch:
            return "the process that granted this lease is gone."
        return self._geometry.refusal(fetch.geometry, allows_drift=fetch.allows_drift)

    def _mismatch(self, fetch: Fetch, lease: Lease) -> str:
        """Return why the lease does not match the request; empty: it does."""
        num_groups, num_entries = len(self._memory.layout.groups), lease.num_blocks
        if fetch.num_blocks != num_entries:
            return f"lease {fetch.lease_id} is of {num_entries} blocks; {fetch.num_blocks} were asked for."
        if len(fetch.first_entries) != num_groups or not all(
            0 <= first <= num_entries for first in fetch.first_entries
        ):
            return (
                f"first entries {fetch.first_entries}: one from 0 to {num_entries} for each of {num_groups} KV groups."
            )
        return ""

    @contextlib.contextmanager
    def _opened(self, fetch: Fetch) -> Generator[Lease | None]:
        """Add a reader to the lease for the block; wait for a lease that the engine has not granted yet."""
        deadline = self._clock() + self._patience_s
        with self._lock:
            while (lease := self._book.open(fetch.lease_id)) is None:
                never = self._is_closed or self._book.is_over(fetch.lease_id)
                if never or not self._granted.wait(deadline - self._clock()):
                    break
            if lease is not None:
                self._lease_changed.setdefault(fetch.lease_id, threading.Condition(self._mutex))
        try:
            yield lease
        finally:
            if lease is not None:
                with self._lock:
                    self._book.close(lease)
                    if not lease.num_readers:
                        del self._lease_changed[fetch.lease_id]
                    self._released.notify_all()

    def _send_terms(self, connection: Connection, fetch: Fetch) -> None:
        if not self._reads_memory(fetch):
            _send(connection, Terms(self._geometry, 0, orders=self._orders))
            return
        remote = None if self._nixl is None else self._nixl.facts
        terms = encode_frame(Terms(self._geometry, self._memory.num_bytes, remote, self._orders))
        if self._shared is not None and isinstance(connection, socket.socket):
            socket.send_fds(connection, [terms[:1]], self._shared.descriptors)
            terms = terms[1:]
        connection.sendall(terms)

    def _reads_memory(self, fetch: Fetch) -> bool:
        """Return whether the borrower reads the blocks itself, so that only their ids are sent."""
        return fetch.shares_memory and bool(self._shared or self._nixl or self._is_read_here)

    def _send_parts(self, connection: Connection, fetch: Fetch, lease: Lease) -> str:
        """Send all parts as they become ready; return why the lease failed, or an empty string."""
        index, layer, said_s = 0, 0, self._clock()
        condition = self._lease_changed[fetch.lease_id]
        is_read = self._reads_memory(fetch)
        while True:
            with self._lock:
                if not _has_more(lease, index, layer):
                    condition.wait(WAITING_EVERY_S)
                failure = lease.failure
                part = lease.parts[index] if index < len(lease.parts) else None
                is_last = index == len(lease.parts) - 1
                ready = lease.num_layers_ready if is_last else self._memory.num_layers
                digest = lease.digest if part is None else b""
                self._book.renew(lease, self._clock())
            if failure:
                return failure
            if part is not None and ready > layer:
                starts = [max(0, first - part.first) for first in fetch.first_entries]
                rows = part.rows if is_read else ()
                _send(connection, EntriesReady(part.first, part.end, layer, ready, rows))
                if not is_read:
                    send_pieces(connection, self._memory.pieces(part.rows, range(layer, ready), starts))
                layer = ready
                if layer == self._memory.num_layers:
                    index, layer = index + 1, 0
            elif digest:
                _send(connection, All(digest))
                return ""
            elif self._clock() - said_s >= WAITING_EVERY_S:
                _send(connection, Waiting())
            else:
                continue
            said_s = self._clock()

    def _settle(self, connection: Connection, lease: Lease) -> str:
        copied = receive(connection, FROM_BORROWER)
        if not isinstance(copied, Copied):
            raise TransferBroken(f"expected Copied, not {type(copied).__name__}.")
        with self._lock:
            return self._book.settle(lease)


def _has_more(lease: Lease, index: int, layer: int) -> bool:
    """Return whether there is more to send to a reader that has the layers before `layer` of part `index`."""
    if lease.failure or index < len(lease.parts) - 1:
        return True
    if index == len(lease.parts) - 1:
        return lease.num_layers_ready > layer
    return lease.is_complete


def _send(connection: Connection, frame: LenderFrame) -> None:
    connection.sendall(encode_frame(frame))


def _wait_for_close(connection: Connection) -> None:
    """Wait until the borrower closes the connection.

    It may be in the middle of a NIXL read, which needs this side to finish. This also holds where the lease has failed
    or the borrower was silent for too long.
    """
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(None)
        rest = memoryview(bytearray(_REST_BYTES))
        while connection.recvmsg_into([rest])[0]:
            pass

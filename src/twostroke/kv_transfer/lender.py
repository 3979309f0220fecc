"""The side whose KV is fetched: a thread for each reader of a lease, beside the engine's own."""

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
    LenderSays,
    Terms,
    TransferBroken,
    Valid,
    Waiting,
    framed,
    receive,
    send_pieces,
)
from twostroke.kv_transfer.geometry import KVGeometry
from twostroke.kv_transfer.leases import Lease, LeaseBook, LendingSide
from twostroke.kv_transfer.memory import KVMemory, SharedMemory
from twostroke.kv_transfer.nixl_reads import NixlAgent
from twostroke.log import get_logger

log = get_logger(__name__)

PATIENCE_S = 10.0
"""How long a peer may say nothing, or take nothing."""
WAITING_EVERY_S = 1.0
_REST_BYTES = 4096
"""Of what a borrower says when nobody asks it any more."""
REAPS_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class PoolToLend:
    """KV memory of an engine, and how borrowers read it."""

    memory: KVMemory
    shared: SharedMemory | NixlAgent | None = None
    """How other processes read the same memory: by mapping it, or by NIXL's agent, which has it registered; None: they
    do not."""
    orders: tuple[HeadOrder, ...] = ()
    """Per KV group, places of tokens in a head of its pages, for borrowers of another format."""


class KVLender(LendingSide):
    """Lends what the engine's thread announces to those who ask; `close` it.

    The engine's thread calls `grant`, `begin_part`, `layer_ready`, `complete` and `kill`; none of them waits.

    Args:
        pool: what is lent.
        geometry: of this side.
        epoch: of this process.
        clock: in seconds.
        is_over: told of each lease that nobody will read any more, in a thread of the lender's.
        patience_s: how long a borrower may say nothing, or take nothing.
    """

    def __init__(
        self,
        pool: PoolToLend,
        geometry: KVGeometry,
        *,
        epoch: int,
        clock: Callable[[], float],
        is_over: Callable[[int], object],
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._mutex = threading.Lock()
        super().__init__(LeaseBook(pool.memory.num_layers), clock, self._mutex)
        self._memory = pool.memory
        self._orders = pool.orders
        self._nixl = pool.shared if isinstance(pool.shared, NixlAgent) else None
        self._shared = pool.shared if isinstance(pool.shared, SharedMemory) else None
        self._is_read_here = False
        """By borrowers in this process."""
        self._geometry = geometry
        self._epoch = epoch
        self._is_over = is_over
        self._patience_s = patience_s
        self._granted = threading.Condition(self._mutex)
        """Leases have come, or none will any more."""
        self._released = threading.Condition(self._mutex)
        """A lease has ended, or one reader of it."""
        self._news: dict[int, threading.Condition] = {}
        """Of leases that are read, for those who read them. Each has its own: a layer of one prompt must not wake up
        the readers of all that wait behind it, who would hold up the very thread that computes."""
        self._listeners: list[Listener] = []
        self._is_closed = False
        threading.Thread(target=self._reap, daemon=True, name="twostroke-lease-reaper").start()

    def listen(self, address: Address) -> Address:
        """Takes borrowers at an address; returns where that is, if a port was to be found."""
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

    def kill(self, lease_id: int, trouble: str) -> None:
        super().kill(lease_id, trouble)
        with self._lock:
            self._released.notify_all()

    @property
    def num_leases(self) -> int:
        """That are not over."""
        with self._lock:
            return len(self._book)

    def close(self) -> None:
        """Takes nobody any more. What is complete can be read to its end as long as the process lives; what is not will
        never be, and whoever reads it is told.
        """
        with self._lock:
            self._is_closed = True
            self._book.kill_incomplete("the process that computed it has stopped")
            for changed in (self._granted, self._released, *self._news.values()):
                changed.notify_all()
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()

    def _tell_readers(self, lease_id: int) -> None:
        news = self._news.get(lease_id)
        if news is not None:
            news.notify_all()

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
                # of this connection, or no descriptor is free now: those that come later may be luckier
                log.warning("no borrower could be taken: %s", error)
                time.sleep(REAPS_EVERY_S)
                continue
            self.serve(connection)

    def serve(self, connection: Connection) -> None:
        """Serves one borrower, in a thread of its own."""
        threading.Thread(target=self._serve, args=(connection,), daemon=True, name="twostroke-loan").start()

    def _serve(self, connection: Connection) -> None:
        connection.settimeout(self._patience_s)
        with connection, contextlib.nullcontext() if self._nixl is None else self._nixl.lending():
            try:
                self._lend(connection)
            except (OSError, EngineError) as error:
                log.info("a borrower was lost: %s", error)
            if self._nixl is not None:
                _await_end(connection)

    def _lend(self, connection: Connection) -> None:
        fetch = receive(connection, FROM_BORROWER)
        if not isinstance(fetch, Fetch):
            raise TransferBroken(f"a connection begins with a question, not with {type(fetch).__name__}.")
        reason = self._refusal(fetch)
        if reason:
            _send(connection, FetchRefused(reason))
            return
        with self._opened(fetch) as lease:
            if lease is None:
                _send(connection, FetchRefused(f"lease {fetch.lease_id} is over, or was never granted here."))
                return
            reason = self._misfit(fetch, lease)
            if reason:
                _send(connection, FetchRefused(reason))
                return
            self._send_terms(connection, fetch)
            trouble = self._send_parts(connection, fetch, lease) or self._settle(connection, lease)
            _send(connection, FetchRefused(trouble) if trouble else Valid())

    def _refusal(self, fetch: Fetch) -> str:
        if fetch.protocol != PROTOCOL:
            return f"protocol {fetch.protocol} there, {PROTOCOL} here. Run the same version of twostroke in both pools."
        if fetch.epoch != self._epoch:
            return "the process that granted this lease is gone."
        return self._geometry.refusal(fetch.geometry, allows_drift=fetch.allows_drift)

    def _misfit(self, fetch: Fetch, lease: Lease) -> str:
        """Why this is no lease of what it asks for."""
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
        """The lease, with a reader more; one that the engine has not heard of yet is waited for."""
        deadline = self._clock() + self._patience_s
        with self._lock:
            while (lease := self._book.open(fetch.lease_id)) is None:
                never = self._is_closed or self._book.is_over(fetch.lease_id)
                if never or not self._granted.wait(deadline - self._clock()):
                    break
            if lease is not None:
                self._news.setdefault(fetch.lease_id, threading.Condition(self._mutex))
        try:
            yield lease
        finally:
            if lease is not None:
                with self._lock:
                    self._book.close(lease)
                    if not lease.num_readers:
                        del self._news[fetch.lease_id]
                    self._released.notify_all()

    def _send_terms(self, connection: Connection, fetch: Fetch) -> None:
        if not self._is_read_by(fetch):
            _send(connection, Terms(self._geometry, 0, orders=self._orders))
            return
        remote = None if self._nixl is None else self._nixl.facts
        terms = framed(Terms(self._geometry, self._memory.num_bytes, remote, self._orders))
        if self._shared is not None and isinstance(connection, socket.socket):
            socket.send_fds(connection, [terms[:1]], self._shared.descriptors)
            terms = terms[1:]
        connection.sendall(terms)

    def _is_read_by(self, fetch: Fetch) -> bool:
        """Whether the borrower reads the blocks itself, as it may: nothing but their numbers is sent."""
        return fetch.shares_memory and bool(self._shared or self._nixl or self._is_read_here)

    def _send_parts(self, connection: Connection, fetch: Fetch, lease: Lease) -> str:
        """Everything, as it becomes ready; returns why it is worth nothing, if so."""
        index, layer, said_s = 0, 0, self._clock()
        news = self._news[fetch.lease_id]
        is_read = self._is_read_by(fetch)
        while True:
            with self._lock:
                if not _has_news(lease, index, layer):
                    news.wait(WAITING_EVERY_S)
                trouble = lease.trouble
                part = lease.parts[index] if index < len(lease.parts) else None
                is_last = index == len(lease.parts) - 1
                ready = lease.num_layers_ready if is_last else self._memory.num_layers
                digest = lease.digest if part is None else b""
                self._book.progress(lease, self._clock())
            if trouble:
                return trouble
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
            raise TransferBroken(f"expected that it has copied all, not {type(copied).__name__}.")
        with self._lock:
            return self._book.settle(lease)


def _has_news(lease: Lease, index: int, layer: int) -> bool:
    """Whether there is more to say to a reader that has layers before `layer` of part `index`."""
    if lease.trouble or index < len(lease.parts) - 1:
        return True
    if index == len(lease.parts) - 1:
        return lease.num_layers_ready > layer
    return lease.is_complete


def _send(connection: Connection, frame: LenderSays) -> None:
    connection.sendall(framed(frame))


def _await_end(connection: Connection) -> None:
    """Until the borrower has hung up: it may be in the middle of a read, which needs this side to come to its end, also
    where the lease is worth nothing any more or the borrower has been silent for too long."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(None)
        rest = memoryview(bytearray(_REST_BYTES))
        while connection.recvmsg_into([rest])[0]:
            pass

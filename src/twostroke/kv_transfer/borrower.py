"""The side that fetches: a thread for each prefix, which fills blocks that nobody reads before all of it is there."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from twostroke.errors import EngineError
from twostroke.kv_cache.holds import KVImport
from twostroke.kv_transfer.address import Address, connect
from twostroke.kv_transfer.frames import (
    FROM_LENDER,
    PROTOCOL,
    All,
    Copied,
    Fetch,
    Ready,
    Refusal,
    Terms,
    TransferBroken,
    Valid,
    Waiting,
    framed,
    receive,
    receive_exactly,
    receive_pieces,
)
from twostroke.kv_transfer.geometry import KVGeometry
from twostroke.kv_transfer.memory import KVMemory, SharedMapping

PATIENCE_S = 10.0
"""How long the lender may say nothing at all; while it computes it says that it waits, once a second."""
_HEAD_BYTES = 4


class KVSource(msgspec.Struct, frozen=True, array_like=True):
    """Where a prefix can be fetched."""

    address: Address
    epoch: int
    lease_id: int


@dataclass(frozen=True, slots=True)
class Fetched:
    """What came of it."""

    problem: str
    """Why it is worth nothing; empty: all of it is there."""
    num_bytes: int = 0
    first_byte_s: float = 0.0
    """When the first of it was there; 0: nothing came."""
    drift: str = ""
    """How the lender's numerics differ."""


class KVBorrower:
    """Fetches prefixes into a pool.

    Args:
        memory: of the pool.
        geometry: of this side.
        clock: in seconds.
        allows_drift: take KV that was computed by other numerics.
    """

    def __init__(
        self, memory: KVMemory, geometry: KVGeometry, *, clock: Callable[[], float], allows_drift: bool = False
    ) -> None:
        self._memory = memory
        self._geometry = geometry
        self._clock = clock
        self._allows_drift = allows_drift
        self._mappings = _Mappings()

    def fetch(
        self, source: KVSource, into: KVImport, digest: bytes, is_done: Callable[[Fetched], object]
    ) -> Callable[[], None]:
        """Begins to fetch, in a thread of its own.

        Args:
            source: where from.
            into: the blocks; the thread writes to them until `is_done` is called, and not afterwards.
            digest: name of the prefix's last block, which the lender must have, too.
            is_done: called once, in that thread.

        Returns:
            A call that gives it up; `is_done` is called all the same.
        """
        task = _Fetching(self._memory, self._geometry, self._mappings, self._clock, self._allows_drift)

        def run() -> None:
            is_done(task.run(source, into, digest))

        threading.Thread(target=run, daemon=True, name="twostroke-fetch").start()
        return task.give_up

    def close(self) -> None:
        """Forgets what others have shared."""
        self._mappings.clear()


class _Mappings:
    """Memory of other processes that is mapped here, by their epochs: mapping gigabytes takes a while."""

    _MOST = 8
    """Processes whose memory stays mapped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[int, SharedMapping] = {}

    def get(self, epoch: int, descriptor: int, num_bytes: int) -> SharedMapping:
        """The mapping of a process; the descriptor is closed."""
        with self._lock:
            mapping = self._known.pop(epoch, None)
            if mapping is None:
                mapping = SharedMapping(descriptor, num_bytes)
            else:
                os.close(descriptor)
            self._known[epoch] = mapping
            while len(self._known) > self._MOST:  # whoever still reads one keeps it alive
                del self._known[next(iter(self._known))]
            return mapping

    def clear(self) -> None:
        """Forgets them."""
        with self._lock:
            self._known.clear()


class _Fetching:
    """One prefix on its way."""

    def __init__(
        self,
        memory: KVMemory,
        geometry: KVGeometry,
        mappings: _Mappings,
        clock: Callable[[], float],
        allows_drift: bool,
    ) -> None:
        self._memory = memory
        self._geometry = geometry
        self._mappings = mappings
        self._clock = clock
        self._allows_drift = allows_drift
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._is_given_up = False
        self._num_bytes = 0
        self._first_byte_s = 0.0

    def give_up(self) -> None:
        """From any thread."""
        with self._lock:
            self._is_given_up = True
            if self._connection is not None:
                with contextlib.suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)

    def run(self, source: KVSource, into: KVImport, digest: bytes) -> Fetched:
        """Until the end, whatever that is."""
        drift = ""
        try:
            with connect(source.address, PATIENCE_S) as connection:
                connection.settimeout(PATIENCE_S)
                with self._lock:
                    self._connection = connection
                    if self._is_given_up:
                        raise TransferBroken("it was given up.")
                drift = self._fetch(connection, source, into, digest)
            problem = ""
        except TimeoutError:
            problem = f"{source.address} has said nothing for {PATIENCE_S:g} s"
        except (OSError, EngineError) as error:
            problem = "it was given up" if self._is_given_up else f"{source.address}: {error}"
        finally:
            with self._lock:
                self._connection = None
        return Fetched(problem, self._num_bytes, self._first_byte_s, drift)

    def _fetch(self, connection: socket.socket, source: KVSource, into: KVImport, digest: bytes) -> str:
        """All of it; returns how the lender's numerics differ."""
        num_blocks = len(into.rows[0])
        question = Fetch(
            PROTOCOL,
            source.epoch,
            source.lease_id,
            into.first_missing,
            num_blocks,
            source.address.is_local,
            self._geometry,
            self._allows_drift,
        )
        connection.sendall(framed(question))
        terms, theirs = self._receive_terms(connection, source)
        known = 0
        while True:
            match receive(connection, FROM_LENDER):
                case Ready() as ready:
                    if not self._first_byte_s:
                        self._first_byte_s = self._clock()
                    self._take(connection, ready, into, theirs)
                    known += (ready.end - ready.first) * (ready.end_layer - ready.first_layer)
                case Waiting():
                    pass
                case All(theirs_digest):
                    break
                case Refusal(reason):
                    raise TransferBroken(reason)
                case other:
                    raise TransferBroken(f"unexpected: {type(other).__name__}")
        if known != num_blocks * self._memory.num_layers or theirs_digest != digest:
            raise TransferBroken(
                f"it has sent {known} of {num_blocks * self._memory.num_layers} pieces, of the prefix "
                f"{theirs_digest.hex()}; {digest.hex()} was asked for."
            )
        connection.sendall(framed(Copied()))
        match receive(connection, FROM_LENDER):
            case Valid():
                return self._geometry.drift(terms.geometry)
            case Refusal(reason):
                raise TransferBroken(reason)
            case other:
                raise TransferBroken(f"unexpected: {type(other).__name__}")

    def _receive_terms(self, connection: socket.socket, source: KVSource) -> tuple[Terms, KVMemory | None]:
        """The answer, and the lender's memory where it comes with it."""
        head, descriptors = b"", list[int]()
        if source.address.is_local:
            head, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
            if not head:
                raise TransferBroken("the other side has closed the connection.")
        head += receive_exactly(connection, _HEAD_BYTES - len(head))
        body = receive_exactly(connection, int.from_bytes(head, "little"))
        try:
            terms = FROM_LENDER.decode(body)
        except msgspec.MsgspecError as error:
            raise TransferBroken(f"a frame that is not understood ({error}): a peer of another version?") from error
        if isinstance(terms, Refusal):
            raise TransferBroken(terms.reason)
        if not isinstance(terms, Terms):
            raise TransferBroken(f"expected its terms, not {type(terms).__name__}.")
        refusal = self._geometry.refusal(terms.geometry, allows_drift=self._allows_drift)
        if refusal:
            raise TransferBroken(refusal)
        if not descriptors:
            return terms, None
        mapping = self._mappings.get(source.epoch, descriptors[0], terms.num_bytes_shared)
        return terms, mapping.memory(self._memory.layout)

    def _take(self, connection: socket.socket, ready: Ready, into: KVImport, theirs: KVMemory | None) -> None:
        """Some layers of some entries, to where they belong."""
        if not 0 <= ready.first < ready.end <= len(into.rows[0]):
            raise TransferBroken(f"entries {ready.first} to {ready.end} of a prefix of {len(into.rows[0])}.")
        layers = range(ready.first_layer, ready.end_layer)
        starts = [max(0, first - ready.first) for first in into.first_missing]
        places = self._memory.pieces([row[ready.first : ready.end] for row in into.rows], layers, starts)
        self._num_bytes += sum(map(len, places))
        if theirs is None:
            receive_pieces(connection, places)
            return
        _copy(theirs.pieces(ready.rows, layers, starts), places)


def _copy(pieces: Sequence[memoryview], places: Sequence[memoryview]) -> None:
    """Through numpy, which lets the engine's thread run meanwhile."""
    for piece, place in zip(pieces, places, strict=True):
        np.copyto(np.frombuffer(place, np.uint8), np.frombuffer(piece, np.uint8))

"""The side that fetches KV: one thread per prefix fills blocks that are not read before all of it has arrived."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from twostroke.config.load import MAX_RANKS
from twostroke.errors import EngineError
from twostroke.kernels.head_order import HeadOrder
from twostroke.kv_cache.holds import KVImport
from twostroke.kv_cache.layout import KVLayout
from twostroke.kv_transfer.address import connect
from twostroke.kv_transfer.block_import import (
    BlockImport,
    BlockReading,
    BlockTransfer,
    LentBlocks,
    SocketTransfer,
    make_block_import,
)
from twostroke.kv_transfer.connection import Connection
from twostroke.kv_transfer.frames import (
    FROM_LENDER,
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
)
from twostroke.kv_transfer.geometry import KVGeometry
from twostroke.kv_transfer.in_process import memory_here
from twostroke.kv_transfer.memory import KVMemory, SharedMapping
from twostroke.kv_transfer.nixl_reads import NixlAgent
from twostroke.kv_transfer.transport import Fetched, KVSource
from twostroke.log import get_logger
from twostroke.plain_words import reason_of

log = get_logger(__name__)

TIMEOUT_S = 10.0
"""Seconds a lender may be silent; while it computes it sends Waiting once a second."""


class KVBorrower:
    """The fetching side of a pool.

    Args:
        memory: of the pool.
        geometry: of this side.
        reading: how lenders' blocks of another size or format are read.
        clock: in seconds.
        allows_drift: whether to accept KV computed with other numerics.
        timeout_s: seconds a lender may be silent.
        nixl: reads from lenders that use NIXL; closed with the borrower.
    """

    def __init__(
        self,
        memory: KVMemory,
        geometry: KVGeometry,
        *,
        reading: BlockReading,
        clock: Callable[[], float],
        allows_drift: bool = False,
        timeout_s: float = TIMEOUT_S,
        nixl: NixlAgent | None = None,
    ) -> None:
        self._side = _BorrowerState(memory, geometry, reading, _MappedMemories(nixl), clock, allows_drift, timeout_s)

    def fetch(
        self, source: KVSource, into: KVImport, digest: bytes, is_done: Callable[[Fetched], object]
    ) -> Callable[[], None]:
        """Start a fetch; `is_done` is called in the thread that fetches."""
        task = _PrefixFetch(self._side)

        def run() -> None:
            is_done(task.run(source, into, digest))

        threading.Thread(target=run, daemon=True, name="twostroke-fetch").start()
        return task.cancel

    def close(self) -> None:
        """Unmap the memory that lenders have shared."""
        self._side.memories.close()


class _MappedMemories:
    """Lenders' memory, mapped and cached by epoch, because mapping gigabytes takes a while; and the NIXL agent for the
    rest.

    Args:
        nixl: reads from lenders that use NIXL.
    """

    _MAX_SIZE = 8
    """Most processes whose memory stays mapped."""

    def __init__(self, nixl: NixlAgent | None) -> None:
        self.nixl = nixl
        self._lock = threading.Lock()
        self._known: dict[int, SharedMapping] = {}

    def mapped(self, epoch: int, descriptors: Sequence[int], num_bytes: int) -> SharedMapping:
        """Return the mapping of a process; the descriptors are closed."""
        with self._lock:
            mapping = self._known.pop(epoch, None)
            if mapping is None:
                mapping = SharedMapping(descriptors, num_bytes)
            else:
                for descriptor in descriptors:
                    os.close(descriptor)
            self._known[epoch] = mapping
            while len(self._known) > self._MAX_SIZE:  # a reader keeps its mapping alive
                del self._known[next(iter(self._known))]
            return mapping

    def close(self) -> None:
        """Forget all mappings and close the NIXL agent."""
        with self._lock:
            self._known.clear()
        if self.nixl is not None:
            self.nixl.close()


@dataclass(frozen=True, slots=True)
class _BorrowerState:
    """State shared by all fetches of a borrower."""

    memory: KVMemory
    geometry: KVGeometry
    reading: BlockReading
    memories: _MappedMemories
    clock: Callable[[], float]
    allows_drift: bool
    timeout_s: float


class _PrefixFetch:
    """The fetch of one prefix."""

    def __init__(self, side: _BorrowerState) -> None:
        self._side = side
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._is_given_up = False
        self._num_bytes = 0
        self._first_byte_s = 0.0
        self._busy_s = 0.0

    def cancel(self) -> None:
        """Cancel the fetch; may be called from any thread."""
        with self._lock:
            self._is_given_up = True
            if self._connection is not None:
                with contextlib.suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)

    def run(self, source: KVSource, into: KVImport, digest: bytes) -> Fetched:
        """Run the fetch to its end and return the outcome, including any failure."""
        drift = ""
        try:
            with connect(source.address, self._side.timeout_s) as connection:
                connection.settimeout(self._side.timeout_s)
                with self._lock:
                    self._connection = connection
                    if self._is_given_up:
                        raise TransferBroken("it was given up.")
                drift = self._fetch(connection, source, into, digest)
            problem = ""
        except TimeoutError:
            problem = f"{source.address} has said nothing for {self._side.timeout_s:g} s"
        except (OSError, EngineError) as error:
            problem = "it was given up" if self._is_given_up else f"{source.address}: {error}"
        except Exception as error:  # otherwise the request would wait for ever
            log.exception("a prefix could not be fetched from %s", source.address)
            problem = f"{source.address}: its KV could not be stored: {reason_of(error)}"
        finally:
            with self._lock:
                self._connection = None
        return Fetched(problem, self._num_bytes, self._first_byte_s, drift, self._busy_s, self._side.clock())

    def _fetch(self, connection: Connection, source: KVSource, into: KVImport, digest: bytes) -> str:
        """Fetch all entries; return how the lender's numerics differ."""
        their_size = source.block_size or self._side.memory.layout.block_size
        question = self._fetch_request(source, into, their_size)
        num_blocks = question.num_blocks
        connection.sendall(encode_frame(question))
        terms, lent = self._receive_terms(connection, source, their_size)
        with self._bringing(connection, terms, lent) as transfer:
            block_import = make_block_import(
                self._side.memory, lent, into, question.first_entries, self._side.reading, transfer
            )
            num_entries, theirs_digest = self._receive_all(connection, block_import, num_blocks)
        if num_entries != num_blocks or theirs_digest != digest:
            raise TransferBroken(
                f"it has sent {num_entries} of {num_blocks} entries, of the prefix {theirs_digest.hex()}; "
                f"{digest.hex()} was asked for."
            )
        connection.sendall(encode_frame(Copied()))
        match receive(connection, FROM_LENDER):
            case Valid():
                return self._side.geometry.drift(terms.geometry)
            case FetchRefused(reason):
                raise TransferBroken(reason)
            case other:
                raise TransferBroken(f"unexpected: {type(other).__name__}")

    def _receive_all(self, connection: Connection, block_import: BlockImport, num_blocks: int) -> tuple[int, bytes]:
        """Store all entries that the lender sends; return their number and the hash of the last block."""
        due = _ExpectedEntries(num_blocks, self._side.memory.num_layers)
        while True:
            match receive(connection, FROM_LENDER):
                case EntriesReady() as ready:
                    if not self._first_byte_s:
                        self._first_byte_s = self._side.clock()
                    due.advance(ready)
                    begin_s = self._side.clock()
                    self._num_bytes += block_import.import_entries(ready)
                    self._busy_s += self._side.clock() - begin_s
                case Waiting():
                    pass
                case All(digest):
                    return due.entry, digest
                case FetchRefused(reason):
                    raise TransferBroken(reason)
                case other:
                    raise TransferBroken(f"unexpected: {type(other).__name__}")

    def _bringing(self, connection: Connection, terms: Terms, lent: LentBlocks) -> BlockTransfer:
        """Return the transfer to use where memory is not shared."""
        if self._side.memories.nixl is None or terms.remote is None:
            return SocketTransfer(connection)
        if len(terms.remote.addresses) != lent.num_ranks:
            raise TransferBroken(f"memory of {len(terms.remote.addresses)} ranks; it has {lent.num_ranks}.")
        return self._side.memories.nixl.reading(terms.remote, lent.layout, terms.num_bytes_shared)

    def _fetch_request(self, source: KVSource, into: KVImport, their_size: int) -> Fetch:
        if into.num_tokens % their_size:
            raise TransferBroken(f"{into.num_tokens} tokens are no whole pages of {their_size}.")
        return Fetch(
            PROTOCOL,
            source.epoch,
            source.lease_id,
            tuple(first * self._side.memory.layout.block_size // their_size for first in into.first_missing),
            into.num_tokens // their_size,
            source.address.shares_memory and (self._side.memories.nixl is not None or not source.address.by_nixl),
            self._side.geometry,
            self._side.allows_drift,
        )

    def _receive_terms(self, connection: Connection, source: KVSource, their_size: int) -> tuple[Terms, LentBlocks]:
        """Receive the lender's terms; return them with its blocks, including their memory if it is shared."""
        head, descriptors = b"", list[int]()
        if isinstance(connection, socket.socket) and source.address.is_local:
            head, descriptors, _, _ = socket.recv_fds(connection, 1, MAX_RANKS)
            if not head:
                raise TransferBroken("the other side has closed the connection.")
        with contextlib.ExitStack() as unused:
            for descriptor in descriptors:
                unused.callback(os.close, descriptor)
            terms = self._checked_terms(receive(connection, FROM_LENDER, head), their_size)
            layout, orders = self._lent_layout(terms)
            num_ranks = terms.geometry.num_ranks
            if not descriptors:
                name = source.address.name
                return terms, LentBlocks(layout, num_ranks, memory_here(name) if name else None, orders)
            if len(descriptors) != num_ranks:
                raise TransferBroken(f"memory of {len(descriptors)} ranks; it has {num_ranks}.")
            unused.pop_all()  # the mapping owns them now
            try:
                mapping = self._side.memories.mapped(source.epoch, descriptors, terms.num_bytes_shared)
                return terms, LentBlocks(layout, num_ranks, mapping.memory(layout), orders)
            except ValueError as error:
                raise TransferBroken(f"cannot use its memory of {terms.num_bytes_shared:,} bytes: {error}") from None

    def _lent_layout(self, terms: Terms) -> tuple[KVLayout, tuple[HeadOrder, ...]]:
        """Return the lender's layout and, if format or order differs, the places of tokens per KV group."""
        layout = self._side.memory.layout.for_ranks(terms.geometry.num_ranks, self._side.memory.num_ranks)
        layout = _with_blocks_of(terms.geometry, layout)
        if not self._side.geometry.has_other_blocks(terms.geometry):
            return layout, ()
        layout = replace(layout, kv_format=terms.geometry.kv_format)
        if not terms.orders or self._side.reading.recode is None:
            raise TransferBroken("its blocks have another format, which this process cannot convert.")
        if len(terms.orders) != len(layout.groups):
            raise TransferBroken(f"orders of {len(terms.orders)} KV groups; {len(layout.groups)} groups are here.")
        for order, group in zip(terms.orders, layout.groups, strict=True):
            if not order.fits(layout.kv_format, group.spec.head_dim, layout.block_size):
                raise TransferBroken(f"blocks of {layout.kv_format} do not lie as it says: {order}.")
        return layout, terms.orders

    def _checked_terms(self, terms: LenderFrame, block_size: int) -> Terms:
        """Return the lender's terms after checking that this side can use them."""
        if isinstance(terms, FetchRefused):
            raise TransferBroken(terms.reason)
        if not isinstance(terms, Terms):
            raise TransferBroken(f"expected Terms, not {type(terms).__name__}.")
        refusal = self._side.geometry.refusal(terms.geometry, allows_drift=self._side.allows_drift)
        if refusal:
            raise TransferBroken(refusal)
        if terms.geometry.block_size != block_size:
            said = f"its blocks have {terms.geometry.block_size} tokens"
            raise TransferBroken(f"{said}; blocks of {block_size} were asked for.")
        num_ranks, of_model = (
            terms.geometry.num_ranks,
            self._side.memory.layout.for_ranks(1, self._side.memory.num_ranks),
        )
        if not num_ranks or not all(group.spec.can_split_heads(num_ranks) for group in of_model.groups):
            heads = " or ".join(dict.fromkeys(str(group.spec.num_kv_heads) for group in of_model.groups))
            raise TransferBroken(f"{heads} KV heads cannot be dealt among its {num_ranks} ranks.")
        return terms


def _with_blocks_of(geometry: KVGeometry, layout: KVLayout) -> KVLayout:
    """Return a layout with the pages and blocks that a lender says it has."""
    pages = geometry.pages_per_block
    if len(pages) != len(layout.groups) or not all(pages):
        raise TransferBroken(f"pages in a block of {len(pages)} KV groups; {len(layout.groups)} groups are here.")
    groups = (replace(group, pages_per_block=n) for group, n in zip(layout.groups, pages, strict=True))
    return replace(layout, block_size=geometry.block_size, groups=tuple(groups))


class _ExpectedEntries:
    """The expected order of entries: part by part, and all layers in order in each part.

    Checking it ensures that nothing is missing at the end, and nothing is counted twice.
    """

    def __init__(self, num_entries: int, num_layers: int) -> None:
        self._num_entries = num_entries
        self._num_layers = num_layers
        self._part_end = 0
        self._layer = 0
        self.entry = 0
        """First entry that has not arrived in all layers."""

    def advance(self, ready: EntriesReady) -> None:
        """Check that these entries are next, and move on behind them.

        Raises:
            TransferBroken: other entries are due.
        """
        is_next = ready.first == self.entry and ready.first_layer == self._layer
        is_same_part = not self._layer or ready.end == self._part_end
        is_some = (
            ready.first < ready.end <= self._num_entries and ready.first_layer < ready.end_layer <= self._num_layers
        )
        if not (is_next and is_same_part and is_some):
            raise TransferBroken(
                f"entries {ready.first} to {ready.end} in layers {ready.first_layer} to {ready.end_layer}, but of "
                f"{self._num_entries} in {self._num_layers} entry {self.entry} is due, in layer {self._layer}."
            )
        self._layer, self._part_end = ready.end_layer, ready.end
        if self._layer == self._num_layers:
            self.entry, self._layer = ready.end, 0

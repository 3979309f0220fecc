"""Reads of other processes' KV memory by NIXL: the only module that imports NIXL, and only where it is configured.

NIXL only moves bytes. Leases, readiness and validity are exchanged over the connection of frames.py, as with shared
memory. A lender registers its memory and publishes how its agent is reached. A borrower posts one READ for the
entries of an `EntriesReady`; the lender's threads take no part in it.

A posted READ cannot be cancelled. A borrower that gives up waits for its end, so blocks are never freed while bytes
are still on their way to them. If the lender dies, the READ ends with an error.

NIXL's own progress thread polls without a pause, on a core that is needed for computing. So it is switched off: the
reading thread polls its own READ, and a lender polls its agent while it may be read (`lending`).
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import logging
import secrets
import threading
import time
from collections.abc import Generator, Iterable, Sequence
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twostroke.errors import SetupError
from twostroke.kv_cache.layout import KVLayout
from twostroke.kv_transfer.frames import EntriesReady, RemoteMemory, TransferBroken
from twostroke.kv_transfer.memory import KVMemory, layers_of_group
from twostroke.plain_words import reason_of

REMEDY = "Install it (pip install 'twostroke[nixl]'), or hand KV over by other means (--kv-transport auto)"
POLLS_EVERY_S = 50e-6
"""Seconds between polls of a READ; a layer of a prompt takes tenths of milliseconds to milliseconds."""
POLL_INTERVAL_S = 200e-6
"""Seconds between a lender's polls: they make connections and, where the system cannot read another process's memory,
send bytes."""
_MAX_PEERS = 8
"""Lenders to which connections stay open."""


def check_nixl() -> None:
    """Check that NIXL is installed, without loading it.

    Raises:
        SetupError: it is not installed.
    """
    if importlib.util.find_spec("nixl_cu12") is None:
        raise SetupError(f"--kv-transport nixl needs NIXL, which is not installed. {REMEDY}.")


def _load_nixl() -> Any:
    check_nixl()
    try:
        import nixl_cu12._api as nixl  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise SetupError(f"--kv-transport nixl needs NIXL, which cannot be loaded here: {error}. {REMEDY}.") from None
    logging.getLogger("nixl").setLevel(logging.WARNING)  # it would print its start to the standard output
    return nixl


class NixlAgent:
    """NIXL agent of this process, with the pool registered; `close` it.

    Args:
        memory: of the pool.

    Raises:
        SetupError: NIXL is not installed, or cannot register this memory.
    """

    def __init__(self, memory: KVMemory) -> None:
        nixl = _load_nixl()
        self._memory = memory  # keeps the registered memory alive
        self._lock = threading.Lock()
        self._peers: dict[bytes, _Peer] = {}
        self._num_loans = 0
        self._is_polled = False
        try:
            # many threads fetch at once: the agent's lock serializes them
            sync_mode = nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
            config = nixl.nixl_agent_config(enable_prog_thread=False, sync_mode=sync_mode)
            self._agent = nixl.nixl_agent(f"twostroke-{secrets.token_hex(8)}", config)
            self._registered: Any = self.register(memory)
            addresses = tuple(memory.address(rank) for rank in range(memory.num_ranks))
            self.facts = RemoteMemory(self._agent.get_agent_metadata(), addresses)
            """Agent metadata and addresses that borrowers need to read the pool."""
        except Exception as error:  # NIXL's errors have no base class but Exception
            raise SetupError(
                f"NIXL {importlib.metadata.version('nixl_cu12')}: {reason_of(error)}. {REMEDY}."
            ) from error

    @contextlib.contextmanager
    def lending(self) -> Generator[None]:
        """Poll the agent while a borrower may read this memory."""
        with self._lock:
            self._num_loans += 1
            if not self._is_polled:
                self._is_polled = True
                threading.Thread(target=self._poll_agent, daemon=True, name="twostroke-nixl").start()
        try:
            yield
        finally:
            with self._lock:
                self._num_loans -= 1

    def _poll_agent(self) -> None:
        while True:
            with self._lock:
                if not self._num_loans:
                    self._is_polled = False
                    return
            self._agent.get_new_notifs()  # there are none, but the call makes NIXL progress
            time.sleep(POLL_INTERVAL_S)

    def reading(self, remote: RemoteMemory, layout: KVLayout, num_bytes: int) -> NixlTransfer:
        """Return a reader of one prefix.

        Args:
            remote: the lender's memory.
            layout: of its blocks, as each of its ranks has it.
            num_bytes: bytes of memory of each rank.

        Raises:
            TransferBroken: its agent cannot be reached.
        """
        with self._lock:
            peer = self._peers.pop(remote.agent, None)
            if peer is None:
                peer = _Peer(self._call(self._agent.add_remote_agent, remote.agent))
            self._peers[remote.agent] = peer
            peer.num_readers += 1
            unused = [agent for agent, other in self._peers.items() if not other.num_readers]
            for agent in unused[: max(0, len(self._peers) - _MAX_PEERS)]:
                self._call(self._agent.remove_remote_agent, self._peers.pop(agent).name)
        return NixlTransfer(self, peer, remote, layout, num_bytes)

    def done(self, peer: _Peer) -> None:
        """Release a peer after a reading."""
        with self._lock:
            peer.num_readers -= 1

    def register(self, memory: KVMemory) -> Any:
        """Register memory with NIXL; return the handle for `forget`."""
        regions = [(memory.address(rank), memory.num_bytes, 0, "") for rank in range(memory.num_ranks)]
        return self._agent.register_memory(regions, "DRAM")

    def forget(self, registered: Any) -> None:
        """Deregister memory from NIXL."""
        self._agent.deregister_memory(registered)

    def read(self, peer: _Peer, places: NDArray[np.uint64], spans: NDArray[np.uint64]) -> None:
        """Fill each place with one span of the peer's memory; return when the transfer has ended.

        Raises:
            TransferBroken: the memory could not be read.
        """
        agent = self._agent
        here, there = (agent.get_xfer_descs(rows, "DRAM") for rows in (places, spans))
        handle = self._call(agent.initialize_xfer, "READ", here, there, peer.name)
        try:
            state = self._call(agent.transfer, handle)
            while state == "PROC":
                time.sleep(POLLS_EVERY_S)
                state = self._call(agent.check_xfer_state, handle)
        finally:
            self._call(agent.release_xfer_handle, handle)
        if state != "DONE":
            raise TransferBroken(f"NIXL could not read its memory: {state}.")

    def close(self) -> None:
        """Deregister the pool; no reads may be in progress."""
        self.forget(self._registered)

    @staticmethod
    def _call(call: Any, *given: Any) -> Any:
        try:
            return call(*given)
        except Exception as error:  # see above
            raise TransferBroken(f"NIXL: {reason_of(error)}.") from None


class _Peer:
    """A lender's agent, with the number of its readers."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_readers = 0


class NixlTransfer:
    """NIXL reads of one prefix from one lender."""

    def __init__(self, agent: NixlAgent, peer: _Peer, remote: RemoteMemory, layout: KVLayout, num_bytes: int) -> None:
        self._agent, self._peer, self._remote, self._layout = agent, peer, remote, layout
        self._num_bytes = num_bytes
        self._staged: Any = None

    def staging(self, memory: KVMemory) -> KVMemory:
        self._staged = self._agent.register(memory)
        return memory

    def receive_pages(
        self, memory: KVMemory, rows: Sequence[Sequence[int]], ready: EntriesReady, entries: Sequence[range]
    ) -> int:
        num_entries = ready.end - ready.first
        if [len(row) for row in ready.rows] != [num_entries] * len(rows):
            raise TransferBroken(f"{num_entries} entries, but not as many of its pages in each KV group.")
        theirs = [row[wanted.start : wanted.stop] for row, wanted in zip(ready.rows, entries, strict=True)]
        for group, row in zip(self._layout.groups, theirs, strict=True):
            id_bytes, page_bytes = self._layout.page_ids(group).bytes_per_id, self._layout.bytes_per_page(group)
            if any(not 0 <= page_id * id_bytes <= self._num_bytes - page_bytes for page_id in row):
                raise TransferBroken(f"pages that it does not have: its memory ends at byte {self._num_bytes:,}.")
        layers = range(ready.first_layer, ready.end_layer)
        here = (memory.address(rank) for rank in range(memory.num_ranks))
        places = _spans(memory.layout, here, rows, layers)
        if len(places):
            self._agent.read(self._peer, places, _spans(self._layout, self._remote.addresses, theirs, layers))
        return int(places[:, 1].sum())

    def __enter__(self) -> NixlTransfer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        """Deregister the staging memory and release the peer; nothing is being read any more."""
        if self._staged is not None:
            self._agent.forget(self._staged)
        self._agent.done(self._peer)


def _spans(
    layout: KVLayout, addresses: Iterable[int], rows: Sequence[Sequence[int]], layers: range
) -> NDArray[np.uint64]:
    """Return [n, 3]: begin, length and device (0) of some layers of pages; within a page, rank after rank."""
    begins = np.array(list(addresses), np.uint64)
    found = [np.zeros((0, 3), np.uint64)]
    for group, row in zip(layout.groups, rows, strict=True):
        first, end = layers_of_group(group, layers)
        if first < end and len(row):
            id_bytes, layer_bytes = layout.page_ids(group).bytes_per_id, layout.bytes_per_layer(group)
            offsets = np.array(row, np.uint64) * np.uint64(id_bytes) + np.uint64(first * layer_bytes)
            spans = np.zeros((len(row) * len(begins), 3), np.uint64)
            spans[:, 0] = (offsets[:, None] + begins).ravel()
            spans[:, 1] = (end - first) * layer_bytes
            found.append(spans)
    return np.concatenate(found)

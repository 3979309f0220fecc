"""Connections inside one process: lenders are found by name, and bytes stay in memory until they are received.

The frames are those of sockets, so leases, their threads and their guarantees are the same. The KV itself does not
pass through these connections: the borrower reads the lender's memory directly (`memory_here`).
"""

from __future__ import annotations

import errno
import queue
import socket
import threading
from collections.abc import Iterable
from types import TracebackType

from twostroke.kv_transfer.connection import Connection, Listener
from twostroke.kv_transfer.memory import KVMemory


class _Pipe:
    """Bytes in one direction."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._bytes = bytearray()
        self._is_closed = False

    def put(self, data: bytes | memoryview) -> None:
        with self._changed:
            if self._is_closed:
                raise BrokenPipeError(errno.EPIPE, "the other side has closed the connection")
            self._bytes += data
            self._changed.notify_all()

    def take_into(self, place: memoryview, timeout_s: float | None) -> int:
        with self._changed:
            if not self._changed.wait_for(lambda: self._bytes or self._is_closed, timeout_s):
                raise TimeoutError("timed out")
            num_bytes = min(len(place), len(self._bytes))
            place[:num_bytes] = self._bytes[:num_bytes]
            del self._bytes[:num_bytes]
            return num_bytes

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


class _End:
    """One end of a connection."""

    def __init__(self, outgoing: _Pipe, incoming: _Pipe) -> None:
        self._outgoing, self._incoming = outgoing, incoming
        self._timeout_s: float | None = None

    def settimeout(self, value: float | None, /) -> None:
        self._timeout_s = value

    def sendall(self, data: bytes, /) -> None:
        self._outgoing.put(data)

    def sendmsg(self, buffers: Iterable[memoryview], /) -> int:
        num_bytes = 0
        for buffer in buffers:
            self._outgoing.put(buffer)
            num_bytes += len(buffer)
        return num_bytes

    def recvmsg_into(self, buffers: Iterable[memoryview], /) -> tuple[int, list[object], int, None]:
        return self._incoming.take_into(next(iter(buffers)), self._timeout_s), [], 0, None

    def shutdown(self, how: int, /) -> None:
        assert how == socket.SHUT_RDWR, how
        self.close()

    def close(self) -> None:
        self._outgoing.close()
        self._incoming.close()

    def __enter__(self) -> _End:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self.close()


class _Listener:
    """A listener of this process, and the memory that it lends."""

    def __init__(self, name: str, memory: KVMemory | None) -> None:
        self._name = name
        self.memory = memory
        self._coming: queue.SimpleQueue[Connection | None] = queue.SimpleQueue()

    def connect(self) -> Connection:
        there, back = _Pipe(), _Pipe()
        self._coming.put(_End(back, there))
        return _End(there, back)

    def accept(self) -> tuple[Connection, None]:
        connection = self._coming.get()
        if connection is None:
            self._coming.put(None)  # for other callers that wait
            raise OSError(errno.EBADF, "the listener is closed")
        return connection, None

    def shutdown(self, how: int, /) -> None:
        del how
        self._coming.put(None)

    def close(self) -> None:
        with _LOCK:
            if _LISTENERS.get(self._name) is self:
                del _LISTENERS[self._name]
        self._coming.put(None)


_LOCK = threading.Lock()
_LISTENERS: dict[str, _Listener] = {}


def listen_here(name: str, memory: KVMemory | None) -> Listener:
    """Return a listener of this process. Its memory may be read while it listens; a reader keeps the memory alive.

    Raises:
        OSError: the name is taken.
    """
    with _LOCK:
        if name in _LISTENERS:
            raise OSError(errno.EADDRINUSE, "a lender in this process already has this name")
        listener = _LISTENERS[name] = _Listener(name, memory)
        return listener


def connect_here(name: str) -> Connection:
    """Connect to a listener of this process.

    Raises:
        OSError: no listener has this name.
    """
    return _find(name).connect()


def memory_here(name: str) -> KVMemory | None:
    """Return the memory of a listener of this process; None: it lends none.

    Raises:
        OSError: no listener has this name any more.
    """
    return _find(name).memory


def _find(name: str) -> _Listener:
    with _LOCK:
        listener = _LISTENERS.get(name)
    if listener is None:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "no lender in this process has this name")
    return listener

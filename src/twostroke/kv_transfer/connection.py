"""Interface of a connection between borrower and lender: a socket, or a queue inside the process."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any, Protocol


class Connection(Protocol):
    """One end of a connection: the subset of socket.socket that is used, with the same meaning."""

    def settimeout(self, value: float | None, /) -> None:
        """Set how many seconds a call may wait before it raises TimeoutError."""
        ...

    def sendall(self, data: bytes, /) -> None:
        """Send all of the data."""
        ...

    def sendmsg(self, buffers: Iterable[memoryview], /) -> int:
        """Send some of the buffers' bytes, in order; return how many."""
        ...

    def recvmsg_into(self, buffers: Iterable[memoryview], /) -> tuple[int, Any, int, Any]:
        """Receive some bytes; return their number first: 0 if the other end is closed."""
        ...

    def shutdown(self, how: int, /) -> None:
        """End the connection for both ends, and wake up calls that wait."""
        ...

    def close(self) -> None:
        """Close this end."""
        ...

    def __enter__(self) -> Any:
        """Return this end; leaving the block closes it."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        """Close this end."""
        ...


class Listener(Protocol):
    """A source of incoming connections, like a listening socket."""

    def accept(self) -> tuple[Connection, Any]:
        """Return the next connection, first in the tuple.

        Raises:
            OSError: the listener is closed, or cannot accept just now.
        """
        ...

    def shutdown(self, how: int, /) -> None:
        """Stop accepting, and wake up calls that wait."""
        ...

    def close(self) -> None:
        """Close the listener."""
        ...

"""What a borrower and a lender need of a connection, so that it may be a socket or stay inside the process."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any, Protocol


class Connection(Protocol):
    """One end of it; the part of socket.socket that is used, and with its meaning."""

    def settimeout(self, value: float | None, /) -> None:
        """How long a call may wait; then it raises TimeoutError."""
        ...

    def sendall(self, data: bytes, /) -> None:
        """Sends all of it."""
        ...

    def sendmsg(self, buffers: Iterable[memoryview], /) -> int:
        """Sends some of it, in order; returns how many bytes."""
        ...

    def recvmsg_into(self, buffers: Iterable[memoryview], /) -> tuple[int, Any, int, Any]:
        """Receives some bytes; the first of what is returned is how many: none when the other end is closed."""
        ...

    def shutdown(self, how: int, /) -> None:
        """Both ends are told that there is no more, also those who wait."""
        ...

    def close(self) -> None:
        """Of this end, for good."""
        ...

    def __enter__(self) -> Any:
        """Closes it behind a block."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        """See `__enter__`."""
        ...


class Listener(Protocol):
    """Where connections come from; of socket.socket, too."""

    def accept(self) -> tuple[Connection, Any]:
        """The next one; the first of what is returned.

        Raises:
            OSError: there will be none any more, or none just now.
        """
        ...

    def shutdown(self, how: int, /) -> None:
        """Whoever waits for a connection is told that there are no more."""
        ...

    def close(self) -> None:
        """Nobody finds it any more."""
        ...

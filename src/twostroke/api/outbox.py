"""Everything that one turn of the event loop writes leaves together, at the turn's end.

    turn      step's outputs ─► 64 streams write an event each ─► flush: 64 sends in a row
    without   an event, a send, an event, a send, ...

A send to a reader that sleeps wakes it, which costs the sender several times the send; one that follows finds the
reader awake. So the sends are made in a row. What a stream writes in one turn (a head and its first event) is also one
packet instead of several. Nothing waits longer than for the turn that it was written in.
"""

from __future__ import annotations

import asyncio
from typing import Any


class Outbox:
    """The transports of one event loop that have something to send."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._filled: list[OutboxTransport] = []

    def add(self, transport: OutboxTransport) -> None:
        """It has something; the first in a turn has the flush come after everything that can run already."""
        if not self._filled:
            self._loop.call_soon(self._flush)
        self._filled.append(transport)

    def _flush(self) -> None:
        filled, self._filled = self._filled, []
        for transport in filled:
            transport.flush()


class OutboxTransport(asyncio.Transport):
    """A transport whose writes wait for the end of the turn; closing it sends them first.

    Args:
        transport: the one that sends.
        outbox: of its loop.
    """

    __slots__ = ("_outbox", "_pending", "_transport")

    def __init__(self, transport: asyncio.Transport, outbox: Outbox) -> None:
        super().__init__()
        self._transport = transport
        self._outbox = outbox
        self._pending: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Puts bytes behind what waits."""
        if not self._pending:
            self._outbox.add(self)
        self._pending.append(bytes(data))

    def flush(self) -> None:
        """Sends what waits."""
        if self._pending:
            pending, self._pending = self._pending, []
            self._transport.write(pending[0] if len(pending) == 1 else b"".join(pending))

    def close(self) -> None:
        """Sends what waits, and closes."""
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        """Closes at once."""
        self._pending = []
        self._transport.abort()

    def is_closing(self) -> bool:
        """Whether it is closed or about to be."""
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """What is known of the connection."""
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        """Nothing is read for now."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Reads again."""
        self._transport.resume_reading()

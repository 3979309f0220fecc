"""Turns of the event loop, given to requests one at a time, so that a burst of them delays no running stream."""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """A gate that lets one request through in each turn of the event loop.

    Parsing and tokenizing a request takes half a millisecond. Without turns the loop prepares all requests that arrived
    together before it reads the engine's next report: 64 of them hold up the tokens of that report by 30 ms.
    """

    def __init__(self) -> None:
        self._is_taken = False
        """Whether a request has passed in the present turn."""
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Return in the present turn if no request has passed in it, else in a later one. First come, first served."""
        loop = asyncio.get_running_loop()
        if not self._is_taken:
            self._is_taken = True
            loop.call_soon(self._next)
            return
        mine = loop.create_future()
        self._waiting.append(mine)
        await mine

    def _next(self) -> None:
        while self._waiting:
            first = self._waiting.popleft()
            if not first.done():  # it is cancelled when its client has left
                first.set_result(None)
                asyncio.get_running_loop().call_soon(self._next)
                return
        self._is_taken = False

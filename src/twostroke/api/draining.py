"""The end of a server: what runs may end, what comes is refused, and nobody waits without a word.

first SIGTERM or SIGINT     /ready and new requests: 503 at once. What runs goes on.
all have ended              exit code 0
the time is up, or a        what still runs ends with an error, as an event in a stream; exit code 0
second signal comes
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Awaitable, Callable
from types import FrameType

import uvicorn

from twostroke.cluster.pooled_engine import PooledEngine
from twostroke.cluster.remote_engine import RemoteEngine
from twostroke.log import get_logger

log = get_logger(__name__)

LOOK_EVERY_S = 0.05


class DrainingServer(uvicorn.Server):
    """Uvicorn's server, which listens on while it drains.

    Args:
        config: of uvicorn.
        engine: what runs there is waited for.
        patience_s: for how long.
        address: is printed once the server listens and minds signals.
        on_end: called when all requests have ended: what else is being sent is to end, too.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        engine: RemoteEngine | PooledEngine,
        patience_s: float,
        address: str,
        *,
        on_end: Callable[[], Awaitable[object]],
    ) -> None:
        super().__init__(config)
        self._engine = engine
        self._patience_s = patience_s
        self._address = address
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._draining: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens."""
        await super().startup(sockets)
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # a signal came before uvicorn minded them: the start is given up
            return
        sys.stderr.write(f"serving  {self._address}\n")
        sys.stderr.flush()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came; uvicorn's own would close the doors at once, and exit with the signal's code."""
        del sig, frame
        self._loop.call_soon_threadsafe(self._begin)

    def _begin(self) -> None:
        if self._draining is None:
            self._engine.drain()
            self._draining = self._loop.create_task(self._drain())
        else:
            self._hurry.set()

    async def _drain(self) -> None:
        """Waits for the requests that run, and lets the server go."""
        try:
            async with asyncio.timeout(self._patience_s):
                while self._engine.health().num_requests and not self._hurry.is_set():
                    await asyncio.sleep(LOOK_EVERY_S)
        except TimeoutError:
            log.warning("requests still ran %g s after the signal; they were ended", self._patience_s)
        self._engine.give_up("the server was shut down")
        await self._on_end()
        self.should_exit = True

"""The outputs of one request on their way from the engine's reports to the one who reads them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from twostroke.errors import Overloaded
from twostroke.outputs import RequestOutput


class QueuedStream:
    """See OutputStream. Reader and writer share a loop."""

    def __init__(self, abandon: Callable[[QueuedStream], None]) -> None:
        self._items: deque[RequestOutput | Exception] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._abandon = abandon
        self._is_ended = False
        self._patience: asyncio.TimerHandle | None = None

    def put(self, item: RequestOutput | Exception) -> None:
        """Hands an item over."""
        self._is_ended = isinstance(item, Exception) or item.finished
        self._stop_waiting()
        self._items.append(item)
        self._wake()

    async def take(self) -> list[RequestOutput]:
        """See OutputStream."""
        if not self._items and not self._is_ended:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        outputs: list[RequestOutput] = []
        while self._items:
            item = self._items[0]
            if isinstance(item, Exception):
                if outputs:
                    break
                self._items.popleft()
                raise item
            outputs.append(item)
            self._items.popleft()
        return outputs

    def close(self) -> None:
        """See OutputStream."""
        if not self._is_ended:
            self._is_ended = True
            self._items.clear()
            self._stop_waiting()
            self._abandon(self)
            self._wake()

    def start_by(self, within_s: float, is_waiting: Callable[[], bool]) -> None:
        """Gives the request up unless something of it has begun by then."""

        def lose_patience() -> None:
            if not self._is_ended and is_waiting():
                self._abandon(self)
                self.put(Overloaded(f"the request waited {within_s:.1f} s and was not begun; it was given up.", 1))

        self._patience = asyncio.get_running_loop().call_later(max(0.0, within_s), lose_patience)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

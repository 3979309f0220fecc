"""The outputs of one request on their way from the engine's reports to the one who reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from twostroke.errors import Overloaded
from twostroke.outputs import RequestOutput


class QueuedStream:
    """See OutputStream. Reader and writer share a loop."""

    def __init__(self, abandon: Callable[[QueuedStream], None]) -> None:
        self._outputs: list[RequestOutput] = []
        self._error: Exception | None = None
        """Comes after the outputs that are there, once."""
        self._reader: asyncio.Future[None] | None = None
        self._abandon = abandon
        self._is_ended = False
        self.has_begun = False
        """Whether an output was ever handed over."""
        self._patience: asyncio.TimerHandle | None = None

    def put(self, output: RequestOutput) -> None:
        """Hands an output over."""
        self._is_ended = output.finished
        self.has_begun = True
        self._outputs.append(output)
        if self._patience is not None:
            self._stop_waiting()
        self._wake()

    def fail(self, error: Exception) -> None:
        """Ends it with an error."""
        self._is_ended = True
        self._error = error
        self._stop_waiting()
        self._wake()

    async def take(self) -> list[RequestOutput]:
        """See OutputStream."""
        if not self._outputs and not self._is_ended:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        outputs, self._outputs = self._outputs, []
        if not outputs and self._error is not None:
            error, self._error = self._error, None
            raise error
        return outputs

    def close(self) -> None:
        """See OutputStream."""
        if not self._is_ended:
            self._is_ended = True
            self._outputs = []
            self._stop_waiting()
            self._abandon(self)
            self._wake()

    def start_by(self, within_s: float, is_waiting: Callable[[], bool]) -> None:
        """Gives the request up unless something of it has begun by then."""

        def lose_patience() -> None:
            if not self._is_ended and is_waiting():
                self._abandon(self)
                self.fail(Overloaded(f"the request waited {within_s:.1f} s and was not begun; it was given up.", 1))

        self._patience = asyncio.get_running_loop().call_later(max(0.0, within_s), lose_patience)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

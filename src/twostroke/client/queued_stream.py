"""The outputs of one request on their way from the engine's reports to the one who reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from twostroke.client.engine_client import Taker
from twostroke.errors import Overloaded
from twostroke.outputs import RequestOutput


class QueuedStream:
    """See OutputStream. Reader and writer share a loop."""

    def __init__(self, abandon: Callable[[QueuedStream], None]) -> None:
        self._outputs: list[RequestOutput] = []
        self._error: Exception | None = None
        """Comes after the outputs that are there, once."""
        self._wake: Callable[[], object] = _nobody
        self._taker: Taker | None = None
        self._abandon = abandon
        self._is_ended = False
        self.has_begun = False
        """Whether an output was ever handed over."""
        self._patience: asyncio.TimerHandle | None = None

    def put(self, output: RequestOutput) -> None:
        """Hands an output over."""
        self.has_begun = True
        if self._patience is not None:
            self._stop_waiting()
        if output.finished:
            self._is_ended = True
        if self._taker is not None and self._taker(output):
            return
        self._outputs.append(output)
        self._wake()

    def fail(self, error: Exception) -> None:
        """Ends it with an error."""
        self._is_ended = True
        self._error = error
        self._stop_waiting()
        self._wake()

    def take(self) -> list[RequestOutput]:
        """See OutputStream."""
        outputs, self._outputs = self._outputs, []
        if self._error is not None:
            if outputs:  # the reader is told once more
                asyncio.get_running_loop().call_soon(self._wake)
                return outputs
            error, self._error = self._error, None
            raise error
        return outputs

    def listen(self, wake: Callable[[], object], taker: Taker | None = None) -> None:
        """See OutputStream."""
        self._wake, self._taker = wake, taker

    def close(self) -> None:
        """See OutputStream."""
        if not self._is_ended:
            self._is_ended = True
            self._outputs = []
            self._stop_waiting()
            self._abandon(self)

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


def _nobody() -> None:
    """Listens while nobody else does."""

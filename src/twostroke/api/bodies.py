"""Bodies of requests on their way in: how long and how large one may be, and how much all of them may hold together.

A client that never ends its body costs no more than its bytes, and all such clients together no more than a fixed
number of them: when there is no room left, the body that came first of those with more than their share is given up.
Whoever sends at once is never the one; who keeps many bodies open is, again and again.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.datastructures import Headers

from twostroke.api.http_errors import HTTPError
from twostroke.api.sse import Receive

CLOSE = {"connection": "close"}


@dataclass(eq=False, slots=True)
class _Body:
    """One that has not arrived."""

    patience: asyncio.Timeout
    num_bytes: int = 0
    is_given_up: bool = False

    def give_up(self) -> None:
        """Wake its reader, which answers that there was no room."""
        self.is_given_up = True
        if not self.patience.expired():
            self.patience.reschedule(asyncio.get_running_loop().time())


class UnfinishedBodies:
    """Bodies of which a part has come.

    Args:
        max_bytes: of all together.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        """Bytes of the bodies that are still being read."""
        self._bodies: dict[_Body, None] = {}
        """In the order in which they began."""

    def begin(self, patience: asyncio.Timeout) -> _Body:
        """Add one; `patience` ends its reading."""
        body = _Body(patience)
        self._bodies[body] = None
        return body

    def grow(self, body: _Body, num_bytes: int) -> None:
        """Count what came of one, and give up what there is no room for."""
        if body.is_given_up:
            return
        body.num_bytes += num_bytes
        self.num_bytes += num_bytes
        while self.num_bytes > self.max_bytes:
            first = next(each for each in self._bodies if each.num_bytes * len(self._bodies) >= self.num_bytes)
            self.end(first)
            first.give_up()

    def end(self, body: _Body) -> None:
        """Forget one: it is complete, or nobody waits for it any more."""
        if body in self._bodies:
            del self._bodies[body]
            self.num_bytes -= body.num_bytes


class BodyReader:
    """Reads bodies.

    Args:
        max_bytes: of one.
        timeout_s: from its headers on one may take so long.
        max_unfinished_bytes: of all that have not arrived.
    """

    def __init__(self, max_bytes: int, timeout_s: float, max_unfinished_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._unfinished = UnfinishedBodies(max_unfinished_bytes)

    async def read(self, headers: Headers, receive: Receive) -> bytes:
        """Return the whole body.

        Raises:
            HTTPError: 413, it is too large; 408, it has not arrived in time; 400, it never will; 503, there is no room
                for it, or the server ends.
        """
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._max_bytes:
            raise self._too_large()
        body: _Body | None = None
        content = bytearray()
        try:
            async with asyncio.timeout(self._timeout_s) as patience:
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":  # what came is not what was meant, even if it reads well
                        raise HTTPError(400, "the client left before its body had arrived.", headers=CLOSE)
                    chunk: bytes = message.get("body", b"")
                    if len(content) + len(chunk) > self._max_bytes:
                        raise self._too_large()
                    if not message.get("more_body", False):
                        if not content:
                            return chunk
                        content += chunk
                        return bytes(content)
                    body = body or self._unfinished.begin(patience)
                    content += chunk
                    self._unfinished.grow(body, len(chunk))
        except TimeoutError:
            raise self._not_arrived(body) from None
        except asyncio.CancelledError:  # by the server, which ends: what is waited for would not be answered
            message = "the server is shutting down, and the body has not arrived."
            raise HTTPError(503, message, kind="service_unavailable_error", headers=CLOSE) from None
        finally:
            if body is not None:
                self._unfinished.end(body)

    def _not_arrived(self, body: _Body | None) -> HTTPError:
        if body is None or not body.is_given_up:
            message = f"the body did not arrive within {self._timeout_s:g} s (--body-timeout-s)."
            return HTTPError(408, message, code="timeout", headers=CLOSE)
        message = (
            f"bodies that have not arrived hold more than {self._unfinished.max_bytes:,} bytes "
            "(--max-unfinished-body-bytes), and this one is given up. Send it again, at once."
        )
        # the connection stays: one that is closed with bytes unread is reset, and the answer is lost
        headers = {"retry-after": "1"}
        return HTTPError(503, message, kind="service_unavailable_error", code="overloaded", headers=headers)

    def _too_large(self) -> HTTPError:
        most = self._max_bytes
        message = f"the body is larger than {most:,} bytes; shorten it, or start the server with --max-body-bytes."
        return HTTPError(413, message, code="request_too_large")

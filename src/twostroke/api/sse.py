"""Server-sent events: an answer that is written while it is made, and given up when nobody reads it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Protocol

import msgspec
from starlette.responses import Response

from twostroke.api.generation import Abandoned
from twostroke.api.http_errors import error_body
from twostroke.log import get_logger

log = get_logger(__name__)

_encode = msgspec.json.encode
DONE = b"data: [DONE]\n\n"

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


SERVER_SEND = "server_send"
"""Where the gate leaves the server's own `send` in a request's state."""


_MARK = "\ue000 the text goes here \ue000"


class RepeatedEvent:
    """An event that is sent again and again with another text, and is encoded but for that text once.

    >>> told = RepeatedEvent(lambda text: {"choices": [{"text": text, "finish_reason": None}]})
    >>> told.with_text('say "a"')
    b'data: {"choices":[{"text":"say \\\\"a\\\\"","finish_reason":null}]}\\n\\n'

    Args:
        body: of the event; the text may stand in it in several places, but not as a part of another.
    """

    __slots__ = ("_pieces",)

    def __init__(self, body: Callable[[str], Mapping[str, Any]]) -> None:
        self._pieces = event(body(_MARK)).split(_encode(_MARK))

    def with_text(self, text: str) -> bytes:
        """The event with this text."""
        return _encode(text).join(self._pieces)


class Closable(Protocol):
    """What runs for a caller."""

    def close(self) -> None:
        """The caller has left."""
        ...


def event(body: Mapping[str, Any]) -> bytes:
    """One event without a name."""
    return b"data: %b\n\n" % _encode(body)


def named_event(name: str, body: Mapping[str, Any]) -> bytes:
    """One event with a name, as the Responses and Messages APIs have them."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode(body))


def failure(error: Exception) -> bytes:
    """What a stream of OpenAI's older kind ends with that has begun and cannot go on."""
    return event(error_body(error).body) + DONE


async def close_on_disconnect(receive: Receive, closable: Closable) -> None:
    """Gives the work up when the client is gone; cancel it when the work is done."""
    while (await receive())["type"] != "http.disconnect":
        pass
    closable.close()


class EventStream(Response):
    """Writes events as they come; every write holds all that are there.

    Args:
        events: encoded, several to an item when they came together.
        closable: is closed when the client leaves, and at the end.
        on_error: the last bytes when the stream fails.
        headers: of the response.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        closable: Closable,
        *,
        on_error: Callable[[Exception], bytes] = failure,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._events = events
        self._closable = closable
        self._on_error = on_error
        self.background = None
        self.status_code = 200
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Sends the stream.

        The head waits for the first event: a request that fails before is answered with a status of its own.
        """
        # events pass no middleware: they have had the start of the response, and there are many events
        write: Send = scope["state"].get(SERVER_SEND, send)
        watch = asyncio.ensure_future(close_on_disconnect(receive, self._closable))
        try:
            first = await anext(self._events)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            # Whatever wakes a task wakes every coroutine on its stack in turn: of the twenty between the server and
            # this one none is needed for an event, so a short stack of its own takes over.
            await asyncio.create_task(self._write_on(first, write))
        except Abandoned:
            return
        finally:
            watch.cancel()
            self._closable.close()

    async def _write_on(self, first: bytes, write: Send) -> None:
        await write(_body(first))
        try:
            async for chunk in self._events:
                await write(_body(chunk))
        except Abandoned:
            return
        except Exception as error:
            if error_body(error).status >= 500:
                log.warning("a stream ended with %s: %s", type(error).__name__, error)
            await write(_body(self._on_error(error)))
        await write({"type": "http.response.body", "body": b"", "more_body": False})


def _body(chunk: bytes) -> Message:
    return {"type": "http.response.body", "body": chunk, "more_body": True}

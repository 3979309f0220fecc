"""How a call is answered over HTTP: as JSON, or as server-sent events that are given up when nobody reads them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from twostroke.api.generation import Abandoned, AnswerGeneration, Caller
from twostroke.api.http_errors import error_body
from twostroke.log import get_logger
from twostroke.outputs import RequestOutput
from twostroke.plain_words import reason_of

log = get_logger(__name__)

_encode = msgspec.json.encode
DONE = b"data: [DONE]\n\n"

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


SERVER_SEND = "server_send"
"""Where the gate leaves the server's own `send` in a request's state."""
WriteNow = Callable[[bytes], bool]
"""Writes a part of an answer that has begun, or says that the connection takes nothing just now."""
WRITE_NOW = "twostroke.write_now"
"""The ASGI extension under which a server offers its immediate write, as `call`. `may_begin` says whether it could send
the head of the answer now without waiting."""


_MARK = f"\ue000 {secrets.token_hex(8)}"
"""Stands for a value; nobody can send a text that holds it."""


class RepeatedEvent:
    """An event that is sent again and again with other values, and is encoded but for these once.

    >>> told = RepeatedEvent(lambda text, ids: {"choices": [{"text": text, "finish_reason": None}], "ids": ids}, 2)
    >>> told.filled('say "a"', (1, 2))
    b'data: {"choices":[{"text":"say \\\\"a\\\\"","finish_reason":null}],"ids":[1,2]}\\n\\n'

    Args:
        body: of the event, made of its values; they stand in it in the order of the arguments, once each.
        num_values: how many there are.
    """

    __slots__ = ("_begin", "_rest")

    def __init__(self, body: Callable[..., Mapping[str, Any]], num_values: int = 1) -> None:
        marks = [f"{_MARK} {i}" for i in range(num_values)]
        rest = event(body(*marks))
        parts: list[bytes] = []
        for mark in map(_encode, marks):
            part, found, rest = rest.partition(mark)
            assert found, "a value is missing in the event, or stands elsewhere"
            parts.append(part)
        self._begin, *between = parts
        self._rest = (*between, rest)
        """The bytes behind each value, up to the next one or the end."""

    def filled(self, *values: Any) -> bytes:
        """The event with these values."""
        filled = self._begin
        for value, behind in zip(values, self._rest, strict=True):
            filled += _encode(value) + behind
        return filled


Later = Callable[[], bytes]
"""Makes events that take long to write."""


class Closable(Protocol):
    """What runs for a caller."""

    def close(self) -> None:
        """The caller has left, or has its answer."""
        ...


class StreamedCall(Closable, Protocol):
    """What is answered by events."""

    @property
    def generation(self) -> AnswerGeneration:
        """Where its outputs come from."""
        ...

    def events(self, number: int, output: RequestOutput) -> bytes | Later:
        """What is to be sent when this output of the number-th prompt has come; it may be nothing.

        What takes long is made by a function, which a thread calls before the next output is handed over.
        """
        ...

    def last_events(self) -> bytes:
        """What is to be sent when everything has come."""
        ...


class WholeCall(Closable, Protocol):
    """One request on its way through the engine."""

    async def open(self, caller: Caller) -> None:
        """Checks and queues it."""
        ...

    async def answer(self) -> dict[str, Any]:
        """The whole answer."""
        ...


class Call(WholeCall, StreamedCall, Protocol):
    """One that may be streamed."""


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


class EventResponse(Response):
    """Writes events as they come, each at once where the connection takes it.

    Args:
        call: that is answered; it is closed when the client leaves, and at the end.
        on_error: the last bytes when the stream fails.
        headers: of the response.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        call: StreamedCall,
        *,
        on_error: Callable[[Exception], bytes] = failure,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._call = call
        self._generation = call.generation
        self._on_error = on_error
        self._has_begun = False
        """Whether the head is written."""
        self._has_all = False
        """Whether the last event was made."""
        self._send: Send = _nowhere
        """The ASGI send that passes the middlewares; they need to see the head."""
        self._write_now: WriteNow = _cannot_write
        self._may_begin: Callable[[], bool] = _never
        self._awake: asyncio.Future[bytes | Later] | None = None
        """Ends the sleep of the task that writes; None while it is awake."""
        self.background = None
        self.status_code = 200
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Send the stream.

        The head waits for the first event: a request that fails before is answered with a status of its own.
        """
        # events pass no middleware: they have had the start of the response, and there are many events
        write: Send = scope["state"].get(SERVER_SEND, send)
        extension = scope.get("extensions", {}).get(WRITE_NOW, {})
        self._send = send
        self._write_now = extension.get("call", _cannot_write)
        self._may_begin = extension.get("may_begin", _never)
        watch = asyncio.ensure_future(close_on_disconnect(receive, self._call))
        try:
            # Whatever wakes a task wakes every coroutine on its stack in turn: of the twenty between the server and
            # this one none is needed for an event, so a short stack of its own takes over.
            await asyncio.create_task(self._write_on(write))
        except Abandoned:
            return
        finally:
            watch.cancel()
            self._call.close()
            self._send = _nowhere  # it holds this scope

    async def _write_on(self, write: Send) -> None:
        """Writes to the end; sleeps as long as what comes can be written at once, which `_pass_on` does."""
        self._generation.listen(self._wake, self._pass_on)
        events = b""
        try:
            while True:
                if not self._has_begun and (events or self._has_all):
                    await self._begin()
                if events:
                    await write({"type": "http.response.body", "body": events, "more_body": True})
                if self._has_all:
                    break
                events = await _made(self._events_of(self._generation.take()))  # what came meanwhile
                if not events and not self._has_all:
                    self._awake = asyncio.get_running_loop().create_future()
                    woken_by = await self._awake
                    self._awake = None
                    events = await _made(woken_by)
        except Abandoned:
            return
        except Exception as error:
            if not self._has_begun:
                raise
            if error_body(error).status >= 500:
                log.warning("a stream ended with an error: %s", reason_of(error))
            await write({"type": "http.response.body", "body": self._on_error(error), "more_body": True})
        await write({"type": "http.response.body", "body": b"", "more_body": False})

    async def _begin(self) -> None:
        """Write the head."""
        self._has_begun = True
        await self._send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

    def _pass_on(self, number: int, output: RequestOutput) -> bool:
        """Write an output at once, without waking a task, if the connection takes it; otherwise leave it waiting.

        The first output brings the head with it. The last one is written before the task wakes to end the answer.
        """
        awake = self._awake
        if awake is None or awake.done():
            return False
        try:
            if output.finished:
                self._generation.has_ended(output)
            events = self._events_of(((number, output),)) if output.finished else self._call.events(number, output)
            if not isinstance(events, bytes):
                awake.set_result(events)
                return True
            if events and not self._has_begun and self._may_begin():
                _run_at_once(self._begin())
            is_written = not events or (self._has_begun and self._write_now(events))
        except Exception as error:  # it is this stream's alone, and whoever brings outputs has others to bring
            awake.set_exception(error)
            return True
        if not is_written:
            awake.set_result(events)
        elif self._has_all:
            awake.set_result(b"")
        return True

    def _wake(self) -> None:
        if self._awake is not None and not self._awake.done():
            self._awake.set_result(b"")

    def _events_of(self, outputs: Sequence[tuple[int, RequestOutput]]) -> bytes | Later:
        events: list[bytes] = []
        for position, (number, output) in enumerate(outputs, start=1):
            made = self._call.events(number, output)
            if not isinstance(made, bytes):
                return partial(self._late_events, events, made, outputs[position:])
            events.append(made)
        if self._generation.is_over:
            self._has_all = True
            events.append(self._call.last_events())
        return b"".join(events)

    def _late_events(self, before: list[bytes], late: Later, outputs: Sequence[tuple[int, RequestOutput]]) -> bytes:
        """Make events in their order, in a thread: nothing else of this answer is written meanwhile."""
        events = [*before, late()]
        rest = self._events_of(outputs)
        return b"".join([*events, rest if isinstance(rest, bytes) else rest()])


def _run_at_once(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that never waits. Waking a task for it would cost an iteration of the event loop.

    Raises:
        AssertionError: the coroutine waits.
    """
    try:
        coroutine.send(None)
    except StopIteration:
        return
    coroutine.close()
    raise AssertionError("a middleware waits before it sends the head of a stream")


async def _made(events: bytes | Later) -> bytes:
    """Return events, those that take long as soon as a thread has made them."""
    return events if isinstance(events, bytes) else await asyncio.to_thread(events)


async def _nowhere(_: Message) -> None:
    """Do nothing: the send function outside an answer."""


def _never() -> bool:
    """Return False: the `may_begin` of a server without the extension."""
    return False


def _cannot_write(_: bytes) -> bool:
    """Stands in where the server has no such extension."""
    return False


CLIENT_CLOSED_REQUEST = 499
"""Nobody receives it; the access log shows it."""


async def respond(
    call: Call,
    request: Request,
    caller: Caller,
    *,
    streams: bool,
    headers: Mapping[str, str],
    on_error: Callable[[Exception], bytes] = failure,
) -> Response:
    """Runs a call and answers; a client that leaves ends it within a step.

    `on_error` gives the last bytes of a stream that cannot go on.
    """
    with caller.admission.preparing():
        await call.open(caller)
    if streams:
        return EventResponse(call, on_error=on_error, headers=headers)
    return await respond_whole(call, request, headers)


async def respond_whole(call: WholeCall, request: Request, headers: Mapping[str, str]) -> Response:
    """Answers a call that is open; a client that leaves ends it within a step."""
    watch = asyncio.ensure_future(close_on_disconnect(request.receive, call))
    try:
        return json_response(await call.answer(), headers)
    except Abandoned:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        watch.cancel()
        call.close()


def json_response(body: Any, headers: Mapping[str, str] | None = None, status: int = 200) -> Response:
    """A JSON answer, written by the fast encoder."""
    content = msgspec.json.encode(body)
    return Response(content, status_code=status, media_type="application/json", headers=dict(headers or {}))

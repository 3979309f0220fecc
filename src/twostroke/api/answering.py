"""Responses to calls over HTTP: JSON, or server-sent events that stop when the client disconnects."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from twostroke.api.generation import AnswerGeneration, Caller, ClientDisconnected
from twostroke.api.http_errors import error_body
from twostroke.log import get_logger
from twostroke.outputs import RequestOutput
from twostroke.plain_words import reason_of

log = get_logger(__name__)

_encode = msgspec.json.encode
DONE = b"data: [DONE]\n\n"
EVENT_STREAM = "text/event-stream"
"""Media type of server-sent events."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


SERVER_SEND = "server_send"
"""Key in a request's state under which the gate stores the server's own `send`."""
WriteNow = Callable[[bytes], bool]
"""Function that writes a part of a started response, or returns False if the connection cannot take it now."""
WRITE_NOW = "twostroke.write_now"
"""ASGI extension with the server's immediate write as `call`. `may_begin` tells whether the response head could be sent
now without waiting."""


_MARK = f"\ue000 {secrets.token_hex(8)}"
"""Placeholder for a value; random, so no client can send a string that contains it."""


class EventTemplate:
    """Template of an event that is sent repeatedly with other values; all but the values is encoded once.

    >>> told = EventTemplate(lambda text, ids: {"choices": [{"text": text, "finish_reason": None}], "ids": ids}, 2)
    >>> told.filled('say "a"', (1, 2))
    b'data: {"choices":[{"text":"say \\\\"a\\\\"","finish_reason":null}],"ids":[1,2]}\\n\\n'

    Args:
        body: makes the event's body from its values, each of which must appear once, in the order of the arguments.
        num_values: number of values.
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
        """Bytes after each value, up to the next value or the end."""

    def filled(self, *values: Any) -> bytes:
        """Return the event with these values."""
        filled = self._begin
        for value, behind in zip(values, self._rest, strict=True):
            filled += _encode(value) + behind
        return filled


DeferredEvents = Callable[[], bytes]
"""Function that makes events which take long to write."""


class Closable(Protocol):
    """Work that runs for a client."""

    def close(self) -> None:
        """Stop the work: the client has disconnected or has its answer."""
        ...


class StreamedCall(Closable, Protocol):
    """Call that can be answered with events."""

    @property
    def generation(self) -> AnswerGeneration:
        """Source of the call's outputs."""
        ...

    def events(self, number: int, output: RequestOutput) -> bytes | DeferredEvents:
        """Return the events for an output of the number-th prompt; possibly empty.

        If writing them takes long, return a function instead. A thread runs it before the next output is passed on.
        """
        ...

    def last_events(self) -> bytes:
        """Return the events at the end of the stream."""
        ...


class WholeCall(Closable, Protocol):
    """Call that can be answered with one JSON body."""

    async def open(self, caller: Caller) -> None:
        """Check the request and queue it."""
        ...

    async def answer(self) -> dict[str, Any]:
        """Return the whole answer."""
        ...


class Call(WholeCall, StreamedCall, Protocol):
    """Call that can be answered with events or as a whole."""


def event(body: Mapping[str, Any]) -> bytes:
    """Return one event without a name."""
    return b"data: %b\n\n" % _encode(body)


def named_event(name: str, body: Mapping[str, Any]) -> bytes:
    """Return one event with a name, as in the Responses and Messages APIs."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode(body))


def failure(error: Exception) -> bytes:
    """Return the last bytes of a started stream of OpenAI's older APIs that fails."""
    return event(error_body(error).body) + DONE


async def close_on_disconnect(receive: Receive, closable: Closable) -> None:
    """Wait until the client disconnects, then close the work. Cancel this when the work is done."""
    while (await receive())["type"] != "http.disconnect":
        pass
    closable.close()


class EventResponse(Response):
    """Response that writes events as they arrive, each immediately if the connection takes it.

    Args:
        call: the call to answer; closed when the client disconnects and at the end.
        on_error: returns the last bytes of a stream that fails.
        headers: headers of the response.
        media_type: type of the body.
    """

    def __init__(
        self,
        call: StreamedCall,
        *,
        on_error: Callable[[Exception], bytes] = failure,
        headers: Mapping[str, str] | None = None,
        media_type: str = EVENT_STREAM,
    ) -> None:
        self._call = call
        self._generation = call.generation
        self._on_error = on_error
        self._has_begun = False
        """Whether the response head has been written."""
        self._has_all = False
        """Whether the last event has been made."""
        self._send: Send = _discard
        """ASGI send through the middlewares, which need to see the head."""
        self._write_now: WriteNow = _cannot_write
        self._may_begin: Callable[[], bool] = _never
        self._awake: asyncio.Future[bytes | DeferredEvents] | None = None
        """Future that wakes the writing task; None while the task is awake."""
        self.background = None
        self.status_code = 200
        self.media_type = media_type
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Send the stream.

        The head waits for the first event, so that a request that fails before it gets a status of its own.
        """
        # events bypass the middlewares, which need only the response start, because there are many events
        write: Send = scope["state"].get(SERVER_SEND, send)
        extension = scope.get("extensions", {}).get(WRITE_NOW, {})
        self._send = send
        self._write_now = extension.get("call", _cannot_write)
        self._may_begin = extension.get("may_begin", _never)
        watch = asyncio.ensure_future(close_on_disconnect(receive, self._call))
        try:
            # Waking a task resumes every coroutine on its stack. None of the twenty between the server and this one is
            # needed for an event, so a new task with a short stack writes the events.
            await asyncio.create_task(self._write_on(write))
        except ClientDisconnected:
            return
        finally:
            watch.cancel()
            self._call.close()
            self._send = _discard  # drop the reference to this scope

    async def _write_on(self, write: Send) -> None:
        """Write events to the end of the stream. Sleep while `_write_output` can write outputs immediately."""
        self._generation.listen(self._wake, self._write_output)
        events = b""
        try:
            while True:
                if not self._has_begun and (events or self._has_all):
                    await self._begin()
                if events:
                    await write({"type": "http.response.body", "body": events, "more_body": True})
                if self._has_all:
                    break
                events = await _resolve_events(
                    self._events_of(self._generation.take())
                )  # outputs that arrived meanwhile
                if not events and not self._has_all:
                    self._awake = asyncio.get_running_loop().create_future()
                    woken_by = await self._awake
                    self._awake = None
                    events = await _resolve_events(woken_by)
        except ClientDisconnected:
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

    def _write_output(self, number: int, output: RequestOutput) -> bool:
        """Write an output immediately, without waking a task, if the connection takes it; otherwise leave it to the
        task.

        The first output also writes the head. The last one is written before the task wakes to end the response.
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
        except Exception as error:  # an error of this stream must not stop the delivery to others
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

    def _events_of(self, outputs: Sequence[tuple[int, RequestOutput]]) -> bytes | DeferredEvents:
        events: list[bytes] = []
        for position, (number, output) in enumerate(outputs, start=1):
            made = self._call.events(number, output)
            if not isinstance(made, bytes):
                return partial(self._deferred_events, events, made, outputs[position:])
            events.append(made)
        if self._generation.is_over:
            self._has_all = True
            events.append(self._call.last_events())
        return b"".join(events)

    def _deferred_events(
        self, before: list[bytes], late: DeferredEvents, outputs: Sequence[tuple[int, RequestOutput]]
    ) -> bytes:
        """Make events in order, in a thread. No other part of this answer is written meanwhile."""
        events = [*before, late()]
        rest = self._events_of(outputs)
        return b"".join([*events, rest if isinstance(rest, bytes) else rest()])


def _run_at_once(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that never waits; waking a task for it would cost an iteration of the event loop.

    Raises:
        AssertionError: the coroutine waits.
    """
    try:
        coroutine.send(None)
    except StopIteration:
        return
    coroutine.close()
    raise AssertionError("a middleware waits before it sends the head of a stream")


async def _resolve_events(events: bytes | DeferredEvents) -> bytes:
    """Return the events; a thread makes them first if that takes long."""
    return events if isinstance(events, bytes) else await asyncio.to_thread(events)


async def _discard(_: Message) -> None:
    """Do nothing: the send function before and after a response."""


def _never() -> bool:
    """Return False: the `may_begin` of a server without the extension."""
    return False


def _cannot_write(_: bytes) -> bool:
    """Return False: the `WriteNow` of a server without the extension."""
    return False


CLIENT_CLOSED_REQUEST = 499
"""Status for a client that disconnected; visible only in the access log."""


async def respond(
    call: Call,
    request: Request,
    caller: Caller,
    *,
    streams: bool,
    headers: Mapping[str, str],
    on_error: Callable[[Exception], bytes] = failure,
    media_type: str = EVENT_STREAM,
) -> Response:
    """Run a call and return its response. A client that disconnects ends the call within a step.

    `on_error` returns the last bytes of a stream that fails; a stream has the given media type.
    """
    with caller.admission.preparing():
        await call.open(caller)
    if streams:
        return EventResponse(call, on_error=on_error, headers=headers, media_type=media_type)
    return await respond_whole(call, request, headers)


async def respond_whole(call: WholeCall, request: Request, headers: Mapping[str, str]) -> Response:
    """Return the response to an opened call. A client that disconnects ends the call within a step."""
    watch = asyncio.ensure_future(close_on_disconnect(request.receive, call))
    try:
        return json_response(await call.answer(), headers)
    except ClientDisconnected:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        watch.cancel()
        call.close()


def json_response(body: Any, headers: Mapping[str, str] | None = None, status: int = 200) -> Response:
    """Return a JSON response, written by msgspec's fast encoder."""
    content = msgspec.json.encode(body)
    return Response(content, status_code=status, media_type="application/json", headers=dict(headers or {}))

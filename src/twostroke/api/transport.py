"""Below the gate: connections that do not behave end here, before they are requests.

uvicorn's parser has no limits of its own. These are: how long and how large the head of a request may be, how many
connections there may be, and shapes that two readers could read differently (request smuggling, RFC 9112, 6.3 and
11.2). What is wrong is told in the shape of every other error, and the connection is closed.
"""

from __future__ import annotations

import asyncio
from functools import partial
from http import HTTPStatus
from typing import Any, NoReturn

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from twostroke.api.http_errors import HTTPError
from twostroke.api.sse import WRITE_NOW

MAX_HEAD_BYTES = 64 * 1024
TOO_LARGE = f"the head of the request has more than {MAX_HEAD_BYTES} bytes."
MAX_HEADERS = 128
MAX_PIPELINED = 8
"""Requests that may wait on a connection behind the one that is answered."""
UNIQUE_HEADERS = frozenset({b"content-length", b"transfer-encoding", b"host", b"authorization", b"x-api-key"})
"""Two of these and two readers may believe different ones."""


LEAST_TAKEN_BYTES = 16 * 1024
"""Of an answer that waits for its reader: less in answer_timeout_s is not reading."""


def guarded_protocol(max_connections: int, head_timeout_s: float, answer_timeout_s: float) -> type[HttpToolsProtocol]:
    """The protocol class of a server: connections at most, and its patience for a head and for a reader."""

    class Protocol(GuardedProtocol):
        """With its limits."""

    Protocol.max_connections = max_connections
    Protocol.head_timeout_s = head_timeout_s
    Protocol.answer_timeout_s = answer_timeout_s
    return Protocol


class _Refused(Exception):
    """The request cannot be read as it was meant."""


class GuardedProtocol(HttpToolsProtocol):
    """One connection."""

    max_connections: int
    head_timeout_s: float
    answer_timeout_s: float

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Somebody has connected."""
        super().connection_made(transport)
        self._num_head_bytes = 0
        self._num_pending_bytes = 0
        self._has_request = False
        self._reads_body = False
        self._refusal: HTTPError | None = None
        self._answering: RequestResponseCycle | None = None
        """What is being answered, or was answered last; requests may wait behind it."""
        self._head_timer: asyncio.TimerHandle | None = None
        self._reader_timer: asyncio.TimerHandle | None = None
        if len(self.connections) > self.max_connections:
            self._answer_and_close(503, f"more than {self.max_connections} connections (--max-connections).")
            return
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        self._head_is_there()
        self._reader_is_back()
        # uvicorn tells the request that came last; those before it, which are being answered, hear it here
        for cycle in (self._answering, *(waiting for waiting, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()
        self._answering = None
        super().connection_lost(exc)
        # it refers back to this object; thousands of connections would wait for the collector of cycles
        self.cycle = None  # pyright: ignore[reportAttributeAccessIssue] (as before the first request)

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        if self.transport.is_closing():
            return
        if self._head_timer is None and (not self._has_request or self.cycle.response_complete):
            self._await_head()  # a request has to come of it, or the rest of one that was answered before its end
        super().data_received(data)
        if self._head_timer is not None and not self._reads_body:  # the parser keeps a header that has not ended
            self._num_pending_bytes += len(data)
            if self._num_pending_bytes > MAX_HEAD_BYTES:
                self._answer_and_close(431, TOO_LARGE)

    def pause_writing(self) -> None:
        """More is to be sent than the reader takes; nothing is added until it has caught up."""
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        """It has."""
        super().resume_writing()
        self._reader_is_back()

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self._num_head_bytes = 0
        if self._head_timer is None:
            self._await_head()

    def on_url(self, url: bytes) -> None:
        """A part of the path."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        self._count(len(name) + len(value))
        if len(self.headers) >= MAX_HEADERS:
            self._refuse(431, f"the request has more than {MAX_HEADERS} headers.")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is there."""
        self._head_is_there()
        names = [name for name, _ in self.headers]
        twice = [name for name in UNIQUE_HEADERS if names.count(name) > 1]
        if twice or (b"content-length" in names and b"transfer-encoding" in names):
            told = ", ".join(name.decode() for name in sorted(twice)) or "content-length beside transfer-encoding"
            self._refuse(400, f"the request has contradicting headers ({told}).")
        self._has_request = self._reads_body = True
        super().on_headers_complete()
        ways: dict[object, object] = {
            "call": partial(self._write_now, self.cycle),
            "may_begin": partial(self._may_begin, self.cycle),
        }
        self.scope["extensions"] = {WRITE_NOW: ways}
        if not self.pipeline:
            self._answering = self.cycle
            return
        if len(self.pipeline) > MAX_PIPELINED:
            self._refuse(400, f"more than {MAX_PIPELINED} requests wait behind the one that is answered.")
        # uvicorn stops reading while requests wait behind another; but who does not read does not see the client leave
        self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        """A part of a body."""
        super().on_body(body)
        if self.cycle is not self._answering and self.flow.read_paused:
            self._refuse(413, "the body of a request that waits behind another is too large to be kept.")

    def on_response_complete(self) -> None:
        """The answer is written; the next one begins, if a request waits."""
        if self.pipeline:
            self._answering = self.pipeline[-1][0]
        super().on_response_complete()

    def on_message_complete(self) -> None:
        """The body is there, or what was left of one that nobody waited for."""
        self._reads_body = False
        self._head_is_there()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """The bytes are no request, or not one that is taken."""
        refusal = self._refusal or HTTPError(400, msg)
        self._answer_and_close(refusal.answer.status, str(refusal))

    def _write_now(self, cycle: RequestResponseCycle, part: bytes) -> bool:
        """See WriteNow; for an answer whose length is not known before, which is sent in chunks."""
        if self.flow.write_paused or not cycle.chunked_encoding or cycle.response_complete:
            return False
        if not cycle.disconnected and not self.transport.is_closing():  # what nobody hears is no error
            self.transport.write(b"%x\r\n%b\r\n" % (len(part), part))
        return True

    def _may_begin(self, cycle: RequestResponseCycle) -> bool:
        """Return whether `cycle.send` would write the head of an answer without waiting."""
        return not self.flow.write_paused and not cycle.disconnected and not cycle.response_started

    def _refuse(self, status: int, message: str) -> NoReturn:
        self._refusal = HTTPError(status, message)
        raise _Refused

    def _count(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self._refuse(431, TOO_LARGE)

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.head_timeout_s, self._lose_patience)

    def _head_is_there(self) -> None:
        self._num_pending_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _lose_patience(self) -> None:
        self._head_timer = None
        self._answer_and_close(
            408, f"the head of the request did not arrive within {self.head_timeout_s:g} s (--head-timeout-s)."
        )

    def _await_reader(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        self._reader_timer = self.loop.call_later(self.answer_timeout_s, self._look_at_reader, unsent)

    def _reader_is_back(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None

    def _look_at_reader(self, unsent_before: int) -> None:
        """Whoever takes nothing holds the answer in our memory, and a place; as if it had left."""
        if unsent_before - self.transport.get_write_buffer_size() < LEAST_TAKEN_BYTES:
            self.transport.abort()
        else:
            self._await_reader()

    @property
    def _owes_an_answer(self) -> bool:
        return self._answering is not None and not self._answering.response_complete

    @property
    def _reads_its_body(self) -> bool:
        """Whether what comes belongs to the request that is to be answered, and nothing of the answer is written."""
        return self._reads_body and self.cycle is self._answering and not self.cycle.response_started

    def _answer_and_close(self, status: int, message: str) -> None:
        if self.transport.is_closing():
            return
        if self._owes_an_answer and not self._reads_its_body:
            # whatever were written would be taken for that answer, or for a part of it
            self.transport.close()
            return
        answer: dict[str, Any] = HTTPError(status, message).answer.body
        body = msgspec.json.encode(answer)
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode("ascii") + body)
        self.transport.close()

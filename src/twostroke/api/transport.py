"""Below the gate: connections that do not behave end here, before they are requests.

uvicorn's parser has no limits of its own. These are: how long and how large the head of a request may be, how many
connections there may be, and shapes that two readers could read differently (request smuggling, RFC 9112, 6.3 and
11.2; request_head.py). What is wrong is told in the shape of every other error, behind the answers of the requests
before it, and the connection is closed.

A client that shuts down its half of the connection has left, and its requests are aborted: one that is gone looks the
same until something is written to it, and a whole answer is written when all of its work is done.
"""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from http import HTTPStatus
from typing import Any, NoReturn

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from twostroke.api.answering import WRITE_NOW, Message
from twostroke.api.http_errors import HTTPError
from twostroke.api.request_head import check_head, expects_continue, framing_of, no_request, origin_form, unreadable

MAX_HEAD_BYTES = 64 * 1024
MAX_TARGET_BYTES = 32 * 1024
TOO_LARGE = f"the head of the request has more than {MAX_HEAD_BYTES} bytes."
TOO_MUCH_FRAMING = f"more than {MAX_HEAD_BYTES} bytes came between two parts of the body, or behind the last."
MAX_HEADERS = 128
MAX_PIPELINED = 8
"""Requests that may wait on a connection behind the one that is answered."""
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
        self._take_leniently()
        self._num_head_bytes = 0
        self._num_pending_bytes = 0
        """That the parser may keep: of a header that has not ended, or of what frames a body."""
        self._has_body_part = False
        """Whether the bytes that came last brought a part of a body."""
        self._has_request = False
        self._reads_body = False
        self._received = b""
        """What the parser reads now."""
        self._ended_within = False
        """Whether a request ends in it, so that it does not begin with the line of the one that is read."""
        self._framing = b""
        """The header that says where the body ends, of a request at which the parser stops."""
        self._is_replaying = False
        """Whether the parser is brought to where another has stopped, and nothing new comes."""
        self._refusal: HTTPError | None = None
        self._answering: RequestResponseCycle | None = None
        """What is being answered, or was answered last; requests may wait behind it."""
        self._last_words = b""
        """What is said, and nothing read any more, when the requests before it have their answers."""
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
        self._last_words = b""
        super().connection_lost(exc)
        # it refers back to this object; thousands of connections would wait for the collector of cycles
        self.cycle = None  # pyright: ignore[reportAttributeAccessIssue] (as before the first request)

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        if self.transport.is_closing() or self._last_words:
            return
        if self._head_timer is None and (not self._has_request or self.cycle.response_complete):
            self._await_head()  # a request has to come of it, or the rest of one that was answered before its end
        self._received = data
        self._ended_within = False
        self._has_body_part = False
        super().data_received(data)
        self._received = b""
        if self._reads_body:  # extensions of chunks and trailers are no part of the body, and nobody else counts them
            self._num_pending_bytes = 0 if self._has_body_part else self._num_pending_bytes + len(data)
        elif self._head_timer is not None:  # the parser keeps a header that has not ended
            self._num_pending_bytes += len(data)
        if self._num_pending_bytes > MAX_HEAD_BYTES:
            self._answer_and_close(431, TOO_MUCH_FRAMING if self._reads_body else TOO_LARGE)

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
        if self._is_replaying:
            return
        super().on_message_begin()
        self._num_head_bytes = 0
        if self._head_timer is None:
            self._await_head()

    def on_url(self, url: bytes) -> None:
        """A part of the path."""
        if self._is_replaying:
            return
        if len(self.url) + len(url) > MAX_TARGET_BYTES:
            self._refuse(HTTPError(414, f"the target of the request has more than {MAX_TARGET_BYTES} bytes."))
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header; a trailer, which comes behind the body, is no header and is left out (RFC 9110, 6.5.1)."""
        if self._is_replaying:
            return
        self._count(len(name) + len(value))
        if self._reads_body:
            return
        if len(self.headers) >= MAX_HEADERS:
            self._refuse(HTTPError(431, f"the request has more than {MAX_HEADERS} headers."))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is there."""
        if self._is_replaying:
            return
        self._head_is_there()
        method, version = self.parser.get_method(), self.parser.get_http_version()
        try:
            check_head(method, version, self.url, self.headers)
        except HTTPError as refusal:
            self._refuse(refusal)
        is_old, is_for_server = version == "1.0", self.url == b"*"
        self._take_target()
        self._has_request = self._reads_body = True
        self._framing = framing_of(self.headers) if self.parser.should_upgrade() else b""
        self.expect_100_continue = expects_continue(self.headers) and not is_old  # it would not know the interim answer
        super().on_headers_complete()
        if is_for_server:
            self.scope["path"], self.scope["raw_path"] = "*", b"*"
        if is_old:
            send = partial(_send_unframed, self.cycle, self.cycle.send)
            self.cycle.send = send  # pyright: ignore[reportAttributeAccessIssue] (uvicorn calls what it finds there)
        ways: dict[object, object] = {
            "call": partial(self._write_now, self.cycle),
            "may_begin": partial(self._may_begin, self.cycle),
        }
        self.scope["extensions"] = {WRITE_NOW: ways}
        if not self.pipeline:
            self._answering = self.cycle
            return
        if len(self.pipeline) > MAX_PIPELINED:
            message = f"more than {MAX_PIPELINED} requests wait behind the one that is answered."
            self._refuse(HTTPError(400, message))
        # uvicorn stops reading while requests wait behind another; but who does not read does not see the client leave
        self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        """A part of a body."""
        self._has_body_part = True
        super().on_body(body)
        if self.cycle is not self._answering and self.flow.read_paused:
            self._refuse(HTTPError(413, "the body of a request that waits behind another is too large to be kept."))

    def on_response_complete(self) -> None:
        """The answer is written; the next one begins, if a request waits."""
        if self.pipeline:
            self._answering = self.pipeline[-1][0]
        super().on_response_complete()
        if self._last_words and not self._owes_an_answer and not self.transport.is_closing():
            self.transport.write(self._last_words)
            self.transport.close()

    def on_message_complete(self) -> None:
        """The body is there, or what was left of one that nobody waited for."""
        if self._framing:  # so the parser believes; the body is what comes next
            return
        self._reads_body = False
        self._ended_within = True
        self._head_is_there()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """The bytes are no request, or not one that is taken."""
        refusal = self._refusal
        if refusal is None and not self._reads_body and not self._ended_within:
            is_method = isinstance(sys.exception(), httptools.HttpParserInvalidMethodError)
            refusal = unreadable(self._received, is_method=is_method)
        refusal = refusal or no_request(sys.exception())
        has_content = self.parser.get_method() != b"HEAD"
        self._answer_and_close(refusal.answer.status, str(refusal), has_content=has_content)

    def _unsupported_upgrade_warning(self) -> None:
        """Another protocol was offered, which a server may ignore (RFC 9110, 7.8); what follows is read as before.

        The parser takes such a request for one without a body, stops behind its head and says where.
        """
        stop = sys.exception()
        rest = self._received[stop.args[0] :] if isinstance(stop, httptools.HttpParserUpgrade) else b""
        framing, self._framing = self._framing, b""
        if framing:
            self.parser = httptools.HttpRequestParser(self)
            self._take_leniently()
            self._is_replaying = True
            self.parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n")
            self._is_replaying = False
        if rest:
            self.data_received(rest)

    def _write_now(self, cycle: RequestResponseCycle, part: bytes) -> bool:
        """See WriteNow; for an answer whose length is not known before, which is sent in chunks."""
        if self.flow.write_paused or not cycle.chunked_encoding or cycle.response_complete:
            return False
        if not cycle.disconnected and not self.transport.is_closing():  # what nobody hears is no error
            self.transport.write(b"%x\r\n" % len(part) + part + b"\r\n")
        return True

    def _may_begin(self, cycle: RequestResponseCycle) -> bool:
        """Return whether `cycle.send` would write the head of an answer without waiting."""
        return not self.flow.write_paused and not cycle.disconnected and not cycle.response_started

    def _take_target(self) -> None:
        """Make a path of an absolute URL, whose host is the one that counts."""
        if self.url == b"*":
            self.url = b"/"  # for uvicorn's parser
        self.url, host = origin_form(self.url)
        if host is not None:
            self.headers[:] = [(name, value) for name, value in self.headers if name != b"host"]
            self.headers.append((b"host", host))

    def _refuse(self, refusal: HTTPError) -> NoReturn:
        self._refusal = refusal
        raise _Refused

    def _count(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self._refuse(HTTPError(431, TOO_LARGE))

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

    def _answer_and_close(self, status: int, message: str, *, has_content: bool = True) -> None:
        if self.transport.is_closing() or self._last_words:
            return
        if self._reads_body and self.cycle is self._answering and self.cycle.response_started and self._owes_an_answer:
            self.transport.close()  # whatever were written would be taken for a part of that answer
            return
        answer: dict[str, Any] = HTTPError(status, message).answer.body
        body = msgspec.json.encode(answer)
        standing = b"".join(b"%b: %b\r\n" % header for header in self.server_state.default_headers)  # the date
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n"
        )
        words = head.encode("ascii") + standing + b"\r\n" + (body if has_content else b"")
        if self._owes_an_answer and not self._reads_its_body:
            self._say_last(words)
            return
        self.transport.write(words)
        self.transport.close()

    def _say_last(self, words: bytes) -> None:
        """Answer the whole requests that came before, and then with this."""
        self._last_words = words
        self._head_is_there()
        if self._reads_body and self.pipeline and self.pipeline[0][0] is self.cycle:  # the words are its answer
            self.pipeline.popleft()
            assert self._answering is not None, "an answer is owed"
            self.cycle = self.pipeline[0][0] if self.pipeline else self._answering
        self._reads_body = False
        self.flow.resume_reading()  # or nobody would see the client leave

    def _take_leniently(self) -> None:
        """Take bytes behind a request that ends the connection, as uvicorn has it, and spaces behind chunk sizes."""
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True, lenient_spaces_after_chunk_size=True)


async def _send_unframed(cycle: RequestResponseCycle, send: Any, message: Message) -> None:
    """Send to HTTP/1.0, which has no chunks: without a length, the end of the connection is the end of the content."""
    if message["type"] == "http.response.start":
        if not any(name.lower() == b"content-length" for name, _ in message.get("headers", ())):
            cycle.chunked_encoding = False
    elif cycle.chunked_encoding is False and not cycle.expected_content_length:
        cycle.expected_content_length = len(message.get("body", b""))
    await send(message)

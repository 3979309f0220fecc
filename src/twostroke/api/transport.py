"""Protection of connections below the gate: limits and checks before a request exists.

uvicorn's parser has no limits of its own. This module limits the time and size of a request's head and the number of
connections, and refuses ambiguous requests (request smuggling, RFC 9112, 6.3 and 11.2; request_head.py). Errors have
the usual shape and are sent after the answers of the requests before; then the connection is closed.

A client that shuts down its half of the connection counts as disconnected, and its requests are aborted. A client that
is gone looks the same until something is written to it, and a whole answer is written only after all work is done.
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
from twostroke.api.request_head import (
    bad_request_error,
    check_head,
    expects_continue,
    framing_of,
    origin_form,
    unparsed_request_error,
)

MAX_HEAD_BYTES = 64 * 1024
MAX_TARGET_BYTES = 32 * 1024
TOO_LARGE = f"the head of the request has more than {MAX_HEAD_BYTES} bytes."
FRAMING_TOO_LARGE = f"more than {MAX_HEAD_BYTES} bytes came between two parts of the body, or after the last."
MAX_HEADERS = 128
MAX_PIPELINED = 8
"""Maximum requests that wait on a connection behind the one being answered."""
MIN_READ_BYTES = 16 * 1024
"""Bytes of a waiting answer that a client must read within answer_timeout_s; otherwise it is not reading."""


def guarded_protocol(max_connections: int, head_timeout_s: float, answer_timeout_s: float) -> type[HttpToolsProtocol]:
    """Return a protocol class with limits on connections and timeouts for request heads and for slow readers."""

    class Protocol(GuardedProtocol):
        """Protocol class with the limits of one server."""

    Protocol.max_connections = max_connections
    Protocol.head_timeout_s = head_timeout_s
    Protocol.answer_timeout_s = answer_timeout_s
    return Protocol


class _Refused(Exception):
    """The request is refused while it is parsed."""


class GuardedProtocol(HttpToolsProtocol):
    """Protocol of one connection, with limits."""

    max_connections: int
    head_timeout_s: float
    answer_timeout_s: float

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Set up a new connection; refuse it if there are too many."""
        super().connection_made(transport)
        self._set_leniencies()
        self._num_head_bytes = 0
        self._num_pending_bytes = 0
        """Bytes that the parser may keep: of an unfinished header, or of a body's framing."""
        self._has_body_part = False
        """Whether the latest bytes contained a part of a body."""
        self._has_request = False
        self._reads_body = False
        self._received = b""
        """Bytes being parsed."""
        self._request_ended_in_received = False
        """Whether a request ended within `_received`, which then does not begin with the current request line."""
        self._framing = b""
        """Header that defines the end of the body, for a request at which the parser stops."""
        self._is_replaying = False
        """Whether a new parser is being fed known data to reach the state of the old one."""
        self._refusal: HTTPError | None = None
        self._answering: RequestResponseCycle | None = None
        """Request being answered, or the latest answered one; others may wait behind it."""
        self._final_response = b""
        """Error response to send after the answers of earlier requests; nothing is read any more once it is set."""
        self._head_timer: asyncio.TimerHandle | None = None
        self._reader_timer: asyncio.TimerHandle | None = None
        if len(self.connections) > self.max_connections:
            self._answer_and_close(503, f"there are more than {self.max_connections} connections (--max-connections).")
            return
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Clean up a closed connection, and notify all of its requests."""
        self._stop_head_timer()
        self._stop_reader_timer()
        # uvicorn notifies only the latest request; notify those before it, which are being answered
        for cycle in (self._answering, *(waiting for waiting, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()
        self._answering = None
        self._final_response = b""
        super().connection_lost(exc)
        # it refers back to this object: break the cycle, or thousands of connections wait for the garbage collector
        self.cycle = None  # pyright: ignore[reportAttributeAccessIssue] (as before the first request)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes and enforce the limits."""
        if self.transport.is_closing() or self._final_response:
            return
        if self._head_timer is None and (not self._has_request or self.cycle.response_complete):
            self._start_head_timer()  # these bytes begin a request, or end one that was answered early
        self._received = data
        self._request_ended_in_received = False
        self._has_body_part = False
        super().data_received(data)
        self._received = b""
        if self._reads_body:  # only this counts chunk extensions and trailers, which are not part of the body
            self._num_pending_bytes = 0 if self._has_body_part else self._num_pending_bytes + len(data)
        elif self._head_timer is not None:  # the parser keeps an unfinished header
            self._num_pending_bytes += len(data)
        if self._num_pending_bytes > MAX_HEAD_BYTES:
            self._answer_and_close(431, FRAMING_TOO_LARGE if self._reads_body else TOO_LARGE)

    def pause_writing(self) -> None:
        """Stop adding output until the client has read enough, and start its timeout."""
        super().pause_writing()
        self._start_reader_timer()

    def resume_writing(self) -> None:
        """Continue output: the client has read enough."""
        super().resume_writing()
        self._stop_reader_timer()

    def on_message_begin(self) -> None:
        """Handle the first byte of a request."""
        if self._is_replaying:
            return
        super().on_message_begin()
        self._num_head_bytes = 0
        if self._head_timer is None:
            self._start_head_timer()

    def on_url(self, url: bytes) -> None:
        """Handle a part of the target, within its limit."""
        if self._is_replaying:
            return
        if len(self.url) + len(url) > MAX_TARGET_BYTES:
            self._refuse(HTTPError(414, f"the target of the request has more than {MAX_TARGET_BYTES} bytes."))
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Handle a header; trailers, which follow the body, are dropped (RFC 9110, 6.5.1)."""
        if self._is_replaying:
            return
        self._count(len(name) + len(value))
        if self._reads_body:
            return
        if len(self.headers) >= MAX_HEADERS:
            self._refuse(HTTPError(431, f"the request has more than {MAX_HEADERS} headers."))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Check the head, and begin the request."""
        if self._is_replaying:
            return
        self._stop_head_timer()
        method, version = self.parser.get_method(), self.parser.get_http_version()
        try:
            check_head(method, version, self.url, self.headers)
        except HTTPError as refusal:
            self._refuse(refusal)
        is_old, is_for_server = version == "1.0", self.url == b"*"
        self._normalize_target()
        self._has_request = self._reads_body = True
        self._framing = framing_of(self.headers) if self.parser.should_upgrade() else b""
        # HTTP/1.0 clients do not know the interim response
        self.expect_100_continue = expects_continue(self.headers) and not is_old
        super().on_headers_complete()
        if is_for_server:
            self.scope["path"], self.scope["raw_path"] = "*", b"*"
        if is_old:
            send = partial(_send_unframed, self.cycle, self.cycle.send)
            self.cycle.send = send  # pyright: ignore[reportAttributeAccessIssue] (uvicorn calls this attribute)
        ways: dict[object, object] = {
            "call": partial(self._write_now, self.cycle),
            "may_begin": partial(self._may_begin, self.cycle),
        }
        self.scope["extensions"] = {WRITE_NOW: ways}
        if not self.pipeline:
            self._answering = self.cycle
            return
        if len(self.pipeline) > MAX_PIPELINED:
            message = f"more than {MAX_PIPELINED} requests wait on this connection."
            self._refuse(HTTPError(400, message))
        # uvicorn stops reading while requests wait behind another; without reading, a disconnect goes unnoticed
        self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        """Handle a part of a body."""
        self._has_body_part = True
        super().on_body(body)
        if self.cycle is not self._answering and self.flow.read_paused:
            self._refuse(HTTPError(413, "the body of a request that waits behind another is too large to buffer."))

    def on_response_complete(self) -> None:
        """Begin the next waiting request, or send the final error and close."""
        if self.pipeline:
            self._answering = self.pipeline[-1][0]
        super().on_response_complete()
        if self._final_response and not self._response_is_pending and not self.transport.is_closing():
            self.transport.write(self._final_response)
            self.transport.close()

    def on_message_complete(self) -> None:
        """Handle the end of a body, also of one that is no longer needed."""
        if self._framing:  # the parser assumes no body after an upgrade header; the body comes next
            return
        self._reads_body = False
        self._request_ended_in_received = True
        self._stop_head_timer()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not an acceptable request."""
        refusal = self._refusal
        if refusal is None and not self._reads_body and not self._request_ended_in_received:
            is_method = isinstance(sys.exception(), httptools.HttpParserInvalidMethodError)
            refusal = unparsed_request_error(self._received, is_method=is_method)
        refusal = refusal or bad_request_error(sys.exception())
        has_content = self.parser.get_method() != b"HEAD"
        self._answer_and_close(refusal.answer.status, str(refusal), has_content=has_content)

    def _unsupported_upgrade_warning(self) -> None:
        """Ignore the offer of another protocol, as RFC 9110, 7.8 allows, and continue to parse.

        The parser treats such a request as one without a body, stops after its head and reports the position.
        """
        stop = sys.exception()
        rest = self._received[stop.args[0] :] if isinstance(stop, httptools.HttpParserUpgrade) else b""
        framing, self._framing = self._framing, b""
        if framing:
            self.parser = httptools.HttpRequestParser(self)
            self._set_leniencies()
            self._is_replaying = True
            self.parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n")
            self._is_replaying = False
        if rest:
            self.data_received(rest)

    def _write_now(self, cycle: RequestResponseCycle, part: bytes) -> bool:
        """Write a chunk if the connection takes it now (`WriteNow`); only for answers without a known length."""
        if self.flow.write_paused or not cycle.chunked_encoding or cycle.response_complete:
            return False
        if not cycle.disconnected and not self.transport.is_closing():  # a disconnected client is not an error
            self.transport.write(b"%x\r\n" % len(part) + part + b"\r\n")
        return True

    def _may_begin(self, cycle: RequestResponseCycle) -> bool:
        """Return whether `cycle.send` would write the head of an answer without waiting."""
        return not self.flow.write_paused and not cycle.disconnected and not cycle.response_started

    def _normalize_target(self) -> None:
        """Replace an absolute URL by its path; its host replaces the Host header."""
        if self.url == b"*":
            self.url = b"/"  # uvicorn's parser needs a path
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

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self.head_timeout_s, self._on_head_timeout)

    def _stop_head_timer(self) -> None:
        self._num_pending_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_head_timeout(self) -> None:
        self._head_timer = None
        self._answer_and_close(
            408, f"the head of the request did not arrive within {self.head_timeout_s:g} s (--head-timeout-s)."
        )

    def _start_reader_timer(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        self._reader_timer = self.loop.call_later(self.answer_timeout_s, self._check_reader, unsent)

    def _stop_reader_timer(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None

    def _check_reader(self, unsent_before: int) -> None:
        """Abort the connection of a client that does not read, because its answer holds memory and a connection."""
        if unsent_before - self.transport.get_write_buffer_size() < MIN_READ_BYTES:
            self.transport.abort()
        else:
            self._start_reader_timer()

    @property
    def _response_is_pending(self) -> bool:
        return self._answering is not None and not self._answering.response_complete

    @property
    def _reads_answered_body(self) -> bool:
        """Whether incoming bytes belong to the request to be answered, and nothing of its answer is written."""
        return self._reads_body and self.cycle is self._answering and not self.cycle.response_started

    def _answer_and_close(self, status: int, message: str, *, has_content: bool = True) -> None:
        if self.transport.is_closing() or self._final_response:
            return
        if (
            self._reads_body
            and self.cycle is self._answering
            and self.cycle.response_started
            and self._response_is_pending
        ):
            self.transport.close()  # an error written now would be read as part of that answer
            return
        answer: dict[str, Any] = HTTPError(status, message).answer.body
        body = msgspec.json.encode(answer)
        standing = b"".join(b"%b: %b\r\n" % header for header in self.server_state.default_headers)  # the date
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n"
        )
        words = head.encode("ascii") + standing + b"\r\n" + (body if has_content else b"")
        if self._response_is_pending and not self._reads_answered_body:
            self._queue_final_response(words)
            return
        self.transport.write(words)
        self.transport.close()

    def _queue_final_response(self, words: bytes) -> None:
        """Answer the complete requests before, then send these bytes and close."""
        self._final_response = words
        self._stop_head_timer()
        if self._reads_body and self.pipeline and self.pipeline[0][0] is self.cycle:  # these bytes are its answer
            self.pipeline.popleft()
            assert self._answering is not None, "an answer is owed"
            self.cycle = self.pipeline[0][0] if self.pipeline else self._answering
        self._reads_body = False
        self.flow.resume_reading()  # to notice a disconnect

    def _set_leniencies(self) -> None:
        """Let the parser accept bytes after a closing request, as uvicorn does, and spaces after chunk sizes."""
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True, lenient_spaces_after_chunk_size=True)


async def _send_unframed(cycle: RequestResponseCycle, send: Any, message: Message) -> None:
    """Send to an HTTP/1.0 client, which has no chunks: without a length, the end of the connection ends the content."""
    if message["type"] == "http.response.start":
        if not any(name.lower() == b"content-length" for name, _ in message.get("headers", ())):
            cycle.chunked_encoding = False
    elif cycle.chunked_encoding is False and not cycle.expected_content_length:
        cycle.expected_content_length = len(message.get("body", b""))
    await send(message)

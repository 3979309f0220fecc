"""Reading of request bodies: media type, content coding, size and timeout.

A body must be JSON in UTF-8 and declare it (RFC 9110, 8.3; RFC 8259, 8.1). Compressed bodies (Content-Encoding;
RFC 9110, 8.4) are decoded while they arrive:

    body as sent ─► counted ─► last coding undone ─► … ─► first coding undone ─► decoded body
                    at most max_body_bytes at each arrow, or 413 before more is read

A client that never ends its body costs no more than its bytes, and all such clients together at most a fixed number
of bytes. When that number is exceeded, the oldest body with at least its share is dropped. A client that sends
promptly is never affected; a client that keeps many bodies open is affected repeatedly.
"""

from __future__ import annotations

import asyncio
import email.message
import importlib
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.datastructures import Headers

from twostroke.api.answering import Message, Receive
from twostroke.api.http_errors import HTTPError

CLOSE = {"connection": "close"}


@dataclass(eq=False, slots=True)
class _Body:
    """Body that has not arrived completely."""

    timeout: asyncio.Timeout
    num_bytes: int = 0
    is_given_up: bool = False

    def give_up(self) -> None:
        """Wake the reader, which then answers 503."""
        self.is_given_up = True
        if not self.timeout.expired():
            self.timeout.reschedule(asyncio.get_running_loop().time())


class UnfinishedBodies:
    """Set of bodies that have arrived in part.

    Args:
        max_bytes: limit for all bodies together.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        """Bytes of the bodies that are still being read."""
        self._bodies: dict[_Body, None] = {}
        """Bodies in order of arrival."""

    def begin(self, timeout: asyncio.Timeout) -> _Body:
        """Add a body; `timeout` is the timeout of its reading."""
        body = _Body(timeout)
        self._bodies[body] = None
        return body

    def grow(self, body: _Body, num_bytes: int) -> None:
        """Count bytes that arrived, and drop bodies while the limit is exceeded."""
        if body.is_given_up:
            return
        body.num_bytes += num_bytes
        self.num_bytes += num_bytes
        while self.num_bytes > self.max_bytes:
            first = next(each for each in self._bodies if each.num_bytes * len(self._bodies) >= self.num_bytes)
            self.end(first)
            first.give_up()

    def end(self, body: _Body) -> None:
        """Remove a body that is complete or no longer read."""
        if body in self._bodies:
            del self._bodies[body]
            self.num_bytes -= body.num_bytes


class BodyReader:
    """Reader of request bodies.

    Args:
        max_bytes: limit for one body.
        timeout_s: seconds that a body may take after its headers.
        max_unfinished_bytes: limit for all bodies that have not arrived completely.
    """

    def __init__(self, max_bytes: int, timeout_s: float, max_unfinished_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._unfinished = UnfinishedBodies(max_unfinished_bytes)

    async def read(self, headers: Headers, receive: Receive) -> bytes:
        """Return the whole body.

        Raises:
            HTTPError: 413, too large; 408, timed out; 400, the client disconnected; 503, dropped for lack of room,
            or the
                server is shutting down.
        """
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._max_bytes:
            raise self._too_large()
        body: _Body | None = None
        content = bytearray()
        try:
            async with asyncio.timeout(self._timeout_s) as timeout:
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":  # an incomplete body may still parse, so refuse it
                        raise HTTPError(400, "the client disconnected before its body had arrived.", headers=CLOSE)
                    chunk: bytes = message.get("body", b"")
                    if len(content) + len(chunk) > self._max_bytes:
                        raise self._too_large()
                    if not message.get("more_body", False):
                        if not content:
                            return chunk
                        content += chunk
                        return bytes(content)
                    body = body or self._unfinished.begin(timeout)
                    content += chunk
                    self._unfinished.grow(body, len(chunk))
        except TimeoutError:
            raise self._not_arrived(body) from None
        except asyncio.CancelledError:  # the server is ending and would not answer this request
            message = "the server is shutting down before the body has arrived."
            raise HTTPError(503, message, kind="service_unavailable_error", headers=CLOSE) from None
        finally:
            if body is not None:
                self._unfinished.end(body)

    def _not_arrived(self, body: _Body | None) -> HTTPError:
        if body is None or not body.is_given_up:
            message = f"the body did not arrive within {self._timeout_s:g} s (--body-timeout-s)."
            return HTTPError(408, message, code="timeout", headers=CLOSE)
        message = (
            f"incomplete bodies hold more than {self._unfinished.max_bytes:,} bytes "
            "(--max-unfinished-body-bytes), so this one was dropped. Send it again without pauses."
        )
        # keep the connection: closing it with unread bytes resets it, and the answer is lost
        headers = {"retry-after": "1"}
        return HTTPError(503, message, kind="service_unavailable_error", code="overloaded", headers=headers)

    def _too_large(self) -> HTTPError:
        most = self._max_bytes
        message = f"the body is larger than {most:,} bytes; shorten it, or start the server with --max-body-bytes."
        return HTTPError(413, message, code="request_too_large")


JSON_PATHS = frozenset(
    {
        *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings"),
        *("/v1/messages", "/v1/messages/count_tokens", "/tokenize", "/detokenize", "/pools"),
        *("/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/show"),
    }
)
"""Paths whose POST takes a body with a schema."""
UTF8 = frozenset({"utf-8", "utf8", "us-ascii", "ascii"})
_REMEDY = "Send it with 'content-type: application/json'."


def check_media_type(method: str, path: str, headers: Headers) -> None:
    """Refuse a body that is not declared as JSON.

    A page of another site can send a body without a preflight (a simple request) only in types other than JSON.

    Raises:
        HTTPError: 415, another media type, or another character set than UTF-8.
    """
    given = headers.get("content-type")
    if given == "application/json":  # the common case
        return
    if method == "POST" and path in JSON_PATHS and has_body(headers):
        _check_type(given)


def _check_type(given: str | None) -> None:
    if not given:
        raise _unsupported("the body has no content type; it must be JSON.")
    field = email.message.Message()
    field["content-type"] = given
    subtype = field.get_content_subtype()
    if field.get_content_maintype() != "application" or not (subtype == "json" or subtype.endswith("+json")):
        raise _unsupported(f"the body is {given[:64]!r}; it must be JSON.")
    charset = field.get_content_charset("utf-8")
    if charset not in UTF8:
        raise _unsupported(f"the body is JSON in {charset[:64]!r}; it must be in UTF-8.")


def has_body(headers: Headers) -> bool:
    """Return whether a request has a body, according to its headers."""
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


def _unsupported(what: str) -> HTTPError:
    accepted = {"accept": "application/json"}
    return HTTPError(415, f"{what} {_REMEDY}", code="unsupported_media_type", headers=accepted)


MAX_CODINGS = 2
"""Nested codings of one body."""
MAX_PARTS = 64
"""Members of gzip, or frames of zstd, in one body. Empty ones take time and yield no bytes."""
MAX_LEAD_BYTES = 2**20
"""Bytes by which the body between two codings may exceed the content decoded so far.

A decoder keeps its last output, which nothing else limits: a skippable zstd frame can be megabytes without content.
Regular encoders lead by a block of at most 128 KiB.
"""
ZSTD_WINDOW_LOG = 23
"""Window log of 8 MiB: the most memory of a zstd decoder, and the largest window that a sender may use (RFC 9659)."""
GZIP_BITS = 16 + zlib.MAX_WBITS
_ZLIB_METHOD = 8
_NOT_AS_SAID = "Encode it as its content-encoding header says, or leave the header out."


class _Part(Protocol):
    """Decoder of one member, frame or stream: the interface of zlib's and zstd's decoders."""

    @property
    def eof(self) -> bool:
        """Whether the end of the stream has been reached."""
        ...

    @property
    def unused_data(self) -> bytes:
        """Bytes after the end of the stream."""
        ...

    def decompress(self, data: bytes, max_length: int, /) -> bytes:
        """Decode `data`; return at most `max_length` bytes."""
        ...


class _Deflate:
    """Decoder of 'deflate', in the zlib format or without its header, as some clients send it."""

    def __init__(self) -> None:
        self._held = b""
        """Bytes that arrived before the format was known."""
        self._part: _Part | None = None

    @property
    def eof(self) -> bool:
        return self._part is not None and self._part.eof

    @property
    def unused_data(self) -> bytes:
        return b"" if self._part is None else self._part.unused_data

    def decompress(self, data: bytes, max_length: int, /) -> bytes:
        if self._part is None:
            data = self._held + data
            if len(data) < 2:
                self._held = data
                return b""
            has_header = data[0] & 15 == _ZLIB_METHOD and (data[0] * 256 + data[1]) % 31 == 0
            self._part = zlib.decompressobj(zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)
        return self._part.decompress(data, max_length)


def _zstd_module() -> Any:
    """Return the zstd module of the standard library or its backport; None if the platform has neither."""
    try:
        return importlib.import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
    except ImportError:
        return None


def _known_codings() -> Mapping[str, Callable[[], _Part]]:
    """Return factories of decoders, by the name of the coding."""
    known: dict[str, Callable[[], _Part]] = {
        "gzip": lambda: zlib.decompressobj(GZIP_BITS),
        "x-gzip": lambda: zlib.decompressobj(GZIP_BITS),
        "deflate": _Deflate,
    }
    zstd = _zstd_module()
    if zstd is not None:
        options = {zstd.DecompressionParameter.window_log_max: ZSTD_WINDOW_LOG}
        known["zstd"] = lambda: zstd.ZstdDecompressor(options=options)
    return known


CODINGS = _known_codings()
ACCEPTED = ", ".join(name for name in CODINGS if name != "x-gzip")
"""Value of the Accept-Encoding header of a refusal."""


class Decoder:
    """Decoder of one coding of a body that arrives in pieces.

    Args:
        coding: one of CODINGS.
        most: maximum number of decoded bytes.
    """

    def __init__(self, coding: str, most: int) -> None:
        self._coding = coding
        self._most = most
        self._num_left = most
        self._part = CODINGS[coding]()
        self._num_parts = 1

    @property
    def num_given(self) -> int:
        """Bytes decoded so far."""
        return self._most - self._num_left

    def feed(self, data: bytes) -> bytes:
        """Return the decoded bytes of the next piece.

        Raises:
            HTTPError: 413, too many bytes; 400, not valid in this coding.
        """
        pieces: list[bytes] = []
        while data:
            if self._part.eof:
                self._begin_part()
            try:
                piece = self._part.decompress(data, self._num_left + 1)
            except Exception as error:  # zlib and zstd have different exception classes
                raise self._wrong(f"is not valid {self._coding}") from error
            if len(piece) > self._num_left:
                raise _too_large(self._most)
            self._num_left -= len(piece)
            pieces.append(piece)
            data = self._part.unused_data if self._part.eof else b""
        return b"".join(pieces)

    def finish(self) -> None:
        """Check that the data is complete.

        Raises:
            HTTPError: 400, it is not.
        """
        if not self._part.eof:
            raise self._wrong(f"ends within its {self._coding} data")

    def _begin_part(self) -> None:
        """Begin the next member or frame; a body may have several in sequence."""
        if self._coding == "deflate":
            raise self._wrong("continues after the end of its deflate data")
        if self._num_parts == MAX_PARTS:
            raise self._wrong(f"has more than {MAX_PARTS} parts of {self._coding}")
        self._num_parts += 1
        self._part = CODINGS[self._coding]()

    def _wrong(self, what: str) -> HTTPError:
        return HTTPError(400, f"the body {what}. {_NOT_AS_SAID}", code="invalid_content_encoding")


def decoded(receive: Receive, headers: Headers, most: int) -> Receive:
    """Return a `receive` that yields the decoded body; `receive` itself if the body has no coding.

    Args:
        receive: yields the body as sent.
        headers: headers of the request.
        most: limit in bytes, for the body as sent and as decoded.

    Raises:
        HTTPError: 415, unknown coding; the returned function raises 400 and 413 like Decoder.
    """
    codings = _codings(headers) if has_body(headers) else ()
    if not codings:
        return receive
    decoders = [Decoder(coding, most) for coding in reversed(codings)]
    num_bytes = 0

    async def receive_decoded() -> Message:
        nonlocal num_bytes
        message = await receive()
        if message["type"] != "http.request":
            return message
        body: bytes = message.get("body", b"")
        num_bytes += len(body)
        if num_bytes > most:  # the only limit on parts without content
            raise _too_large(most)
        for decoder in decoders:
            body = decoder.feed(body)
        if max(decoder.num_given for decoder in decoders) > decoders[-1].num_given + MAX_LEAD_BYTES:
            lead = f"is more than {MAX_LEAD_BYTES:,} bytes longer than its content"
            told = f"the body between its two codings {lead}. {_NOT_AS_SAID}"
            raise HTTPError(400, told, code="invalid_content_encoding")
        if num_bytes and not message.get("more_body", False):
            for decoder in decoders:
                decoder.finish()
        return {**message, "body": body}

    return receive_decoded


def _codings(headers: Headers) -> Sequence[str]:
    """Return the codings of a body in the order in which they were applied."""
    field = ",".join(headers.getlist("content-encoding"))
    names = [name for name in (part.strip().lower() for part in field.split(",")) if name not in ("", "identity")]
    unknown = [name for name in names if name not in CODINGS]
    if unknown or len(names) > MAX_CODINGS:
        told = f"unknown coding {unknown[0][:64]!r}" if unknown else f"it has more than {MAX_CODINGS} codings"
        message = f"the body cannot be decoded: {told}; known: {ACCEPTED}. Use one of these, or none."
        accepted = {"accept-encoding": ACCEPTED}
        raise HTTPError(415, message, code="unsupported_content_encoding", headers=accepted)
    return names


def _too_large(most: int) -> HTTPError:
    message = (
        f"the body has more than {most:,} bytes once it is decoded; shorten it, or start the server with "
        "--max-body-bytes."
    )
    return HTTPError(413, message, code="request_too_large")

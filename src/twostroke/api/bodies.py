"""Bodies of requests on their way in: their type, their coding, how large one may be, and how long it may take.

A body is JSON in UTF-8, and said to be so (RFC 9110, 8.3; RFC 8259, 8.1). Compressed ones (Content-Encoding; RFC 9110,
8.4) are decoded while they arrive:

    body as sent ─► counted ─► last coding undone ─► … ─► first coding undone ─► body as meant
                    at most max_body_bytes at each arrow, or 413 before more is read

A client that never ends its body costs no more than its bytes, and all such clients together no more than a fixed
number of them: when there is no room left, the body that came first of those with more than their share is given up.
Whoever sends at once is never the one; who keeps many bodies open is, again and again.
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


JSON_PATHS = frozenset(
    {
        *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings"),
        *("/v1/messages", "/v1/messages/count_tokens", "/tokenize", "/detokenize", "/pools"),
    }
)
"""Paths that take a body with a schema, by POST."""
UTF8 = frozenset({"utf-8", "utf8", "us-ascii", "ascii"})
_REMEDY = "Send it with 'content-type: application/json'."


def check_media_type(method: str, path: str, headers: Headers) -> None:
    """Refuse a body that is not JSON by its own words.

    A page of another site can send a body without asking (a simple request) only in other types than JSON.

    Raises:
        HTTPError: 415, it is of another type, or in another character set than UTF-8.
    """
    given = headers.get("content-type")
    if given == "application/json":  # what nearly everybody sends
        return
    if method == "POST" and path in JSON_PATHS and has_body(headers):
        _check_type(given)


def _check_type(given: str | None) -> None:
    if not given:
        raise _unsupported("the body has no content type, and has to be JSON.")
    field = email.message.Message()
    field["content-type"] = given
    subtype = field.get_content_subtype()
    if field.get_content_maintype() != "application" or not (subtype == "json" or subtype.endswith("+json")):
        raise _unsupported(f"the body is {given[:64]!r}, and has to be JSON.")
    charset = field.get_content_charset("utf-8")
    if charset not in UTF8:
        raise _unsupported(f"the body is JSON in {charset[:64]!r}, and JSON is in UTF-8.")


def has_body(headers: Headers) -> bool:
    """Return whether a request has a body, as far as its head says."""
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


def _unsupported(what: str) -> HTTPError:
    accepted = {"accept": "application/json"}
    return HTTPError(415, f"{what} {_REMEDY}", code="unsupported_media_type", headers=accepted)


MAX_CODINGS = 2
"""Codings of one body, one upon the other."""
MAX_PARTS = 64
"""Members of gzip, or frames of zstd, in one body. Empty ones take time and give nothing."""
MAX_LEAD_BYTES = 2**20
"""What a body may be longer between two codings than its content so far. A decoder keeps what it gave last, and nobody
counts that: a zstd frame to be skipped is megabytes of no content. Codings lead by a block of 128 KiB at most."""
ZSTD_WINDOW_LOG = 23
"""8 MiB: the most memory of a zstd decoder, and the largest window that a sender may use (RFC 9659)."""
GZIP_BITS = 16 + zlib.MAX_WBITS
_ZLIB_METHOD = 8
_NOT_AS_SAID = "Send it as its content-encoding says, or without the header."


class _Part(Protocol):
    """Decoder of one member, frame or stream, as zlib and zstd have it."""

    @property
    def eof(self) -> bool:
        """Whether its end has come."""
        ...

    @property
    def unused_data(self) -> bytes:
        """Bytes that follow the end."""
        ...

    def decompress(self, data: bytes, max_length: int, /) -> bytes:
        """Decode `data`; return at most `max_length` bytes."""
        ...


class _Deflate:
    """Decoder of 'deflate': the zlib format, or without its header, as some clients send it."""

    def __init__(self) -> None:
        self._held = b""
        """Bytes that came while it was not certain which of the two it is."""
        self._part: _Part | None = None

    @property
    def eof(self) -> bool:
        """Whether its end has come."""
        return self._part is not None and self._part.eof

    @property
    def unused_data(self) -> bytes:
        """Bytes that follow the end."""
        return b"" if self._part is None else self._part.unused_data

    def decompress(self, data: bytes, max_length: int, /) -> bytes:
        """Decode `data`; return at most `max_length` bytes."""
        if self._part is None:
            data = self._held + data
            if len(data) < 2:
                self._held = data
                return b""
            has_header = data[0] & 15 == _ZLIB_METHOD and (data[0] * 256 + data[1]) % 31 == 0
            self._part = zlib.decompressobj(zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)
        return self._part.decompress(data, max_length)


def _zstd_module() -> Any:
    """Return the module of zstd: the standard library's, or its backport; None on a platform that has neither."""
    try:
        return importlib.import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
    except ImportError:
        return None


def _known_codings() -> Mapping[str, Callable[[], _Part]]:
    """Return what makes a decoder, by the name of the coding."""
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
"""For the header Accept-Encoding of a refusal."""


class Decoder:
    """Undoes one coding of a body that arrives in pieces.

    Args:
        coding: one of CODINGS.
        most: bytes that it may give.
    """

    def __init__(self, coding: str, most: int) -> None:
        self._coding = coding
        self._most = most
        self._num_left = most
        self._part = CODINGS[coding]()
        self._num_parts = 1

    @property
    def num_given(self) -> int:
        """Bytes that it has given."""
        return self._most - self._num_left

    def feed(self, data: bytes) -> bytes:
        """Return what the next piece of the body means.

        Raises:
            HTTPError: 413, it is too much; 400, it is not in this coding.
        """
        pieces: list[bytes] = []
        while data:
            if self._part.eof:
                self._begin_part()
            try:
                piece = self._part.decompress(data, self._num_left + 1)
            except Exception as error:  # of zlib or zstd, which have a class each
                raise self._wrong(f"is not valid {self._coding}") from error
            if len(piece) > self._num_left:
                raise _too_large(self._most)
            self._num_left -= len(piece)
            pieces.append(piece)
            data = self._part.unused_data if self._part.eof else b""
        return b"".join(pieces)

    def finish(self) -> None:
        """Check that the end has come.

        Raises:
            HTTPError: 400, it has not.
        """
        if not self._part.eof:
            raise self._wrong(f"ends within its {self._coding} data")

    def _begin_part(self) -> None:
        """Begin the next member or frame; a body may have several, one behind the other."""
        if self._coding == "deflate":
            raise self._wrong("goes on behind the end of its deflate data")
        if self._num_parts == MAX_PARTS:
            raise self._wrong(f"has more than {MAX_PARTS} parts of {self._coding}")
        self._num_parts += 1
        self._part = CODINGS[self._coding]()

    def _wrong(self, what: str) -> HTTPError:
        return HTTPError(400, f"the body {what}. {_NOT_AS_SAID}", code="invalid_content_encoding")


def decoded(receive: Receive, headers: Headers, most: int) -> Receive:
    """Return a `receive` that gives the body as it is meant; the same one where it is sent as it is.

    Args:
        receive: gives the body as it is sent.
        headers: of the request.
        most: bytes of the body, as sent and decoded.

    Raises:
        HTTPError: 415, a coding is not known; what it gives raises 400 and 413, see Decoder.
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
        if num_bytes > most:  # parts without content count here alone
            raise _too_large(most)
        for decoder in decoders:
            body = decoder.feed(body)
        if max(decoder.num_given for decoder in decoders) > decoders[-1].num_given + MAX_LEAD_BYTES:
            lead = f"is over {MAX_LEAD_BYTES:,} bytes longer than its content"
            told = f"between its codings the body {lead}. {_NOT_AS_SAID}"
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
        told = f"{unknown[0][:64]!r} is not known" if unknown else f"it has more than {MAX_CODINGS} codings"
        message = f"the body cannot be decoded: {told}; there are {ACCEPTED}. Send it in one of them, or as it is."
        accepted = {"accept-encoding": ACCEPTED}
        raise HTTPError(415, message, code="unsupported_content_encoding", headers=accepted)
    return names


def _too_large(most: int) -> HTTPError:
    message = (
        f"the body has more than {most:,} bytes once it is decoded; shorten it, or start the server with "
        "--max-body-bytes."
    )
    return HTTPError(413, message, code="request_too_large")

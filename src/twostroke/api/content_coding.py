"""Compressed request bodies (Content-Encoding; RFC 9110, 8.4), decoded while they arrive.

body as sent ─► counted ─► last coding undone ─► … ─► first coding undone ─► body as meant
                at most max_body_bytes at each arrow, or 413 before more is read
"""

from __future__ import annotations

import importlib
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from starlette.datastructures import Headers

from twostroke.api.http_errors import HTTPError
from twostroke.api.media_type import has_body
from twostroke.api.sse import Message, Receive

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

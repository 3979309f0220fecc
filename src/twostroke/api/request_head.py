"""Checks of a request's head by RFC 9110 and 9112, beyond those of the parser. This module does no I/O."""

from __future__ import annotations

import re
from collections.abc import Sequence

import httptools

from twostroke.api.http_errors import HTTPError
from twostroke.plain_words import reason_of

Headers = Sequence[tuple[bytes, bytes]]
"""Headers of a request: lower-case names, and values."""

UNIQUE_HEADERS = frozenset(
    {
        *(b"content-length", b"transfer-encoding", b"content-type"),
        *(b"host", b"origin", b"authorization", b"x-api-key", b"x-request-timeout"),
    }
)
"""Headers that may appear once only, because two readers may choose different values."""
VERSIONS = ("1.0", "1.1")
CONTINUE = b"100-continue"
_HOST = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[\w.~!$&'()*+,;=%-]*)(?::([0-9]*))?", re.ASCII)
MAX_PORT = 65535
_ABSOLUTE = re.compile(rb"https?://([^/?#]*)(.*)", re.IGNORECASE | re.DOTALL)
_REQUEST_LINE = re.compile(rb"(?:\r\n)*[!#$%&'*+.^_`|~0-9A-Za-z-]+ [^\s]+ HTTP/(\d\.\d)\r\n")


def check_head(method: bytes, version: str, target: bytes, headers: Headers) -> None:
    """Refuse a head that is ambiguous, or that asks for something unsupported.

    Args:
        method: method of the request.
        version: HTTP version, such as "1.1".
        target: request target as sent.
        headers: headers of the request.

    Raises:
        HTTPError: with the status that the RFCs name.
    """
    if version not in VERSIONS:
        raise _unknown_version(version)
    if method == b"CONNECT":
        raise HTTPError(501, "CONNECT is not implemented; this server is not a proxy.", code="not_implemented")
    if not (target.startswith(b"/") or _ABSOLUTE.fullmatch(target) or (target == b"*" and method == b"OPTIONS")):
        raise HTTPError(400, "the request target is neither a path nor an http URL.")
    if b"#" in target:  # clients do not send fragments, and readers disagree about them
        raise HTTPError(400, "the request target has a fragment (#); send it as %23, or leave it out.")
    names = [name for name, _ in headers]
    twice = [name for name in UNIQUE_HEADERS if names.count(name) > 1]
    if twice or (b"content-length" in names and b"transfer-encoding" in names):
        told = ", ".join(name.decode() for name in sorted(twice)) or "content-length beside transfer-encoding"
        raise HTTPError(400, f"the request has contradicting headers ({told}).")
    given = dict(headers)
    _check_host(version, given.get(b"host"))
    _, named = origin_form(target)
    if named is not None and (not named or not _is_host(named)):
        raise HTTPError(
            400, f"the request target names no host ({named[:64].decode('latin-1')!r}); send http://HOST/PATH."
        )
    _check_coding(version, given.get(b"transfer-encoding"))
    expected = {each for name, value in headers if name == b"expect" for each in _members(value)}
    if version == "1.1" and not expected <= {CONTINUE}:
        raise HTTPError(417, "unknown expectation; only 'expect: 100-continue' is supported.")


def expects_continue(headers: Headers) -> bool:
    """Return whether the client waits for "100 Continue" before it sends its body.

    >>> expects_continue([(b"expect", b", 100-Continue")]), expects_continue([(b"expect", b"")])
    (True, False)
    """
    return any(CONTINUE in _members(value) for name, value in headers if name == b"expect")


def origin_form(target: bytes) -> tuple[bytes, bytes | None]:
    """Return the path with its query, and the host of an absolute URL (RFC 9112, 3.2.2).

    >>> origin_form(b"/health"), origin_form(b"http://x:80?a=b")
    ((b'/health', None), (b'/?a=b', b'x:80'))
    >>> origin_form(b"//v1/models")
    (b'/%2Fv1/models', None)
    """
    found = _ABSOLUTE.fullmatch(target)
    path = target if found is None else found[2]
    if path.startswith(b"//"):  # parsers would read the second segment as a host
        path = b"/%2F" + path[2:]
    return (path if path.startswith(b"/") else b"/" + path), None if found is None else found[1]


def framing_of(headers: Headers) -> bytes:
    """Return the header that defines the end of the body, as sent; empty for a request without a body.

    >>> framing_of([(b"host", b"x"), (b"content-length", b"3")]).strip()
    b'content-length: 3'
    """
    names = (b"content-length", b"transfer-encoding")
    return next((b"%b: %b\r\n" % header for header in headers if header[0] in names and header[1] != b"0"), b"")


def unparsed_request_error(data: bytes, *, is_method: bool) -> HTTPError | None:
    """Return the error for bytes that the parser refused; None if they are not an HTTP request line.

    Args:
        data: the first bytes of a request.
        is_method: whether the parser did not know the method.
    """
    line = _REQUEST_LINE.match(data)
    if line is None:
        return None
    if line[1].decode() not in VERSIONS:
        return _unknown_version(line[1].decode())
    if not is_method:
        return None
    return HTTPError(501, "the method of the request is not implemented.", code="not_implemented")


def bad_request_error(error: BaseException | None) -> HTTPError:
    """Return the error for bytes that violate HTTP.

    Args:
        error: the parser's exception.
    """
    match error:
        case None | httptools.HttpParserCallbackError():  # its text would name one of our functions
            told = ""
        case _:
            told = f": {reason_of(error)}"
    return HTTPError(400, f"not a valid HTTP request{told}.")


def _check_host(version: str, host: bytes | None) -> None:
    if host is None and version == "1.1":
        raise HTTPError(400, "the request has no 'host' header, which HTTP/1.1 needs.")
    if host is not None and not _is_host(host):
        told = host[:64].decode("latin-1")
        raise HTTPError(
            400, f"the header host={told!r} is not a host; send a name, or NAME:PORT with a port up to {MAX_PORT}."
        )


def _members(value: bytes) -> list[bytes]:
    """Return the members of a list header in lower case, without empty ones (RFC 9110, 5.6.1)."""
    return [member for part in value.split(b",") if (member := part.strip().lower())]


def _is_host(text: bytes) -> bool:
    found = _HOST.fullmatch(text)
    if found is None:
        return False
    port = (found[2] or b"").lstrip(b"0")
    return len(port) <= 5 and int(port or b"0") <= MAX_PORT


def _check_coding(version: str, coding: bytes | None) -> None:
    if coding is None:
        return
    if version == "1.0":
        raise HTTPError(400, "HTTP/1.0 has no 'transfer-encoding'; send 'content-length'.")
    codings = _members(coding)
    if codings.count(b"chunked") > 1 or codings[-1:] != [b"chunked"]:
        raise HTTPError(400, "the last transfer coding is not 'chunked', so the end of the body is unknown.")
    if len(codings) > 1:
        raise HTTPError(501, "the only supported transfer coding is 'chunked'.", code="not_implemented")


def _unknown_version(version: str) -> HTTPError:
    return HTTPError(505, f"HTTP/{version} is not supported; send HTTP/1.1.")

"""What a body may be: JSON in UTF-8, and said to be so (RFC 9110, 8.3; RFC 8259, 8.1)."""

from __future__ import annotations

import email.message

from starlette.datastructures import Headers

from twostroke.api.http_errors import HTTPError

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
    if method != "POST" or path not in JSON_PATHS or not has_body(headers):
        return
    given = headers.get("content-type")
    if given == "application/json":  # what nearly everybody sends
        return
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

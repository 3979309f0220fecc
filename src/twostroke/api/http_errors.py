"""Error responses in OpenAI's format, and in Anthropic's on the routes of its API."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from twostroke.errors import (
    ClientError,
    EngineError,
    EngineUnavailable,
    InvalidParameter,
    InvalidPrompt,
    Overloaded,
    UnknownParameter,
    shown,
)
from twostroke.log import get_logger

log = get_logger(__name__)


class HTTPError(Exception):
    """Refusal with an HTTP status.

    Args:
        status: HTTP status.
        message: text for the client: the value, the limit, the remedy.
        kind: OpenAI's `type`.
        code: OpenAI's machine-readable `code`.
        param: name of the offending field.
        headers: headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.answer = ErrorAnswer(status, _body(message, kind, code, param), dict(headers or {}))


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """Status, body and headers of a failure."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict[str, str])


RESTART_RETRY_S = 3
"""Seconds in Retry-After while the engine restarts."""


def error_body(error: Exception) -> ErrorAnswer:
    """Return the response to an error; internal errors are logged and not described to the client."""
    if isinstance(error, HTTPError):
        return error.answer
    if isinstance(error, ClientError):
        name = error.name if isinstance(error, InvalidParameter | UnknownParameter) else None
        code = "context_length_exceeded" if isinstance(error, InvalidPrompt) and "max_model_len" in str(error) else None
        return ErrorAnswer(400, _body(str(error), "invalid_request_error", code, name))
    if isinstance(error, Overloaded):
        body = _body(str(error), "service_unavailable_error", "overloaded", None)
        return ErrorAnswer(503, body, {"retry-after": str(error.retry_after_s)})
    if isinstance(error, EngineUnavailable):
        body = _body(str(error), "service_unavailable_error", "engine_unavailable", None)
        return ErrorAnswer(503, body, {"retry-after": str(RESTART_RETRY_S)} if error.may_return else {})
    if isinstance(error, EngineError):
        return ErrorAnswer(500, _body(str(error), "server_error", "engine_error", None))
    if isinstance(error, RecursionError):  # caused by a deeply nested request
        return nested_too_deeply().answer
    log.error("internal error", exc_info=error)
    return ErrorAnswer(500, _body("an internal error; see the server's log.", "server_error", None, None))


def nested_too_deeply() -> HTTPError:
    """Return the refusal of a body whose lists and objects are nested too deeply."""
    return HTTPError(400, "the body is nested too deeply; send fewer lists within lists.", code="invalid_json")


ANTHROPIC_PATHS = ("/v1/messages",)
"""Prefixes of the paths whose clients read Anthropic's error format."""
OLLAMA_PATHS = ("/api/",)
"""Prefixes of the paths whose clients read Ollama's error format."""
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def in_api_format(path: str, answer: ErrorAnswer) -> ErrorAnswer:
    """Return the error in the format that clients of this path read."""
    if path.startswith(OLLAMA_PATHS):
        return ollama_error(answer)
    return anthropic_error(answer) if path.startswith(ANTHROPIC_PATHS) else answer


def ollama_error(answer: ErrorAnswer) -> ErrorAnswer:
    """Return the error in Ollama's format: the message alone."""
    return ErrorAnswer(answer.status, {"error": answer.body["error"]["message"]}, answer.headers)


def anthropic_error(answer: ErrorAnswer) -> ErrorAnswer:
    """Return the error in Anthropic's format; its type follows from the status."""
    other = "invalid_request_error" if answer.status < 500 else "api_error"
    kind = _ANTHROPIC_TYPES.get(answer.status, other)
    body = {"type": "error", "error": {"type": kind, "message": answer.body["error"]["message"]}}
    return ErrorAnswer(answer.status, body, answer.headers)


def validation_answer(problems: Sequence[Mapping[str, Any]]) -> ErrorAnswer:
    """Return the response to a body that does not match the schema: the first wrong field, in one sentence."""
    if any(problem["type"] == "json_invalid" for problem in problems):
        reason = problems[0].get("ctx", {}).get("error", "")
        message = f"the body is not valid JSON ({reason}, at character {problems[0]['loc'][-1]})."
        return ErrorAnswer(400, _body(message, "invalid_request_error", "invalid_json", None))
    first = min(problems, key=_rank, default={})
    place = [part for part in first.get("loc", ()) if part != "body"]
    name = ".".join(str(part) for part in place if not (isinstance(part, str) and _KIND.fullmatch(part)))
    value = first.get("input")
    is_missing = first.get("type") == "missing"  # the input is then the enclosing object
    told = f": {name}" if name and is_missing else f": {name}={shown(value)}" if name else ""
    message = f"the request is not valid{told}: {_words(first) if place else _body_problem_text(first)}."
    top = str(place[0]) if place else None
    return ErrorAnswer(400, _body(message, "invalid_request_error", None, top))


_KIND = re.compile(r".*\[.*|[A-Z]\w*|str|int|float|bool|dict|list|none")
"""Parts of a location that are type names; pydantic adds them where a field may have several types."""


def _rank(problem: Mapping[str, Any]) -> tuple[int, bool]:
    """Return the sort key of a problem: deepest first, then problems within the type that was sent."""
    return -len(problem.get("loc", ())), str(problem.get("type", "")).endswith("_type")


_OBJECTS = ("model_type", "model_attributes_type", "dataclass_type", "dict_type", "mapping_type")


_INSTEAD = {
    "custom_tool_call": ". Send a 'function_call' with the input as text in its arguments",
    "custom_tool_call_output": ". Send a 'function_call_output'",
}
"""Hints added to the message for unsupported types."""


def _words(problem: Mapping[str, Any]) -> str:
    """Return the problem in words, without class names."""
    if problem.get("type") in _OBJECTS:
        return "Input should be an object"
    if problem.get("type") == "union_tag_invalid":
        about = problem["ctx"]
        return (
            f"type {shown(about['tag'])} is not known; known: {about['expected_tags']}{_INSTEAD.get(about['tag'], '')}"
        )
    words = str(problem.get("msg", "see the schema"))
    return words.removeprefix("Value error, ").removeprefix("Assertion failed, ").rstrip(".")


def _body_problem_text(problem: Mapping[str, Any]) -> str:
    """Return a problem of the whole body in words."""
    value = problem.get("input")
    if problem.get("type") == "missing":
        return "it has no body; send a JSON object"
    if problem.get("type") == "string_unicode":
        return f"the name of its field {shown(value)} has a lone surrogate"
    if isinstance(value, (str, bytes)):
        return f"the body is a string ({shown(value)}); it must be a JSON object"
    return _words(problem)


def _body(message: str, kind: str, code: str | None, param: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}

"""Published OpenAPI schema: FastAPI's description of the routes, plus the errors of the gate and the error handlers.

The statuses of a route follow from its properties, so a new route needs no description of its own:

    every route                  401 if keys are set (except liveness), 403, 500
    takes a body                 400, 404 (the model), 408, 413, 415, 503
    takes parameters             400, and 404 if they are in the path
    makes the engine work        429 and 503 with Retry-After
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from twostroke.api.gate import GENERATING_PATHS, OPEN_PATHS
from twostroke.api.http_errors import ANTHROPIC_PATHS, OLLAMA_PATHS

Described = dict[int | str, dict[str, Any]]
"""Responses of a route, by status."""
EVENTS: Described = {200: {"content": {"text/event-stream": {}}}}
"""Response with stream=true, in addition to JSON."""

LINES: Described = {200: {"content": {"application/x-ndjson": {}}}}
"""Response of Ollama's API unless stream is false, in addition to JSON."""

_ERROR: dict[str, Any] = {
    "title": "Error",
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string", "description": "The value, the limit, the remedy."},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "Name of the offending field."},
                "code": {"type": ["string", "null"], "description": "Machine-readable code."},
            },
        }
    },
}
_ANTHROPIC_ERROR: dict[str, Any] = {
    "title": "AnthropicError",
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
_OLLAMA_ERROR: dict[str, Any] = {
    "title": "OllamaError",
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "string", "description": "The value, the limit, the remedy."}},
}
_MEANINGS = {
    400: "The request cannot be served as it is.",
    401: "A valid API key is needed.",
    403: "The host name or origin is not allowed, or administration needs an admin key.",
    404: "Not found; the code says what.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body's content type is not JSON, or its content coding is unknown.",
    429: "The key has used up its quota; Retry-After says when to retry.",
    500: "Internal error, or the engine died meanwhile.",
    503: "Overloaded, or no engine is running; Retry-After says when to retry.",
}
_RETRY_AFTER = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}}}
_NOT_OURS = ("HTTPValidationError", "ValidationError")
"""Schemas of FastAPI's 422 response, which this server never sends."""


def published_schema(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI description of an application; it is made once."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemas = schema.setdefault("components", {}).setdefault("schemas", {})
        for name in _NOT_OURS:
            schemas.pop(name, None)
        schemas |= {"Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR, "OllamaError": _OLLAMA_ERROR}
        for path, operations in schema["paths"].items():
            for operation in operations.values():
                _describe_errors(path, operation)
        app.openapi_schema = schema
    return app.openapi_schema


def _describe_errors(path: str, operation: dict[str, Any]) -> None:
    responses: dict[str, Any] = operation["responses"]
    responses.pop("422", None)
    is_ollama = path.startswith(OLLAMA_PATHS)
    shape = "OllamaError" if is_ollama else "AnthropicError" if path.startswith(ANTHROPIC_PATHS) else "Error"
    for status in sorted(_statuses(path, operation)):
        described: dict[str, Any] = {
            "description": _MEANINGS[status],
            "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{shape}"}}},
        }
        if status in (429, 503):
            described["headers"] = _RETRY_AFTER
        responses.setdefault(str(status), described)  # a route's own description takes precedence


def _statuses(path: str, operation: dict[str, Any]) -> set[int]:
    statuses = {403, 500}
    if path not in OPEN_PATHS:
        statuses |= {401}
    if "requestBody" in operation:
        statuses |= {400, 404, 408, 413, 415, 503}
    places = {parameter["in"] for parameter in operation.get("parameters", ())}
    if places:
        statuses |= {400}
    if "path" in places:
        statuses |= {404}
    if path in GENERATING_PATHS:
        statuses |= {429, 503}
    return statuses

"""Layer between the gate and the routes: HEAD and OPTIONS for every path, and reading of bodies.

HEAD exists wherever GET does, and OPTIONS everywhere (RFC 9110, 9.1, 9.3.2, 9.3.7 and 15.5.6).

Routes whose body is an object of a known type check large bodies before anything is made of them. Reading a large body
takes several steps: its shape, its JSON, its fields. A thread runs them, and the event loop continues in between.
"""

from __future__ import annotations

import asyncio
import codecs
import json
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, get_type_hints

from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match

from twostroke.api.answering import Message, Receive, Send
from twostroke.api.http_errors import ErrorAnswer, HTTPError, nested_too_deeply, validation_answer
from twostroke.api.protocol.fields import WireObject
from twostroke.api.protocol.shapes import CHECKED_BYTES, check_shape
from twostroke.plain_words import reason_of

Handler = Callable[[Request], Coroutine[Any, Any, Response]]
_LARGE_BODY_THREADS = ThreadPoolExecutor(2, thread_name_prefix="twostroke-large-body")
"""Threads for large bodies, separate from those for long texts and chat templates."""


class RefusedBody(HTTPException):
    """Refusal of a body before its route. FastAPI passes on only exceptions of its own types."""

    def __init__(self, answer: ErrorAnswer) -> None:
        super().__init__(answer.status)
        self.answer = answer


class BodyRoute(APIRoute):
    """Route that takes a WireObject, or no body."""

    def get_route_handler(self) -> Handler:
        """Return FastAPI's handler, called with a request that reads its body as `_BodyRequest` does."""
        handle = super().get_route_handler()
        hints = get_type_hints(self.endpoint).values()
        kinds = [hint for hint in hints if isinstance(hint, type) and issubclass(hint, WireObject)]
        if not kinds:
            return handle
        (kind,) = kinds

        async def checked(request: Request) -> Response:
            return await handle(_BodyRequest(request, kind))

        return checked


class _BodyRequest(Request):
    """Request that keeps the parsed body instead of its bytes, because the answer may take long."""

    def __init__(self, request: Request, kind: type[WireObject]) -> None:
        super().__init__(request.scope, request.receive)
        self._kind = kind

    async def body(self) -> bytes:
        """Return the first byte: FastAPI only checks whether there is a body, and keeps the result until the answer."""
        return (await super().body())[:1]

    async def json(self) -> Any:
        """Return the body's value; for a large body the route's object. Raise RefusedBody if it cannot be one.

        FastAPI itself reports bodies that are not JSON, and wrong fields of small ones.
        """
        content = await super().body()
        self._body = b""
        try:
            if len(content) <= CHECKED_BYTES:
                return read_body(self._kind, content)
            return await asyncio.get_running_loop().run_in_executor(
                _LARGE_BODY_THREADS, read_object, self._kind, content
            )
        except HTTPError as error:
            raise RefusedBody(error.answer) from error


def read_body(kind: type[WireObject], content: bytes | bytearray) -> Any:
    """Return the value of a body. For a large one the shape is checked before anything is made of it.

    Raises:
        HTTPError: as in `check_shape`; or the body is nested too deeply, or is not text that JSON can be read from.
        json.JSONDecodeError: the body is not JSON.
    """
    try:
        if len(content) > CHECKED_BYTES:
            check_shape(kind, content.removeprefix(codecs.BOM_UTF8))
        return json.loads(content.decode("utf-8-sig"))  # from bytes, Python would also accept UTF-16
    except json.JSONDecodeError:
        raise
    except RecursionError as error:
        raise nested_too_deeply() from error
    except ValueError as error:  # a number with thousands of digits, or text in another encoding
        raise invalid_json_error(reason_of(error)) from error


def invalid_json_error(reason: str) -> HTTPError:
    """Return the refusal of a body that is not JSON."""
    return HTTPError(400, f"the body is not valid JSON ({reason}).", code="invalid_json")


def read_object(kind: type[WireObject], content: bytes) -> WireObject:
    """Return the body as an object of this type.

    Raises:
        RefusedBody: the body does not match the type.
        HTTPError: as in `read_body`.
        json.JSONDecodeError: the body is not JSON.
    """
    value = read_body(kind, content)
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise RefusedBody(validation_answer(error.errors())) from None  # a cause would keep its frames and the body


ROUTED = ("GET", "POST", "PUT", "PATCH", "DELETE")
"""Methods that a route may have."""
WHOLE_SERVER = "*"
"""Path of an OPTIONS request for the server as a whole."""


class Methods:
    """ASGI middleware that answers HEAD and OPTIONS.

    Args:
        app: application whose routes define the methods of a path.
    """

    def __init__(self, app: Starlette) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer HEAD and OPTIONS; pass all other requests on."""
        method = scope["method"] if scope["type"] == "http" else ""
        if method == "HEAD":
            await self._answer_head(scope, receive, send)
        elif method == "OPTIONS" and (allowed := allowed_methods(self._app, scope)):
            headers = [(b"allow", ", ".join(allowed).encode())]
            await send({"type": "http.response.start", "status": 204, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
        else:
            await self._app(scope, receive, send)

    async def _answer_head(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer as GET does, and end the response where its content would begin.

        The route then sees the client as disconnected, so that an endless stream ends.
        """
        as_get: Message = {**scope, "method": "GET"}
        has_head = False

        async def send_head(message: Message) -> None:
            nonlocal has_head
            if has_head:
                return
            has_head = True
            scope["route"] = as_get.get("route")
            await send(message)
            await send({"type": "http.response.body", "body": b""})

        await self._app(as_get, receive, send_head)


def allowed_methods(app: Starlette, scope: Message) -> list[str]:
    """Return the methods of a path for the Allow header; empty for an unknown path."""
    if scope["path"] == WHOLE_SERVER:
        return ["GET", "HEAD", "POST", "DELETE", "OPTIONS"]
    found = [method for method in ROUTED if _matches(app, {**scope, "method": method})]
    if "GET" in found:
        found.insert(1, "HEAD")
    return [*found, "OPTIONS"] if found else []


def _matches(app: Starlette, scope: Message) -> bool:
    return any(route.matches(scope)[0] is Match.FULL for route in app.routes)


def known_routes(routes: Sequence[BaseRoute]) -> Callable[[Message], str]:
    """Return a function that names the route of a request that reached none: refused, or of another method.

    Args:
        routes: all routes of the server. For a path of none of them, the function returns "other".
    """
    by_path = {path: path for route in routes if "{" not in (path := getattr(route, "path", "{"))}
    with_parts = [route for route in routes if "{" in getattr(route, "path", "")]

    def name_of(scope: Message) -> str:
        known = by_path.get(scope["path"])
        if known is not None:
            return known
        found = (getattr(route, "path", "other") for route in with_parts if route.matches(scope)[0] is not Match.NONE)
        return next(found, "other")

    return name_of

"""Routes whose body is an object of a known kind: large ones are looked through before anything is made of them.

Reading a large body takes several steps: its shape, its JSON, its fields. A thread takes them one after the other, and
the event loop has its turn between them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, get_type_hints

from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from twostroke.api.http_errors import ErrorAnswer, HTTPError, validation_answer
from twostroke.api.protocol.fields import WireObject
from twostroke.api.protocol.shapes import CHECKED_BYTES, read_body

Handler = Callable[[Request], Coroutine[Any, Any, Response]]
_READERS = ThreadPoolExecutor(2, thread_name_prefix="twostroke-large-body")
"""Large bodies wait for each other here, and not for long texts and chat templates."""


class RefusedBody(HTTPException):
    """A body that no route sees. (The framework passes its own exceptions on, and hides all others.)"""

    def __init__(self, answer: ErrorAnswer) -> None:
        super().__init__(answer.status)
        self.answer = answer


class BodyRoute(APIRoute):
    """A route that takes a WireObject, or no body at all."""

    def get_route_handler(self) -> Handler:
        """Return the framework's handler, which is given a request that reads its body as `_BodyRequest` does."""
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
    """Reads its body once, and keeps what it means instead of its bytes: the answer may take long."""

    def __init__(self, request: Request, kind: type[WireObject]) -> None:
        super().__init__(request.scope, request.receive)
        self._kind = kind

    async def body(self) -> bytes:
        """Return the beginning of the body: the framework asks whether there is one, and holds it until the answer."""
        return (await super().body())[:1]

    async def json(self) -> Any:
        """Return the body's value, of a large one what the route takes; raise RefusedBody where it cannot be one.

        The framework says where a body is no JSON, and what is wrong with the fields of a small one.
        """
        content = await super().body()
        self._body = b""
        try:
            if len(content) <= CHECKED_BYTES:
                return read_body(self._kind, content)
            return await asyncio.get_running_loop().run_in_executor(_READERS, read_object, self._kind, content)
        except HTTPError as error:
            raise RefusedBody(error.answer) from error


def read_object(kind: type[WireObject], content: bytes) -> WireObject:
    """Return the object that a body is.

    Raises:
        RefusedBody: it is no object of this kind.
        HTTPError: as `read_body`.
        json.JSONDecodeError: it is no JSON.
    """
    value = read_body(kind, content)
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise RefusedBody(validation_answer(error.errors())) from None  # with it, its frames and the body would stay

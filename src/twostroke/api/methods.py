"""Methods that every path has: HEAD where there is GET, and OPTIONS (RFC 9110, 9.1, 9.3.2, 9.3.7 and 15.5.6)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from starlette.applications import Starlette
from starlette.routing import BaseRoute, Match

from twostroke.api.sse import Message, Receive, Send

ROUTED = ("GET", "POST", "PUT", "PATCH", "DELETE")
"""Methods that a route may have."""
WHOLE_SERVER = "*"
"""Path of OPTIONS for no path in particular."""


class Methods:
    """ASGI middleware before the routes.

    Args:
        app: whose routes say which methods a path has.
    """

    def __init__(self, app: Starlette) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer HEAD and OPTIONS; hand on everything else."""
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
        """Answer as GET does, and end the answer where its content would begin.

        Whoever writes on sees that the client has left, as when a client of GET does: a stream without an end ends.
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
    """Return the methods of a path, for the header Allow; empty for a path that there is not."""
    if scope["path"] == WHOLE_SERVER:
        return ["GET", "HEAD", "POST", "DELETE", "OPTIONS"]
    found = [method for method in ROUTED if _matches(app, {**scope, "method": method})]
    if "GET" in found:
        found.insert(1, "HEAD")
    return [*found, "OPTIONS"] if found else []


def _matches(app: Starlette, scope: Message) -> bool:
    return any(route.matches(scope)[0] is Match.FULL for route in app.routes)


def known_routes(routes: Sequence[BaseRoute]) -> Callable[[Message], str]:
    """Return a function that names the route of a request which no route has seen: refused, or of another method.

    Args:
        routes: all routes of the server. The function returns "other" for a path of none of them.
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

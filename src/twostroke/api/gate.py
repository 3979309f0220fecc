"""The gate before every route: who asks, how much they send, and when their request was complete. Pure ASGI.

A request passes when it has a key (where keys are set), fits the limits, and has arrived as a whole; only then does a
route see it, so that nobody holds a route open by sending slowly. Requests for tokens then pass one at a time (Turns).

It also protects the server from web pages of others, which run in the browser of somebody who can reach it:

    another name    A page's own domain may resolve to this machine (DNS rebinding); the browser then takes the server
                    for the page's own. The Host header still has the page's name, so unknown names are refused.
    no permission   A browser sends a page's POST, with the password that it has stored for this server, before it
                    asks whether the page may read the answer. The Origin header says whose page it is.

A key in a header of the page's own making needs no check: a browser sends such headers only where CORS allows it.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import ipaddress
import re
import socket
import uuid
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec
from starlette.datastructures import Headers, MutableHeaders

from twostroke.api.admission import QueueAdmission, patience_s
from twostroke.api.answering import SERVER_SEND, WRITE_NOW, Message, Receive, Send
from twostroke.api.bodies import BodyReader, check_media_type, decoded
from twostroke.api.http_errors import ErrorAnswer, HTTPError, error_body, shaped_for
from twostroke.api.keys import Keys
from twostroke.api.observation import AnswerCounts
from twostroke.config.server import ServerConfig
from twostroke.errors import InvalidParameter, TwostrokeError, shown

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
"""They change nothing, and a browser lets no other page read their answers."""
_PRIVATE_SUFFIXES = (".local", ".internal", ".home.arpa")
"""Endings of names that nobody can register (RFC 6762, RFC 8375, and ICANN's reservation of .internal)."""
_PORT = re.compile(r":\d*$")
_ADDRESS = re.compile(r"\[([^\]]*)\](?::\d*)?")
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


class HostNames:
    """The names by which a server answers.

    Args:
        bound: the address it listens on.
        allowed: further names; `*.example.com` and `.example.com` stand for the names within a domain, `*` for all.
    """

    def __init__(self, bound: str, allowed: Sequence[str] = ()) -> None:
        named = [name.lower() for name in allowed]
        self._allows_all = "*" in named
        self._suffixes = tuple(name.removeprefix("*") for name in named if name.startswith(("*.", ".")))
        self._names = {"localhost", bound.lower(), *named}
        self._is_local = bound.lower() == "localhost" or _is_loopback(bound)
        """Whether only this machine can reach it."""
        if not self._is_local:
            self._names.add(socket.gethostname().lower())

    def check(self, host: str) -> None:
        """Refuse a request by its Host header; a program that sends none is no browser.

        Raises:
            HTTPError: 403, it is none of the names.
        """
        if host and not self._has(_without_port(host).lower().removesuffix(".")):
            message = (
                f"this server does not answer to the name {shown(host)}. Use http://localhost or its address, or start "
                "it with --allowed-hosts NAME."
            )
            raise HTTPError(403, message, kind="permission_error", code="unknown_host")

    def _has(self, name: str) -> bool:
        if self._allows_all or name in self._names or name.endswith((".localhost", *self._suffixes)):
            return True
        if self._is_local:
            return _is_loopback(name)
        return _is_address(name) or "." not in name or name.endswith(_PRIVATE_SUFFIXES)


def check_origin(headers: Mapping[str, str], what: str) -> None:
    """Refuse a request of a page from elsewhere.

    Raises:
        HTTPError: 403, names its origin.
    """
    if _is_foreign(headers):
        message = f"{what} is not for pages of {shown(headers['origin'])[1:-1]}."
        raise HTTPError(403, message, kind="permission_error", code="forbidden")


def check_change(headers: Mapping[str, str], cors_origins: Collection[str]) -> None:
    """Refuse a request that may change something, if a page from elsewhere can have made the browser send it.

    Args:
        headers: of the request.
        cors_origins: of pages that may call without a password.

    Raises:
        HTTPError: 403, names its origin.
    """
    kind = headers.get("authorization", "").partition(" ")[0].lower()
    if kind == "basic":
        check_origin(headers, "changing anything with a stored password")
    elif not kind and "x-api-key" not in headers and not _is_json(headers):
        may_call = "*" in cors_origins or headers.get("origin") in cors_origins
        check_origin({} if may_call else headers, "changing anything")


def _is_foreign(headers: Mapping[str, str]) -> bool:
    origin = headers.get("origin")
    if origin is None:
        return False
    scheme, _, host = origin.lower().partition("://")
    port = _DEFAULT_PORTS.get(scheme, "")
    return host.removesuffix(port) != headers.get("host", "").lower().removesuffix(port)


def _is_json(headers: Mapping[str, str]) -> bool:
    """Whether a browser asks before it sends the body for another page, as it does for all but three old kinds."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def _without_port(host: str) -> str:
    """Return the name or address of a Host header; an address of IPv6 stands in brackets there."""
    address = _ADDRESS.fullmatch(host)
    return _PORT.sub("", host) if address is None else address[1]


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(name: str) -> bool:
    return _is_address(name) and ipaddress.ip_address(name).is_loopback


class Turns:
    """A gate that lets one request through in each turn of the event loop.

    Parsing and tokenizing a request takes half a millisecond. Without turns the loop prepares all requests that arrived
    together before it reads the engine's next report: 64 of them hold up the tokens of that report by 30 ms.
    """

    def __init__(self) -> None:
        self._is_taken = False
        """Whether a request has passed in the present turn."""
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Return in the present turn if no request has passed in it, else in a later one. First come, first served."""
        loop = asyncio.get_running_loop()
        if not self._is_taken:
            self._is_taken = True
            loop.call_soon(self._next)
            return
        mine = loop.create_future()
        self._waiting.append(mine)
        await mine

    def _next(self) -> None:
        while self._waiting:
            first = self._waiting.popleft()
            if not first.done():  # it is cancelled when its client has left
                first.set_result(None)
                asyncio.get_running_loop().call_soon(self._next)
                return
        self._is_taken = False


App = Callable[[Message, Receive, Send], Any]

OPEN_PATHS = frozenset({"/health", "/ping", "/ready"})
"""Liveness and readiness paths. They need no key, because probes hold none."""
PAGE_PATH = "/"
"""Opened in a browser, which asks its user for the key if it is challenged for a password, and sends it ever after."""
ADMIN_PATHS = frozenset(
    {
        *("/reset_prefix_cache", "/pools", "/server_info", "/flight_recorder", "/v1/trace"),
        *("/lab", "/lab/experiment"),
    }
)
"""What touches everybody, shows everybody's requests, or takes the machine's time."""
SHARED_PREFIXES = ("/v1/requests/", "/v1/models/", "/live/", "/page/")
"""A tenant sees its own here; the admin key sees everybody's."""
SHARED_PATHS = frozenset({PAGE_PATH, "/v1/models", "/metrics", "/version", "/v1/capabilities", "/openapi.json"})
"""Further paths that the page, an administrator's scraper and whoever looks at a server need."""
ABORT_SUFFIX = "/abort"
"""Of `/v1/requests/{id}/abort`."""
GENERATING_PATHS = frozenset(
    {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"}
)
"""What they are asked for takes the engine's time."""


class RequestGate:
    """ASGI middleware.

    Args:
        app: behind the gate.
        config: keys and limits.
        now_s: the engine's clock, for the time of arrival.
        admission: whether there is room for a request that wants tokens.
        answers: counts them.
        known_route: the route of a request that was refused before one was looked for; "other" where there is none.
    """

    def __init__(
        self,
        app: App,
        config: ServerConfig,
        now_s: Callable[[], float],
        admission: QueueAdmission,
        answers: AnswerCounts,
        known_route: Callable[[Message], str] = lambda _: "other",
    ) -> None:
        self._app = app
        self._known_route = known_route
        self._answers = answers
        self._admission = admission
        self._keys = Keys(config.api_key)
        self._has_keys = bool(config.api_key)
        self._admin_key = None if config.admin_api_key is None else config.admin_api_key.encode()
        if self._admin_key is not None and self._keys.tenant_of(self._admin_key) is not None:
            limit = "is a tenant's key, too, who would be the administrator"
            raise InvalidParameter("admin_api_key", "(a secret)", limit, "Give the administrator a key of its own.")
        self._max_body_bytes = config.max_body_bytes
        self._bodies = BodyReader(
            config.max_body_bytes,
            config.body_timeout_s,
            max(config.max_body_bytes, config.max_unfinished_body_bytes),
        )
        self._hosts = HostNames(config.host, config.allowed_hosts)
        self._cors_origins = frozenset(config.cors_origins)
        self._now_s = now_s
        self._turns = Turns()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Lets a request through, or answers it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = _request_id(headers)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(raw=message["headers"]).append("x-request-id", request_id)
                # a path of the client's own would make a series each, so a path counts by its route
                route = getattr(scope.get("route"), "path", None) or self._known_route(scope)
                self._answers.answered(route, message["status"])
            await send(message)

        state: dict[str, Any] = scope.setdefault("state", {})
        state["request_id"] = request_id
        state[SERVER_SEND] = send
        try:
            await self._pass(scope, headers, receive, send_with_id)
        finally:  # both hold this scope: nobody should have to wait for the collector of cycles
            del state[SERVER_SEND]
            scope.get("extensions", {}).pop(WRITE_NOW, None)

    async def _pass(self, scope: Message, headers: Headers, receive: Receive, send: Send) -> None:
        state: dict[str, Any] = scope["state"]
        is_awaited = False

        async def receive_awaited() -> Message:
            nonlocal is_awaited
            is_awaited = True
            return await receive()

        try:
            self._hosts.check(headers.get("host", ""))
            state["tenant"] = self._check_key(scope, headers)
            if scope["method"] not in SAFE_METHODS:
                check_change(headers, self._cors_origins)
            if scope["path"] in GENERATING_PATHS and scope["method"] == "POST":
                # before its body is read: refusing costs next to nothing, which is what overload asks for
                self._admission.check(state["tenant"], patience_s(headers))
            check_media_type(scope["method"], scope["path"], headers)
            read: Receive = receive_awaited
            if "content-encoding" in headers:
                read = decoded(read, headers, self._max_body_bytes)
            replay = _replay(await self._bodies.read(headers, read), receive)  # whoever reads the body may let go of it
        except (HTTPError, TwostrokeError) as error:
            answer = shaped_for(scope["path"], error_body(error))
            if "expect" in headers and not is_awaited:
                # the client may send its body or leave it out, so that nobody knows where the next request begins
                answer.headers["connection"] = "close"
            await answer_error(answer, send)
            return
        state["arrival_time_s"] = self._now_s()
        if scope["path"] in GENERATING_PATHS:
            await self._turns.wait()
        await self._app(scope, replay, send)

    def _check_key(self, scope: Message, headers: Headers) -> str:
        """The tenant whose key was sent; refuses a request that needs a key and has none."""
        path = scope["path"]
        if path in OPEN_PATHS:
            return ""
        if path in ADMIN_PATHS:
            self._check_admin(scope, headers, _given_key(headers))
            return ""
        if self._has_keys:
            return self._tenant_of(path, _given_key(headers))
        if path.endswith(ABORT_SUFFIX):
            check_origin(headers, "ending requests")
        return ""

    def _tenant_of(self, path: str, given: bytes) -> str:
        tenant = self._keys.tenant_of(given)
        is_shared = path in SHARED_PATHS or path.startswith(SHARED_PREFIXES)
        if tenant is None and is_shared and self._is_admin_key(given):
            return ""
        if tenant is None:
            message = "a valid API key is needed: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
            raise _unauthorized(message, challenge="Basic" if path == PAGE_PATH else "Bearer")
        return tenant

    def _is_admin_key(self, given: bytes) -> bool:
        return self._admin_key is not None and hmac.compare_digest(self._admin_key, given)

    def _check_admin(self, scope: Message, headers: Headers, given: bytes) -> None:
        if self._admin_key is None:
            client = scope.get("client")
            if self._has_keys:
                message = "administration needs a key of its own; start the server with --admin-api-key."
                raise HTTPError(403, message, kind="permission_error", code="forbidden")
            if client is None or client[0] not in ("127.0.0.1", "::1"):
                message = "administration is for this machine only, as no admin key is set (--admin-api-key)."
                raise HTTPError(403, message, kind="permission_error", code="forbidden")
            check_origin(headers, "administration")
        elif not self._is_admin_key(given):
            raise _unauthorized("the admin key is needed: send 'Authorization: Bearer ADMIN_KEY'.")


class HostGuard:
    """ASGI middleware that only looks at the name by which it is asked: before an application without keys.

    Args:
        app: behind it.
        hosts: names that are right.
    """

    def __init__(self, app: App, hosts: HostNames) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Lets a request through, or refuses it."""
        if scope["type"] == "http":
            try:
                self._hosts.check(Headers(scope=scope).get("host", ""))
            except HTTPError as error:
                await answer_error(error.answer, send)
                return
        await self._app(scope, receive, send)


async def answer_error(answer: ErrorAnswer, send: Send) -> None:
    """Sends an error without a route."""
    body = msgspec.json.encode(answer.body)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.encode(), value.encode()) for name, value in answer.headers.items()]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body that was read, then whatever comes (a disconnect)."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay


def _given_key(headers: Mapping[str, str]) -> bytes:
    """The key, however clients send it: as a bearer token, as Anthropic's header, or as a browser's password."""
    kind, _, credentials = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return credentials.strip().encode("latin-1")
    if kind.lower() == "basic":
        try:
            return base64.b64decode(credentials, validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            return b""
    return headers.get("x-api-key", "").encode("latin-1")


def _request_id(headers: Mapping[str, str]) -> str:
    """The client's, when it is fit for a header and a log; else one is made."""
    given = headers.get("x-request-id", "")
    return given if 0 < len(given) <= 256 and given.isascii() and given.isprintable() else uuid.uuid4().hex


def _unauthorized(message: str, challenge: str = "Bearer") -> HTTPError:
    headers = {"www-authenticate": f'{challenge} realm="twostroke"'}
    return HTTPError(401, message, kind="authentication_error", code="invalid_api_key", headers=headers)

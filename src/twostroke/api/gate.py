"""Request gate before every route: host name, key, admission and body. Pure ASGI.

A route sees a request only when it has a valid key (if keys are set), is within the limits and has arrived
completely. A slow sender therefore occupies no route. Generating requests then pass one at a time (Turns).

The gate also protects the server from web pages of other sites, run by the browser of a user who can reach it:

    DNS rebinding   A page's own domain may resolve to this machine, so that the browser treats the server as the
                    page's own. The Host header still has the page's name; unknown names are refused.
    no preflight    A browser sends a page's POST, with its stored password for this server, before it checks
                    whether the page may read the answer. The Origin header names the page's site.

A key in a custom header needs no check: a browser sends such headers only if CORS allows it.
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

from twostroke.api.admission import QueueAdmission, first_token_timeout_s
from twostroke.api.answering import SERVER_SEND, WRITE_NOW, Message, Receive, Send
from twostroke.api.bodies import BodyReader, check_media_type, decoded
from twostroke.api.http_errors import ErrorAnswer, HTTPError, error_body, in_api_format
from twostroke.api.keys import Keys
from twostroke.api.observation import ResponseCounts
from twostroke.config.server import ServerConfig
from twostroke.errors import InvalidParameter, TwostrokeError, shown

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing; a browser lets no other page read their answers."""
_PRIVATE_SUFFIXES = (".local", ".internal", ".home.arpa")
"""Suffixes of names that nobody can register (RFC 6762, RFC 8375, and ICANN's reservation of .internal)."""
_PORT = re.compile(r":\d*$")
_ADDRESS = re.compile(r"\[([^\]]*)\](?::\d*)?")
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


class HostNames:
    """Host names that a server accepts.

    Args:
        bound: address that the server listens on.
        allowed: further names; `*.example.com` and `.example.com` match the names within a domain, `*` matches all.
    """

    def __init__(self, bound: str, allowed: Sequence[str] = ()) -> None:
        named = [name.lower() for name in allowed]
        self._allows_all = "*" in named
        self._suffixes = tuple(name.removeprefix("*") for name in named if name.startswith(("*.", ".")))
        self._names = {"localhost", bound.lower(), *named}
        self._is_local = bound.lower() == "localhost" or _is_loopback(bound)
        """Whether the server is reachable only from this machine."""
        if not self._is_local:
            self._names.add(socket.gethostname().lower())

    def check(self, host: str) -> None:
        """Refuse a request whose Host header has an unknown name. A client without the header is not a browser and
        passes.

        Raises:
            HTTPError: 403, the name is unknown.
        """
        if host and not self._has(_without_port(host).lower().removesuffix(".")):
            message = (
                f"this server does not accept the host name {shown(host)}. Use http://localhost or its address, or "
                "start it with --allowed-hosts NAME."
            )
            raise HTTPError(403, message, kind="permission_error", code="unknown_host")

    def _has(self, name: str) -> bool:
        if self._allows_all or name in self._names or name.endswith((".localhost", *self._suffixes)):
            return True
        if self._is_local:
            return _is_loopback(name)
        return _is_address(name) or "." not in name or name.endswith(_PRIVATE_SUFFIXES)


def check_origin(headers: Mapping[str, str], what: str) -> None:
    """Refuse a request from a page of another origin.

    Raises:
        HTTPError: 403, names the origin.
    """
    if _is_cross_origin(headers):
        message = f"{what} is not allowed for pages of {shown(headers['origin'])[1:-1]}."
        raise HTTPError(403, message, kind="permission_error", code="forbidden")


def check_state_change(headers: Mapping[str, str], cors_origins: Collection[str]) -> None:
    """Refuse a request that may change something, if a page of another origin can have caused it.

    Args:
        headers: headers of the request.
        cors_origins: origins of pages that may call without a password.

    Raises:
        HTTPError: 403, names the origin.
    """
    kind = headers.get("authorization", "").partition(" ")[0].lower()
    if kind == "basic":
        check_origin(headers, "changing anything with a stored password")
    elif not kind and "x-api-key" not in headers and not _is_json(headers):
        may_call = "*" in cors_origins or headers.get("origin") in cors_origins
        check_origin({} if may_call else headers, "changing anything")


def _is_cross_origin(headers: Mapping[str, str]) -> bool:
    origin = headers.get("origin")
    if origin is None:
        return False
    scheme, _, host = origin.lower().partition("://")
    port = _DEFAULT_PORTS.get(scheme, "")
    return host.removesuffix(port) != headers.get("host", "").lower().removesuffix(port)


def _is_json(headers: Mapping[str, str]) -> bool:
    """Return whether a browser sends this type of body for another origin only after a preflight.

    Browsers do so for all but three old types.
    """
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def _without_port(host: str) -> str:
    """Return the name or address of a Host header without port and without the brackets of IPv6."""
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


class OnePerIteration:
    """Gate that passes one request per iteration of the event loop.

    Parsing and tokenizing a request takes half a millisecond. Without this gate the loop prepares all requests that
    arrived together before it reads the engine's next report: 64 of them delay the tokens of that report by 30 ms.
    """

    def __init__(self) -> None:
        self._has_passed = False
        """Whether a request has passed in the present iteration."""
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Return in the present iteration if no request has passed in it, otherwise in a later one, in order of
        arrival."""
        loop = asyncio.get_running_loop()
        if not self._has_passed:
            self._has_passed = True
            loop.call_soon(self._next)
            return
        mine = loop.create_future()
        self._waiting.append(mine)
        await mine

    def _next(self) -> None:
        while self._waiting:
            first = self._waiting.popleft()
            if not first.done():  # cancelled when its client has disconnected
                first.set_result(None)
                asyncio.get_running_loop().call_soon(self._next)
                return
        self._has_passed = False


App = Callable[[Message, Receive, Send], Any]

OPEN_PATHS = frozenset({"/health", "/ping", "/ready"})
"""Liveness and readiness paths. They need no key, because probes hold none."""
PAGE_PATH = "/"
"""Path of the page. A browser asks its user for the key when challenged for a password, and sends it from then on."""
ADMIN_PATHS = frozenset(
    {
        *("/reset_prefix_cache", "/pools", "/server_info", "/flight_recorder", "/v1/trace"),
        *("/lab", "/lab/experiment"),
    }
)
"""Paths for administrators: they affect or show all tenants' requests, or take the machine's time."""
SHARED_PREFIXES = ("/v1/requests/", "/v1/models/", "/live/", "/page/")
"""Prefixes of paths where a tenant sees its own data and the admin key sees all tenants' data."""
SHARED_PATHS = frozenset({PAGE_PATH, "/v1/models", "/metrics", "/version", "/v1/capabilities", "/openapi.json"})
"""Further paths that also accept the admin key, for the page and for an administrator's scraper."""
ABORT_SUFFIX = "/abort"
"""Suffix of `/v1/requests/{id}/abort`."""
GENERATING_PATHS = frozenset(
    {
        *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"),
        *("/api/chat", "/api/generate", "/api/embed", "/api/embeddings"),
    }
)
"""Paths that make the engine compute."""


class RequestGate:
    """ASGI middleware that checks requests before any route sees them.

    Args:
        app: application behind the gate.
        config: settings with keys and limits.
        now_s: the engine's clock, for arrival times.
        admission: admission checks for generating requests.
        answers: counter of responses.
        known_route: returns the route of a request that was refused before routing; "other" if there is none.
    """

    def __init__(
        self,
        app: App,
        config: ServerConfig,
        now_s: Callable[[], float],
        admission: QueueAdmission,
        answers: ResponseCounts,
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
            limit = "is also a tenant's key, which would make that tenant the administrator"
            raise InvalidParameter("admin_api_key", "(a secret)", limit, "Use a different key for the administrator.")
        self._max_body_bytes = config.max_body_bytes
        self._bodies = BodyReader(
            config.max_body_bytes,
            config.body_timeout_s,
            max(config.max_body_bytes, config.max_unfinished_body_bytes),
        )
        self._hosts = HostNames(config.host, config.allowed_hosts)
        self._cors_origins = frozenset(config.cors_origins)
        self._now_s = now_s
        self._turns = OnePerIteration()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = _request_id(headers)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(raw=message["headers"]).append("x-request-id", request_id)
                # count by route: paths that clients make up would each become a metric series
                route = getattr(scope.get("route"), "path", None) or self._known_route(scope)
                self._answers.answered(route, message["status"])
            await send(message)

        state: dict[str, Any] = scope.setdefault("state", {})
        state["request_id"] = request_id
        state[SERVER_SEND] = send
        try:
            await self._pass(scope, headers, receive, send_with_id)
        finally:  # both refer to this scope: break the cycles
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
                check_state_change(headers, self._cors_origins)
            if scope["path"] in GENERATING_PATHS and scope["method"] == "POST":
                # before its body is read, so that refusing costs almost nothing under overload
                self._admission.check(state["tenant"], first_token_timeout_s(headers))
            check_media_type(scope["method"], scope["path"], headers)
            read: Receive = receive_awaited
            if "content-encoding" in headers:
                read = decoded(read, headers, self._max_body_bytes)
            replay = _replay(await self._bodies.read(headers, read), receive)  # keeps no reference to the body
        except (HTTPError, TwostrokeError) as error:
            answer = in_api_format(scope["path"], error_body(error))
            if "expect" in headers and not is_awaited:
                # the client may or may not send its body, so the start of the next request is unknown
                answer.headers["connection"] = "close"
            await answer_error(answer, send)
            return
        state["arrival_time_s"] = self._now_s()
        if scope["path"] in GENERATING_PATHS:
            await self._turns.wait()
        await self._app(scope, replay, send)

    def _check_key(self, scope: Message, headers: Headers) -> str:
        """Return the tenant of the key; raise HTTPError if the path needs a key and the request has none."""
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
                message = "administration needs an admin key; start the server with --admin-api-key."
                raise HTTPError(403, message, kind="permission_error", code="forbidden")
            if client is None or client[0] not in ("127.0.0.1", "::1"):
                message = "administration is allowed from this machine only, because no --admin-api-key is set."
                raise HTTPError(403, message, kind="permission_error", code="forbidden")
            check_origin(headers, "administration")
        elif not self._is_admin_key(given):
            raise _unauthorized("the admin key is needed: send 'Authorization: Bearer ADMIN_KEY'.")


class HostGuard:
    """ASGI middleware that checks only the host name, for an application without keys.

    Args:
        app: application behind it.
        hosts: accepted names.
    """

    def __init__(self, app: App, hosts: HostNames) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "http":
            try:
                self._hosts.check(Headers(scope=scope).get("host", ""))
            except HTTPError as error:
                await answer_error(error.answer, send)
                return
        await self._app(scope, receive, send)


async def answer_error(answer: ErrorAnswer, send: Send) -> None:
    """Send an error response without a route."""
    body = msgspec.json.encode(answer.body)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.encode(), value.encode()) for name, value in answer.headers.items()]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that yields the body already read, then the server's further messages (a disconnect)."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay


def _given_key(headers: Mapping[str, str]) -> bytes:
    """Return the key of a request: a bearer token, Anthropic's header, or a browser's password."""
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
    """Return the client's request id if it is safe for headers and logs; otherwise a new one."""
    given = headers.get("x-request-id", "")
    return given if 0 < len(given) <= 256 and given.isascii() and given.isprintable() else uuid.uuid4().hex


def _unauthorized(message: str, challenge: str = "Bearer") -> HTTPError:
    headers = {"www-authenticate": f'{challenge} realm="twostroke"'}
    return HTTPError(401, message, kind="authentication_error", code="invalid_api_key", headers=headers)

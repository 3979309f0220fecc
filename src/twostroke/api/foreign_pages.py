"""Protection of the server from web pages of others, which run in the browser of somebody who can reach it.

    another name    A page's own domain may resolve to this machine (DNS rebinding); the browser then takes the server
                    for the page's own. The Host header still has the page's name, so unknown names are refused.
    no permission   A browser sends a page's POST, with the password that it has stored for this server, before it
                    asks whether the page may read the answer. The Origin header says whose page it is.

A key in a header of the page's own making needs no check: a browser sends such headers only where CORS allows it.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Collection, Mapping, Sequence

from twostroke.api.http_errors import HTTPError
from twostroke.errors import shown

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

"""Where a server listens."""

from __future__ import annotations

import errno
import socket

from twostroke.errors import InvalidParameter, SetupError


def listen(host: str, port: int) -> socket.socket:
    """The socket, before anything is loaded: an address that is taken is told at once.

    Raises:
        InvalidParameter: the host is no address of this machine.
        SetupError: something else listens there.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except socket.gaierror as error:
        listener.close()
        limit = f"is no address of this machine ({error.strerror})"
        raise InvalidParameter("host", host, limit, "Use 127.0.0.1, or 0.0.0.0 for all networks.") from error
    except OSError as error:
        listener.close()
        is_elsewhere = error.errno == errno.EADDRNOTAVAIL
        remedy = "Give an address of this machine as --host." if is_elsewhere else "Choose another --port."
        raise SetupError(f"{host}:{port} cannot be listened on ({error.strerror or error}). {remedy}") from error
    return listener


def address_of(listener: socket.socket, scheme: str = "http") -> str:
    """As a person types it into a browser."""
    host, port = listener.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

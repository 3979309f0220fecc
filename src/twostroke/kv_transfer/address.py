"""Where a lender is found: a socket's file on this machine, or a host and a port."""

from __future__ import annotations

import socket

import msgspec


class Address(msgspec.Struct, frozen=True, array_like=True):
    """One of both."""

    path: str = ""
    """Of a Unix socket, in a folder of this user's."""
    host: str = ""
    port: int = 0
    """0: any free one, for a listener."""

    @property
    def is_local(self) -> bool:
        """Whether descriptors can be handed over."""
        return bool(self.path)

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"


def listen(address: Address) -> tuple[socket.socket, Address]:
    """A listener, and its address with the port that was found.

    Raises:
        OSError: somebody else has it.
    """
    if address.is_local:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address.path)
        listener.listen(128)
        return listener, address
    listener = socket.create_server((address.host, address.port), backlog=128)
    return listener, Address(host=address.host, port=listener.getsockname()[1])


def connect(address: Address, timeout_s: float) -> socket.socket:
    """A connection.

    Raises:
        OSError: nobody is there, or does not answer in time.
    """
    if address.is_local:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(timeout_s)
        try:
            connection.connect(address.path)
        except BaseException:
            connection.close()
            raise
        return connection
    connection = socket.create_connection((address.host, address.port), timeout_s)
    # buffers are left to the system: it lets them grow with rate x delay, further than most of them allow us to ask for
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection

"""Addresses of lenders: a Unix socket on this machine, a host and a port, or a name in this process."""

from __future__ import annotations

import socket

import msgspec

from twostroke.kv_transfer.connection import Connection, Listener
from twostroke.kv_transfer.in_process import connect_here, listen_here
from twostroke.kv_transfer.memory import KVMemory


class Address(msgspec.Struct, frozen=True, array_like=True):
    """Address of a lender; one of path, host or name is set."""

    path: str = ""
    """Path of a Unix socket, in a folder of this user's."""
    host: str = ""
    port: int = 0
    """TCP port; 0: any free one, for a listener."""
    by_nixl: bool = False
    """Whether NIXL reads the bytes out of the lender's memory, and the connection carries only frames."""
    name: str = ""
    """Name of a lender in this process."""

    @property
    def is_local(self) -> bool:
        """Whether file descriptors can be passed."""
        return bool(self.path)

    @property
    def shares_memory(self) -> bool:
        """Whether borrowers read the blocks themselves."""
        return bool(self.path or self.name or self.by_nixl)

    def __str__(self) -> str:
        return self.path or self.name or f"{self.host}:{self.port}"


def listen(address: Address, memory: KVMemory | None = None) -> tuple[Listener, Address]:
    """Open a listener; return it and its address with the port that was chosen.

    Args:
        address: where to listen.
        memory: memory that borrowers in this process may read, if the address is in this process.

    Raises:
        OSError: the address is in use.
    """
    if address.name:
        return listen_here(address.name, memory), address
    if address.is_local:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address.path)
        listener.listen(128)
        return listener, address
    listener = socket.create_server((address.host, address.port), backlog=128)
    return listener, msgspec.structs.replace(address, port=listener.getsockname()[1])


def connect(address: Address, timeout_s: float) -> Connection:
    """Connect to a lender.

    Raises:
        OSError: nothing listens there, or it does not answer in time.
    """
    if address.name:
        return connect_here(address.name)
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
    # buffer sizes are left to the system: it grows them with rate x delay, beyond what most systems let us set
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection

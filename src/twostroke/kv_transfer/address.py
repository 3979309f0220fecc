"""Where a lender is found: a socket's file on this machine, a host and a port, or a name in this process."""

from __future__ import annotations

import socket

import msgspec

from twostroke.kv_transfer.connection import Connection, Listener
from twostroke.kv_transfer.in_process import connect_here, listen_here
from twostroke.kv_transfer.memory import KVMemory


class Address(msgspec.Struct, frozen=True, array_like=True):
    """One of the three."""

    path: str = ""
    """Of a Unix socket, in a folder of this user's."""
    host: str = ""
    port: int = 0
    """0: any free one, for a listener."""
    by_nixl: bool = False
    """Over the connection to the host nothing but frames goes: NIXL reads the bytes out of the lender's memory."""
    name: str = ""
    """Of a lender in this process."""

    @property
    def is_local(self) -> bool:
        """Whether descriptors can be handed over."""
        return bool(self.path)

    @property
    def shares_memory(self) -> bool:
        """Whether who fetches there reads the blocks itself."""
        return bool(self.path or self.name or self.by_nixl)

    def __str__(self) -> str:
        return self.path or self.name or f"{self.host}:{self.port}"


def listen(address: Address, memory: KVMemory | None = None) -> tuple[Listener, Address]:
    """A listener, and its address with the port that was found.

    Args:
        address: where.
        memory: that borrowers in this process may read, if the address is of this process.

    Raises:
        OSError: somebody else has it.
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
    """A connection.

    Raises:
        OSError: nobody is there, or does not answer in time.
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
    # buffers are left to the system: it lets them grow with rate x delay, further than most of them allow us to ask for
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection

"""Rendezvous of ranks: rank 0 listens at an address, and the others connect and identify themselves.

An address is the path of a Unix socket (ranks of one host), or host:port. Rank 0 tells all ranks where the others
listen, and each rank connects to those below it. In the end there is one socket between any two.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TypeVar

import msgspec

from twostroke.errors import SetupError
from twostroke.version import __version__

_LENGTH = struct.Struct("<I")
_MAX_BYTES = 1 << 16
_ANSWER_S = 10.0
"""Seconds within which a connected peer has to send its message."""
_POLL_S = 0.1


class _Hello(msgspec.Struct, array_like=True):
    """A rank's message to rank 0."""

    version: str
    rank: int
    size: int
    listens_at: str
    """Address of its listener: a path, or a port of its host as text."""


class _Reply(msgspec.Struct, array_like=True):
    """Rank 0's reply: when all ranks have arrived, or as a refusal."""

    addresses: list[str] = msgspec.field(default_factory=list[str])
    """Addresses of the listeners of ranks 1, 2, …"""
    refusal: str = ""


def is_path(address: str) -> bool:
    """Return whether an address is a Unix socket's, so that ranks can share memory."""
    return "/" in address


def listen(address: str) -> socket.socket:
    """Open rank 0's listener.

    Raises:
        SetupError: the address cannot be listened at.
    """
    try:
        return _listen(address)
    except (OSError, ValueError) as error:
        raise SetupError(
            f"tensor_parallel_address={address}: ranks cannot meet there ({error}). Give host:port of a free port on "
            "this host, as the others reach it."
        ) from None


def await_ranks(
    listener: socket.socket, size: int, timeout_s: float, find_failure: Callable[[], str | None] = lambda: None
) -> dict[int, socket.socket]:
    """Wait on rank 0 for all other ranks.

    Args:
        listener: see `listen`.
        size: number of ranks, including this one.
        timeout_s: seconds for all of them to arrive.
        find_failure: called regularly; returns a reason to give up, or None.

    Returns:
        Sockets by rank.

    Raises:
        SetupError: not all ranks arrived.
    """
    found: dict[int, socket.socket] = {}
    addresses: dict[int, str] = {}
    deadline_s = time.monotonic() + timeout_s
    listener.settimeout(_POLL_S)
    try:
        while len(found) < size - 1:
            trouble = find_failure()
            if trouble is None and time.monotonic() > deadline_s:
                trouble = f"they did not come within {timeout_s:g} s"
            if trouble is not None:
                missing = ", ".join(str(rank) for rank in range(1, size) if rank not in found)
                raise SetupError(f"tensor_parallel_size={size}: rank {missing} of {size} is missing: {trouble}.")
            try:
                connection, host = listener.accept()
            except TimeoutError:
                continue
            hello = _receive_hello(connection, size, found)
            if hello is not None:
                port_or_path = hello.listens_at
                addresses[hello.rank] = port_or_path if is_path(port_or_path) else f"{host[0]}:{port_or_path}"
                found[hello.rank] = connection
        answer = _Reply([addresses[rank] for rank in range(1, size)])
        for rank, connection in found.items():
            try:
                _send(connection, answer)
            except OSError as error:
                raise SetupError(f"tensor_parallel_size={size}: rank {rank} ended during its start.") from error
    except BaseException:
        for connection in found.values():
            connection.close()
        raise
    return found


def join(address: str, rank: int, size: int, timeout_s: float) -> dict[int, socket.socket]:
    """Connect a rank above 0 to all others.

    Args:
        address: rank 0's.
        rank: this rank, from 1.
        size: number of ranks.
        timeout_s: seconds for rank 0 to listen, and for the last rank to arrive.

    Returns:
        Sockets by rank.

    Raises:
        SetupError: rank 0 cannot be reached, or refuses this rank.
    """
    deadline_s = time.monotonic() + timeout_s
    found: dict[int, socket.socket] = {}
    try:
        with _connect_with_retries(address, deadline_s) as to_first:
            own = f"{address}.{rank}.{os.getpid()}" if is_path(address) else f"{to_first.getsockname()[0]}:0"
            with _listen(own) as listener, _removed(own):
                name = listener.getsockname()
                listens_at = name if isinstance(name, str) else str(name[1])
                _send(to_first, _Hello(__version__, rank, size, listens_at))
                to_first.settimeout(max(_ANSWER_S, deadline_s - time.monotonic()))
                answer = _receive(to_first, _Reply)
                if answer.refusal:
                    raise SetupError(f"rank {rank} of {size} was refused at {address}: {answer.refusal}")
                found[0] = to_first.dup()
                for other in range(1, rank):
                    found[other] = _connect(answer.addresses[other - 1])
                    found[other].sendall(_LENGTH.pack(rank))
                listener.settimeout(_ANSWER_S)
                while len(found) < size - 1:
                    connection = listener.accept()[0]
                    connection.settimeout(_ANSWER_S)
                    found[_LENGTH.unpack(_exactly(connection, _LENGTH.size))[0]] = connection
    except (OSError, EOFError, ValueError, msgspec.MsgspecError) as error:
        for connection in found.values():
            connection.close()
        raise SetupError(f"rank {rank} of {size} found no rank 0 at {address} ({error}).") from None
    return found


@contextlib.contextmanager
def _removed(address: str) -> Generator[None]:
    """Remove the file of a listener after the block."""
    try:
        yield
    finally:
        if is_path(address):
            Path(address).unlink(missing_ok=True)


def _receive_hello(connection: socket.socket, size: int, present: dict[int, socket.socket]) -> _Hello | None:
    """Receive the message of a new connection; close it and return None if it is not an expected rank."""
    connection.settimeout(_ANSWER_S)
    try:
        hello = _receive(connection, _Hello)
        refusal = ""
        if hello.version != __version__:
            refusal = f"it runs twostroke {hello.version}, rank 0 runs {__version__}. Install the same."
        elif hello.size != size or not 0 < hello.rank < size:
            refusal = f"rank 0 awaits ranks 1 to {size - 1} of {size}. Start it with these numbers."
        elif hello.rank in present:
            refusal = "this rank has connected already. Start each rank once."
        if not refusal:
            return hello
        _send(connection, _Reply(refusal=refusal))
    except (OSError, EOFError, ValueError, msgspec.MsgspecError):
        pass  # not a rank
    connection.close()
    return None


def _listen(address: str) -> socket.socket:
    if is_path(address):
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(address)
            listener.listen(128)
        except BaseException:
            listener.close()
            raise
        return listener
    return socket.create_server(_host_and_port(address), backlog=128)


def _connect_with_retries(address: str, deadline_s: float) -> socket.socket:
    """Connect to rank 0, which may start later on another host; on this host it has started before."""
    while True:
        try:
            return _connect(address)
        except OSError:
            if is_path(address) or time.monotonic() >= deadline_s:
                raise
            time.sleep(_POLL_S)


def _connect(address: str) -> socket.socket:
    if not is_path(address):
        return socket.create_connection(_host_and_port(address), _ANSWER_S)
    with contextlib.ExitStack() as cleanup:
        connection = cleanup.enter_context(socket.socket(socket.AF_UNIX))
        connection.settimeout(_ANSWER_S)
        connection.connect(address)
        cleanup.pop_all()
    return connection


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _send(connection: socket.socket, message: msgspec.Struct) -> None:
    body = msgspec.msgpack.encode(message)
    connection.sendall(_LENGTH.pack(len(body)) + body)


_Message = TypeVar("_Message")


def _receive(connection: socket.socket, kind: type[_Message]) -> _Message:
    (num_bytes,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    if num_bytes > _MAX_BYTES:
        raise ValueError(f"a message of {num_bytes} bytes; the limit is {_MAX_BYTES}")
    return msgspec.msgpack.decode(_exactly(connection, num_bytes), type=kind)


def _exactly(connection: socket.socket, num_bytes: int) -> bytes:
    found = b""
    while len(found) < num_bytes:
        part = connection.recv(num_bytes - len(found))
        if not part:
            raise EOFError("the connection was closed")
        found += part
    return found

"""How ranks find each other: rank 0 listens at an address, the others come and say who they are.

An address is the path of a Unix socket (ranks of one host), or host:port. Rank 0 tells everybody where the others
listen, and each rank connects to those below it; afterwards there is one socket between any two.
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
"""For who has connected to say something."""
_LOOK_S = 0.1


class _Hello(msgspec.Struct, array_like=True):
    """What a rank says to rank 0."""

    version: str
    rank: int
    size: int
    listens_at: str
    """A path, or a port of its host as text."""


class _Answer(msgspec.Struct, array_like=True):
    """What rank 0 says when all have come, or to who is not one of them."""

    addresses: list[str] = msgspec.field(default_factory=list[str])
    """Where ranks 1 .. listen."""
    refusal: str = ""


def is_path(address: str) -> bool:
    """Whether it is a Unix socket's, so that ranks can share memory."""
    return "/" in address


def listen(address: str) -> socket.socket:
    """Rank 0's listener.

    Raises:
        SetupError: nobody can listen there.
    """
    try:
        return _listen(address)
    except (OSError, ValueError) as error:
        raise SetupError(
            f"tensor_parallel_address={address}: ranks cannot meet there ({error}). Give host:port of a free port on "
            "this host, as the others reach it."
        ) from None


def await_ranks(
    listener: socket.socket, size: int, timeout_s: float, find_trouble: Callable[[], str | None] = lambda: None
) -> dict[int, socket.socket]:
    """Rank 0's part.

    Args:
        listener: see `listen`.
        size: ranks, this one included.
        timeout_s: for the last of them to come.
        find_trouble: called every now and then; says why nobody will come any more.

    Returns:
        Sockets by rank.

    Raises:
        SetupError: not all came.
    """
    found: dict[int, socket.socket] = {}
    addresses: dict[int, str] = {}
    deadline_s = time.monotonic() + timeout_s
    listener.settimeout(_LOOK_S)
    try:
        while len(found) < size - 1:
            trouble = find_trouble()
            if trouble is None and time.monotonic() > deadline_s:
                trouble = f"they did not come within {timeout_s:g} s"
            if trouble is not None:
                missing = ", ".join(str(rank) for rank in range(1, size) if rank not in found)
                raise SetupError(f"tensor_parallel_size={size}: rank {missing} of {size} is missing: {trouble}.")
            try:
                connection, host = listener.accept()
            except TimeoutError:
                continue
            hello = _greet(connection, size, found)
            if hello is not None:
                port_or_path = hello.listens_at
                addresses[hello.rank] = port_or_path if is_path(port_or_path) else f"{host[0]}:{port_or_path}"
                found[hello.rank] = connection
        answer = _Answer([addresses[rank] for rank in range(1, size)])
        for rank, connection in found.items():
            try:
                _send(connection, answer)
            except OSError as error:
                raise SetupError(f"tensor_parallel_size={size}: rank {rank} has gone while it started.") from error
    except BaseException:
        for connection in found.values():
            connection.close()
        raise
    return found


def join(address: str, rank: int, size: int, timeout_s: float) -> dict[int, socket.socket]:
    """The part of every other rank.

    Args:
        address: rank 0's.
        rank: which one this is, from 1.
        size: ranks, all of them.
        timeout_s: for rank 0 to listen, and for the last rank to come.

    Returns:
        Sockets by rank.

    Raises:
        SetupError: nobody is there, or this rank is refused.
    """
    deadline_s = time.monotonic() + timeout_s
    found: dict[int, socket.socket] = {}
    try:
        with _connect_patiently(address, deadline_s) as to_first:
            own = f"{address}.{rank}.{os.getpid()}" if is_path(address) else f"{to_first.getsockname()[0]}:0"
            with _listen(own) as listener, _removed(own):
                name = listener.getsockname()
                listens_at = name if isinstance(name, str) else str(name[1])
                _send(to_first, _Hello(__version__, rank, size, listens_at))
                to_first.settimeout(max(_ANSWER_S, deadline_s - time.monotonic()))
                answer = _receive(to_first, _Answer)
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
    """The file of a listener that is needed no more."""
    try:
        yield
    finally:
        if is_path(address):
            Path(address).unlink(missing_ok=True)


def _greet(connection: socket.socket, size: int, present: dict[int, socket.socket]) -> _Hello | None:
    """Hears who comes; None, and the door, for who is not one of us."""
    connection.settimeout(_ANSWER_S)
    try:
        hello = _receive(connection, _Hello)
        refusal = ""
        if hello.version != __version__:
            refusal = f"it runs twostroke {hello.version}, rank 0 runs {__version__}. Install the same."
        elif hello.size != size or not 0 < hello.rank < size:
            refusal = f"rank 0 awaits ranks 1 to {size - 1} of {size}. Start it with these numbers."
        elif hello.rank in present:
            refusal = "there is such a rank already. Start each of them once."
        if not refusal:
            return hello
        _send(connection, _Answer(refusal=refusal))
    except (OSError, EOFError, ValueError, msgspec.MsgspecError):
        pass  # whoever that was
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


def _connect_patiently(address: str, deadline_s: float) -> socket.socket:
    """Who starts a rank elsewhere need not start rank 0 first; on this host rank 0 has started it."""
    while True:
        try:
            return _connect(address)
        except OSError:
            if is_path(address) or time.monotonic() >= deadline_s:
                raise
            time.sleep(_LOOK_S)


def _connect(address: str) -> socket.socket:
    if not is_path(address):
        return socket.create_connection(_host_and_port(address), _ANSWER_S)
    with contextlib.ExitStack() as if_it_fails:
        connection = if_it_fails.enter_context(socket.socket(socket.AF_UNIX))
        connection.settimeout(_ANSWER_S)
        connection.connect(address)
        if_it_fails.pop_all()
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
        raise ValueError(f"{num_bytes} bytes announced, at most {_MAX_BYTES} are meant")
    return msgspec.msgpack.decode(_exactly(connection, num_bytes), type=kind)


def _exactly(connection: socket.socket, num_bytes: int) -> bytes:
    found = b""
    while len(found) < num_bytes:
        part = connection.recv(num_bytes - len(found))
        if not part:
            raise EOFError("the connection was closed")
        found += part
    return found

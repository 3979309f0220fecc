"""The two one-way sockets between a gateway and an engine process.

    in a folder for this user only             the sender connects, the receiver binds
    on a network, with keys                    the process binds both, the gateway connects both

In a folder a sender's queue exists at once, whether or not the other process does. On a network the parent of the
process creates its listening sockets and passes them on: so their ports are known before it runs, and the gateway may
connect before it listens. A broken connection is never made again, because messages on their way are lost. So each side
takes the other for dead when a connection breaks.

On a network both sides authenticate by CURVE, and everything is encrypted. Secret keys stay where they were made.
"""

from __future__ import annotations

import stat
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq
from zmq.utils import z85

CONNECT_TIMEOUT_MS = 10_000
_NETWORK = "network.json"


class ProcessSockets(Protocol):
    """Sockets by which a gateway reaches a process."""

    def ends(self, context: zmq.Context[Any]) -> tuple[Any, Any]:
        """Return the gateway's sockets: for commands, and for reports."""
        ...

    @property
    def break_for_good(self) -> bool:
        """Whether a connection that breaks means that the process is lost."""
        ...


@dataclass(frozen=True, slots=True)
class FolderSockets:
    """Sockets in a folder; a network port would be open to every user of the machine."""

    folder: Path
    break_for_good: bool = False

    def ends(self, context: zmq.Context[Any]) -> tuple[Any, Any]:
        to_engine, from_engine = _files(self.folder)
        commands, reports = unbounded(context.socket(zmq.PUSH)), unbounded(context.socket(zmq.PULL))
        commands.connect(to_engine)
        reports.bind(from_engine)
        return commands, reports


@dataclass(frozen=True, slots=True)
class NetworkSockets:
    """Network ports of a process on some node."""

    host: str
    ports: tuple[int, int]
    """Ports for commands and for reports."""
    engine_key: bytes
    """Public key of the process."""
    public_key: bytes
    """Public key of the gateway."""
    secret_key: bytes
    break_for_good: bool = True

    def ends(self, context: zmq.Context[Any]) -> tuple[Any, Any]:
        both = unbounded(context.socket(zmq.PUSH)), unbounded(context.socket(zmq.PULL))
        for socket, port in zip(both, self.ports, strict=True):
            socket.curve_serverkey = self.engine_key
            socket.curve_publickey, socket.curve_secretkey = self.public_key, self.secret_key
            socket.setsockopt(zmq.RECONNECT_IVL, -1)
            socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
            socket.connect(f"tcp://{self.host}:{port}")
        return both


class NetworkEnd(msgspec.Struct, frozen=True):
    """Settings of a process's end, written to its folder."""

    descriptors: tuple[int, int]
    """Listening sockets that it inherits: for commands, and for reports."""
    public_key: bytes
    secret_key: bytes
    gateway_key: bytes
    """Public key of the gateway, which alone may connect."""

    def write(self, folder: Path) -> None:
        """Write the settings; call it before the process starts."""
        _check_is_private(folder)
        (folder / _NETWORK).write_bytes(msgspec.json.encode(self))


def engine_ends(context: zmq.Context[Any], folder: Path) -> tuple[Any, Any]:
    """Return an engine process's sockets: for commands, and for reports."""
    commands, reports = unbounded(context.socket(zmq.PULL)), unbounded(context.socket(zmq.PUSH))
    told = folder / _NETWORK
    if not told.exists():
        to_engine, from_engine = _files(folder)
        commands.bind(to_engine)
        reports.connect(from_engine)
        return commands, reports
    end = msgspec.json.decode(told.read_bytes(), type=NetworkEnd)
    told.unlink()  # the secret key is for this process only
    _authenticate(context, end.gateway_key)
    for socket, descriptor in zip((commands, reports), end.descriptors, strict=True):
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = end.public_key, end.secret_key
        socket.setsockopt(zmq.ZAP_DOMAIN, b"twostroke")
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # refuse all connections if no thread checks keys
        socket.setsockopt(zmq.USE_FD, descriptor)
        socket.bind("tcp://127.0.0.1:*")  # the actual address is the descriptor's
    return commands, reports


def _authenticate(context: zmq.Context[Any], key: bytes) -> None:
    """Authenticate connections to this context's sockets in a thread, until it ends: only the owner of this key may
    connect."""
    questions = context.socket(zmq.REP)
    questions.setsockopt(zmq.LINGER, 0)
    questions.bind("inproc://zeromq.zap.01")  # address of the authenticator, https://rfc.zeromq.org/spec/27
    raw_key = z85.decode(key)

    def check() -> None:
        while True:
            try:
                version, number, _, _, _, mechanism, *credentials = questions.recv_multipart()
            except zmq.ContextTerminated:
                questions.close()
                return
            is_known = mechanism == b"CURVE" and credentials == [raw_key]
            verdict = (b"200", b"OK") if is_known else (b"400", b"unknown key")
            questions.send_multipart([version, number, *verdict, b"", b""])

    threading.Thread(target=check, daemon=True, name="twostroke-guard").start()


def unbounded(socket: Any) -> Any:
    """Return the socket, set to queue without a limit and to drop its queue when closed."""
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    return socket


def _files(folder: Path) -> tuple[str, str]:
    _check_is_private(folder)
    return f"ipc://{folder}/to-engine", f"ipc://{folder}/from-engine"


def _check_is_private(folder: Path) -> None:
    mode = stat.S_IMODE(folder.stat().st_mode)
    assert mode == stat.S_IRWXU, f"{folder} is open to others: {mode:o}"

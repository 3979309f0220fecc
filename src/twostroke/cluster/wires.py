"""The two one-way sockets between a gateway and a process that runs an engine.

    in a folder that nobody else may enter     who sends connects, who receives binds
    on a network, with keys                    the process binds both, the gateway connects both

In a folder a sender's queue is there at once and stays, whether or not the other process is. On a network who starts
the process makes its listening sockets and lets it inherit them: their ports are known before it runs, and the gateway
may connect before it listens. A connection of these is never made again: what was on its way is lost, so whoever sees
one break takes the other side for dead.

Nobody else is heard on a network: both sides prove by CURVE who they are, and everything is encrypted. Secret keys stay
where they were made.
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


class Wires(Protocol):
    """How a gateway reaches a process."""

    def ends(self, context: zmq.Context[Any]) -> tuple[Any, Any]:
        """The gateway's sockets: for commands, and for reports."""
        ...

    @property
    def break_for_good(self) -> bool:
        """Whether a connection that breaks means that the process is lost."""
        ...


@dataclass(frozen=True, slots=True)
class FolderWires:
    """Sockets that are files: a network port could be spoken to by anybody on the machine."""

    folder: Path
    break_for_good: bool = False

    def ends(self, context: zmq.Context[Any]) -> tuple[Any, Any]:
        """See Wires."""
        to_engine, from_engine = _files(self.folder)
        commands, reports = unbounded(context.socket(zmq.PUSH)), unbounded(context.socket(zmq.PULL))
        commands.connect(to_engine)
        reports.bind(from_engine)
        return commands, reports


@dataclass(frozen=True, slots=True)
class NetworkWires:
    """Ports of a process on some node."""

    host: str
    ports: tuple[int, int]
    """For commands, and for reports."""
    engine_key: bytes
    """The process's public key."""
    public_key: bytes
    """The gateway's."""
    secret_key: bytes
    break_for_good: bool = True

    def ends(self, context: zmq.Context[Any]) -> tuple[Any, Any]:
        """See Wires."""
        both = unbounded(context.socket(zmq.PUSH)), unbounded(context.socket(zmq.PULL))
        for socket, port in zip(both, self.ports, strict=True):
            socket.curve_serverkey = self.engine_key
            socket.curve_publickey, socket.curve_secretkey = self.public_key, self.secret_key
            socket.setsockopt(zmq.RECONNECT_IVL, -1)
            socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
            socket.connect(f"tcp://{self.host}:{port}")
        return both


class NetworkEnd(msgspec.Struct, frozen=True):
    """What a process is told of its end, in its folder."""

    descriptors: tuple[int, int]
    """Listening sockets that it inherits: for commands, and for reports."""
    public_key: bytes
    secret_key: bytes
    gateway_key: bytes
    """The public key of the only one who may speak to it."""

    def write(self, folder: Path) -> None:
        """Before the process is started."""
        _check_is_private(folder)
        (folder / _NETWORK).write_bytes(msgspec.json.encode(self))


def engine_ends(context: zmq.Context[Any], folder: Path) -> tuple[Any, Any]:
    """A process's sockets: for commands, and for reports."""
    commands, reports = unbounded(context.socket(zmq.PULL)), unbounded(context.socket(zmq.PUSH))
    told = folder / _NETWORK
    if not told.exists():
        to_engine, from_engine = _files(folder)
        commands.bind(to_engine)
        reports.connect(from_engine)
        return commands, reports
    end = msgspec.json.decode(told.read_bytes(), type=NetworkEnd)
    told.unlink()  # the key is for this process alone
    _let_in(context, end.gateway_key)
    for socket, descriptor in zip((commands, reports), end.descriptors, strict=True):
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = end.public_key, end.secret_key
        socket.setsockopt(zmq.ZAP_DOMAIN, b"twostroke")
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without somebody who checks keys nobody is let in
        socket.setsockopt(zmq.USE_FD, descriptor)
        socket.bind("tcp://127.0.0.1:*")  # the address is the descriptor's
    return commands, reports


def _let_in(context: zmq.Context[Any], key: bytes) -> None:
    """Checks who connects to this context's sockets, until it ends: nobody but who has the secret of this key."""
    questions = context.socket(zmq.REP)
    questions.setsockopt(zmq.LINGER, 0)
    questions.bind("inproc://zeromq.zap.01")  # where the library asks, https://rfc.zeromq.org/spec/27
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
    """A socket that queues in memory whatever the other end has not taken, and drops it when closed."""
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

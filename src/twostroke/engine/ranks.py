"""The processes of the ranks above 0: `python -m twostroke.engine.ranks RANK DESCRIPTOR...`, started by rank 0.

A rank ends when rank 0 says so, and when any other rank is gone: its end of their socket is closed then.
"""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from twostroke.communicator.interface import Communicator
from twostroke.communicator.sockets import SocketCommunicator, socket_mesh
from twostroke.config.engine import EngineConfig
from twostroke.errors import RankLost, TwostrokeError
from twostroke.log import get_logger

log = get_logger(__name__)

_PATIENCE_S = 5.0
"""For a rank that was told to end."""


class RankStart(msgspec.Struct, array_like=True):
    """What the other ranks have to know before they load their share."""

    config: EngineConfig
    num_blocks: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Ranks:
    """The other ranks, as rank 0 has them."""

    communicator: Communicator
    processes: tuple[subprocess.Popen[bytes], ...]

    @classmethod
    def start(cls, start: RankStart) -> Ranks:
        """Starts their processes, which begin to load."""
        size = start.config.load.tensor_parallel_size
        mesh = socket_mesh(size)
        processes: list[subprocess.Popen[bytes]] = []
        for rank in range(1, size):
            descriptors = [mesh[rank][peer].fileno() for peer in sorted(mesh[rank])]
            command = [sys.executable, "-m", "twostroke.engine.ranks", str(rank), *map(str, descriptors)]
            processes.append(subprocess.Popen(command, pass_fds=descriptors, stdin=subprocess.DEVNULL))
        for sockets in mesh[1:]:  # the children's: a second copy here would hide their end
            for end in sockets.values():
                end.close()
        ranks = cls(SocketCommunicator(0, mesh[0]), tuple(processes))
        try:
            ranks.communicator.broadcast(msgspec.msgpack.encode(start, enc_hook=_plain))
        except RankLost:
            ranks.end()
            raise
        return ranks

    def end(self) -> None:
        """Waits for them; who does not end in time is killed. For failures, too: then nobody has told them."""
        self.communicator.close()
        for process in self.processes:
            try:
                process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def join(rank: int, descriptors: list[int]) -> tuple[Communicator, RankStart]:
    """The other end of `Ranks.start`."""
    peers = [peer for peer in range(len(descriptors) + 1) if peer != rank]
    sockets = {peer: socket.socket(fileno=descriptor) for peer, descriptor in zip(peers, descriptors, strict=True)}
    communicator = SocketCommunicator(rank, sockets)
    return communicator, msgspec.msgpack.decode(communicator.broadcast(None), type=RankStart, dec_hook=_read)


def main() -> int:
    """A rank's process."""
    from twostroke.engine.assembly import run_rank

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; rank 0 decides
    rank = int(sys.argv[1])
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format=f"rank {rank}: %(levelname)s %(message)s")
    try:
        communicator, start = join(rank, [int(descriptor) for descriptor in sys.argv[2:]])
        run_rank(start, communicator)
    except RankLost:
        return 0  # nobody is left to run for, and who is lost has said why
    except TwostrokeError as error:
        log.error("%s", error)
        return 1
    return 0


def _plain(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} does not travel")


def _read(kind: type, value: Any) -> Any:
    if issubclass(kind, Path):
        return Path(value)
    raise NotImplementedError(f"{kind.__name__} does not travel")


if __name__ == "__main__":
    sys.exit(main())

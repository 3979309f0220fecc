"""The ranks above 0 as rank 0 has them: processes that it starts on its own host, or that somebody starts on others."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from twostroke.child_command import child_command
from twostroke.communicator.interface import Communicator, Watching
from twostroke.communicator.rendezvous import await_ranks, is_path, listen
from twostroke.communicator.shared_memory import SharedMemoryCommunicator, share_memory
from twostroke.communicator.sockets import SocketCommunicator
from twostroke.config.engine import EngineConfig
from twostroke.config.load import LoadConfig
from twostroke.config.path_codec import plain_path
from twostroke.errors import RankLost
from twostroke.log import get_logger

log = get_logger(__name__)

_PATIENCE_S = 5.0
"""For a rank that was told to end."""
MEETING_S = 600.0
"""For ranks that others start: a cluster may have to find a place for them first."""


class KVDecision(msgspec.Struct, array_like=True):
    """How large every rank's KV cache is."""

    num_blocks: int
    max_model_len: int


class RankStart(msgspec.Struct, array_like=True):
    """What the other ranks have to know before they load their share."""

    config: EngineConfig
    kv: KVDecision | None
    """None: each rank measures its card, and the one that has least room decides."""
    kv_descriptors: tuple[int, ...] = ()
    """Of memory for each rank's KV cache that rank 0 maps, too; none: it is a rank's own."""
    finds_key_means: bool = False
    """Whether all ranks find the means of keys (runner/key_means.py)."""


class RankProcess(Protocol):
    """Of a rank that was started here; as `subprocess.Popen` has it."""

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the exit code; raises `subprocess.TimeoutExpired`."""
        ...

    def kill(self) -> None:
        """Ends it at once."""
        ...


@dataclass(frozen=True, slots=True)
class Ranks:
    """The other ranks, as rank 0 has them."""

    communicator: Communicator
    processes: tuple[RankProcess, ...]
    """Those that were started here."""

    @classmethod
    def start(cls, start: RankStart) -> Ranks:
        """Starts the other ranks, or waits for those that somebody else starts; they begin to load.

        Raises:
            SetupError: they did not come.
            RankLost: one came, and is gone.
        """
        load = start.config.load
        size, address = load.tensor_parallel_size, load.tensor_parallel_address
        folder = None if address else tempfile.mkdtemp(prefix="twostroke-ranks-")  # for this user only
        processes: list[RankProcess] = []
        communicator: Communicator | None = None
        try:
            address = address or f"{folder}/0"
            with listen(address) as listener:
                if folder is not None:
                    processes += [spawn_rank(rank, size, address, start.kv_descriptors) for rank in range(1, size)]
                sockets = await_ranks(listener, size, MEETING_S, lambda: _trouble(processes))
            communicator = sockets_or_memory = connect(0, sockets, shares_memory=is_path(address))
            communicator.broadcast(msgspec.msgpack.encode(start, enc_hook=plain_path))
            communicator = on_device(sockets_or_memory, load)
        except BaseException:
            if communicator is not None:
                communicator.close()
            _end(processes)
            raise
        finally:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
        return cls(communicator, tuple(processes))

    def end(self) -> None:
        """Waits for those that were started here; who does not end in time is killed. For failures, too: then nobody
        has told them."""
        self.communicator.close()
        _end(self.processes)


def spawn_rank(rank: int, size: int, address: str, descriptors: Sequence[int] = ()) -> RankProcess:
    """A rank of this host, in a process of its own, which has these descriptors under the same numbers."""
    command = child_command("twostroke.startup.rank_process", str(rank), str(size), address)
    # from its first moment, imports included, Ctrl-C is rank 0's affair: a process inherits what is blocked here
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=descriptors)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def connect(rank: int, sockets: Mapping[int, socket.socket], *, shares_memory: bool) -> Watching:
    """The best communicator of host memory that there is between ranks that have met; returns when all of them have it.

    Raises:
        RankLost: one is gone already.
    """
    try:
        memory = share_memory(rank, sockets) if shares_memory else None
    except OSError as error:
        raise RankLost(0 if rank else 1, f"it went while ranks shared memory ({error})") from error
    communicator = (
        SocketCommunicator(rank, sockets) if memory is None else SharedMemoryCommunicator(rank, sockets, memory)
    )
    try:
        communicator.barrier()
    except BaseException:
        communicator.close()
        raise
    return communicator


def on_device(communicator: Watching, load: LoadConfig) -> Communicator:
    """The communicator of where the model runs; between GPUs gathers do not go through the hosts.

    Raises:
        RankLost: another rank did not come to it.
    """
    if load.device == "cpu":
        return communicator
    from twostroke.communicator.process_group import process_group

    return process_group(communicator, load.device)


def _trouble(processes: Sequence[RankProcess]) -> str | None:
    for rank, process in enumerate(processes, 1):
        code = process.poll()
        if code is not None:
            return f"the process of rank {rank} exited with code {code}; its log says why"
    return None


def _end(processes: Sequence[RankProcess]) -> None:
    for process in processes:
        try:
            process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

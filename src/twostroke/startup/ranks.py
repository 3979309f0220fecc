"""The ranks above 0, as rank 0 sees them: processes that it starts on its host, or that are started on other hosts."""

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
from twostroke.communicator.interface import Communicator, WatchedCommunicator
from twostroke.communicator.rendezvous import await_ranks, is_path, listen
from twostroke.communicator.shared_memory import SharedMemoryCommunicator, share_memory
from twostroke.communicator.sockets import SocketCommunicator
from twostroke.config.engine import EngineConfig
from twostroke.config.load import LoadConfig
from twostroke.config.path_codec import plain_path
from twostroke.errors import RankLost
from twostroke.log import get_logger

log = get_logger(__name__)

_TIMEOUT_S = 5.0
"""Seconds for a rank to end after it was told to."""
RENDEZVOUS_TIMEOUT_S = 600.0
"""Seconds for all ranks to connect; a cluster may have to find a place for them first."""


class KVDecision(msgspec.Struct, array_like=True):
    """Size of every rank's KV cache."""

    num_blocks: int
    max_model_len: int


class RankStart(msgspec.Struct, array_like=True):
    """Settings that the other ranks need before they load their share."""

    config: EngineConfig
    kv: KVDecision | None
    """Size of the KV cache; None: each rank measures its card, and the one with the least room decides."""
    kv_descriptors: tuple[int, ...] = ()
    """Memory for each rank's KV cache that rank 0 also maps; empty: each rank has its own."""
    finds_key_means: bool = False
    """Whether all ranks compute the means of keys (runner/key_means.py)."""


class RankProcess(Protocol):
    """Process of a rank started here; the interface of `subprocess.Popen`."""

    def poll(self) -> int | None:
        """Return its exit code; None while it runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code; raise `subprocess.TimeoutExpired` after the timeout."""
        ...

    def kill(self) -> None:
        """Kill the process."""
        ...


@dataclass(frozen=True, slots=True)
class Ranks:
    """The other ranks, as rank 0 sees them."""

    communicator: Communicator
    processes: tuple[RankProcess, ...]
    """Processes that were started here."""

    @classmethod
    def start(cls, start: RankStart) -> Ranks:
        """Start the other ranks, or wait for ranks that are started elsewhere; they begin to load.

        Raises:
            SetupError: not all ranks connected.
            RankLost: a rank connected, and is gone.
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
                sockets = await_ranks(listener, size, RENDEZVOUS_TIMEOUT_S, lambda: _trouble(processes))
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
        """Wait for the processes that were started here, and kill those that do not end in time.

        Also used after failures, when the ranks were not told to end.
        """
        self.communicator.close()
        _end(self.processes)


def spawn_rank(rank: int, size: int, address: str, descriptors: Sequence[int] = ()) -> RankProcess:
    """Start a rank of this host in a process of its own, which inherits these descriptors under the same numbers."""
    command = child_command("twostroke.startup.rank_process", str(rank), str(size), address)
    # only rank 0 handles Ctrl-C; the process inherits the blocked signal, so this holds during its imports too
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=descriptors)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def connect(rank: int, sockets: Mapping[int, socket.socket], *, shares_memory: bool) -> WatchedCommunicator:
    """Return the fastest communicator in host memory for ranks that have met; wait until all of them have it.

    Raises:
        RankLost: a rank is gone already.
    """
    try:
        memory = share_memory(rank, sockets) if shares_memory else None
    except OSError as error:
        raise RankLost(0 if rank else 1, f"it ended while ranks shared memory ({error})") from error
    communicator = (
        SocketCommunicator(rank, sockets) if memory is None else SharedMemoryCommunicator(rank, sockets, memory)
    )
    try:
        communicator.barrier()
    except BaseException:
        communicator.close()
        raise
    return communicator


def on_device(communicator: WatchedCommunicator, load: LoadConfig) -> Communicator:
    """Return the communicator for the model's device; between GPUs gathers do not pass through the hosts.

    Raises:
        RankLost: another rank did not join it.
    """
    if load.device == "cpu":
        return communicator
    from twostroke.communicator.process_group import process_group

    return process_group(communicator, load.device)


def _trouble(processes: Sequence[RankProcess]) -> str | None:
    for rank, process in enumerate(processes, 1):
        code = process.poll()
        if code is not None:
            return f"the process of rank {rank} exited with code {code}; see its log"
    return None


def _end(processes: Sequence[RankProcess]) -> None:
    for process in processes:
        try:
            process.wait(_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

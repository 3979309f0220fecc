"""Gathers between processes, and ranks that die in the middle of one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from twostroke.communicator.sockets import SocketCommunicator, socket_mesh
from twostroke.errors import RankLost

Mesh = list[dict[int, socket.socket]]


def tcp_mesh(size: int) -> Mesh:
    """As between hosts."""
    found: Mesh = [{} for _ in range(size)]
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        for first in range(size):
            for second in range(first + 1, size):
                found[first][second] = socket.create_connection(server.getsockname())
                found[second][first] = server.accept()[0]
    return found


@pytest.fixture(params=[socket_mesh, tcp_mesh], ids=["unix", "tcp"])
def make_mesh(request: pytest.FixtureRequest) -> Callable[[int], Mesh]:
    return request.param


def gather(communicator: SocketCommunicator, local: bytes, sizes: list[int]) -> list[bytes]:
    out = [bytearray(size) for size in sizes]
    communicator.all_gather(memoryview(local), [memoryview(part) for part in out])
    return [bytes(part) for part in out]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("num_bytes", [0, 1, 4096, 3 << 20])
def test_everybody_gets_everything_in_order(make_mesh: Callable[[int], Mesh], size: int, num_bytes: int) -> None:
    """Sizes differ by rank, and the largest are beyond what any socket buffers."""
    sizes = [num_bytes + rank for rank in range(size)]
    expected = [bytes([rank + 1]) * sizes[rank] for rank in range(size)]
    found: dict[int, list[list[bytes]]] = {}

    def run(rank: int, communicator: SocketCommunicator) -> None:
        with closing(communicator):
            rounds = [gather(communicator, expected[rank], sizes) for _ in range(3)]
            communicator.barrier()
            rounds.append([communicator.broadcast(b"said" * num_bytes if rank == 0 else None)])
            found[rank] = rounds

    ranks = [SocketCommunicator(rank, peers) for rank, peers in enumerate(make_mesh(size))]
    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {rank: [expected] * 3 + [[b"said" * num_bytes]] for rank in range(size)}


def test_ranks_in_different_operations_notice(make_mesh: Callable[[int], Mesh]) -> None:
    first, second = (SocketCommunicator(rank, peers) for rank, peers in enumerate(make_mesh(2)))
    with closing(first), closing(second):
        thread = threading.Thread(target=lambda: second.broadcast(None))
        thread.start()
        first.broadcast(b"a")
        thread.join()
        first.broadcast(b"b")  # what the other takes for its part of a gather
        with pytest.raises(RankLost, match="rank 0 is lost: it sent 1 bytes in its operation 2, rank 1 awaited 4"):
            gather(second, b"four", [4, 4])


_PEER = """
import socket, sys
from twostroke.communicator.sockets import SocketCommunicator
peer = SocketCommunicator(1, {0: socket.socket(fileno=int(sys.argv[1]))})
peer.barrier()
peer.broadcast(None)
"""


@pytest.fixture
def other_process() -> Iterator[tuple[SocketCommunicator, subprocess.Popen[bytes]]]:
    """Rank 0 here, and rank 1 in a process that waits for a message."""
    mesh = socket_mesh(2)
    descriptor = mesh[1][0].fileno()
    process = subprocess.Popen([sys.executable, "-c", _PEER, str(descriptor)], pass_fds=[descriptor])
    mesh[1][0].close()
    with closing(SocketCommunicator(0, mesh[0])) as communicator:
        communicator.barrier()
        yield communicator, process
    process.wait(10)


def test_a_killed_rank_is_noticed_within_a_second(
    other_process: tuple[SocketCommunicator, subprocess.Popen[bytes]],
) -> None:
    communicator, process = other_process
    killed_s: list[float] = []

    def kill() -> None:
        time.sleep(0.2)
        killed_s.append(time.monotonic())
        os.kill(process.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(RankLost, match="rank 1 is lost"):
        gather(communicator, b"x" * 100, [100, 100])
    noticed_s = time.monotonic()
    killer.join()
    assert noticed_s - killed_s[0] < 1.0


def test_a_rank_that_waits_takes_no_processor_time_and_ends_with_rank_0(
    other_process: tuple[SocketCommunicator, subprocess.Popen[bytes]],
) -> None:
    communicator, process = other_process

    def used_ticks() -> int:
        with open(f"/proc/{process.pid}/stat", encoding="utf-8") as file:
            fields = file.read().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    before = used_ticks()
    time.sleep(0.5)
    assert used_ticks() - before <= 5
    communicator.close()
    assert process.wait(5) == 1  # by RankLost

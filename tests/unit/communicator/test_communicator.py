"""Behaviour of every communicator, for any transport, and ranks that die during a gather."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from twostroke.communicator.interface import Communicator
from twostroke.communicator.process_group import ProcessGroupCommunicator, process_group
from twostroke.communicator.rendezvous import await_ranks, join, listen
from twostroke.communicator.shared_memory import SharedMemoryCommunicator
from twostroke.communicator.sockets import SocketCommunicator
from twostroke.errors import RankLost, SetupError
from twostroke.startup.ranks import connect

Meeting = Callable[[int], list[Communicator]]


def communicator_of(backend: str, rank: int, sockets: Mapping[int, socket.socket]) -> Communicator:
    communicator = connect(rank, sockets, shares_memory=backend == "shared memory")
    return process_group(communicator, "cpu") if backend == "gloo" else communicator


@pytest.fixture
def meet(backend: str, tmp_path: Path) -> Iterator[Meeting]:
    """Make communicators of so many ranks that are connected at an address, all in this process."""
    opened: list[Communicator] = []

    def of(size: int) -> list[Communicator]:
        found: dict[int, Communicator] = {}
        with listen(f"{tmp_path}/0" if backend != "tcp" else "127.0.0.1:0") as listener:
            name = listener.getsockname()
            address = name if isinstance(name, str) else f"127.0.0.1:{name[1]}"

            def enter(rank: int) -> None:
                sockets = join(address, rank, size, 30) if rank else await_ranks(listener, size, 30)
                found[rank] = communicator_of(backend, rank, sockets)

            in_threads([lambda rank=rank: enter(rank) for rank in range(size)])
        opened.extend(found.values())
        return [found[rank] for rank in range(size)]

    yield of
    for communicator in opened:
        communicator.close()


def in_threads(works: list[Callable[[], object]]) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def gather(communicator: Communicator, local: bytes, sizes: list[int]) -> list[bytes]:
    (whole,) = gather_rows(communicator, [local], sizes)
    ends = list(itertools.accumulate(sizes))
    return [whole[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def gather_rows(communicator: Communicator, rows: list[bytes], widths: list[int]) -> list[bytes]:
    """The rows of the whole matrix, from this rank's columns."""
    local = torch.tensor(bytearray(b"".join(rows)), dtype=torch.uint8)
    out = torch.zeros(len(rows), sum(widths), dtype=torch.uint8)
    communicator.all_gather(local, out, widths, len(rows))
    return [row.tobytes() for row in out.numpy()]


BACKENDS = {
    "unix": SocketCommunicator,
    "tcp": SocketCommunicator,
    "shared memory": SharedMemoryCommunicator,
    "gloo": ProcessGroupCommunicator,
}
every_backend = pytest.mark.parametrize("backend", list(BACKENDS))


@every_backend
def test_the_back_end_is_the_one_that_is_meant(backend: str, meet: Meeting) -> None:
    assert {type(communicator) for communicator in meet(2)} == {BACKENDS[backend]}


@every_backend
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("num_bytes", [0, 1, 4096, 3 << 20])
def test_everybody_gets_everything_in_order(backend: str, meet: Meeting, size: int, num_bytes: int) -> None:
    """Sizes differ by rank, and the largest are beyond what any socket buffers and any slot holds."""
    sizes = [num_bytes + rank for rank in range(size)]
    sent = [[bytes([rank + 1 + 10 * round_]) * sizes[rank] for rank in range(size)] for round_ in range(5)]
    found: dict[int, list[list[bytes]]] = {}

    def run(communicator: Communicator) -> None:
        rounds = [gather(communicator, of_ranks[communicator.rank], sizes) for of_ranks in sent]
        communicator.barrier()
        rounds.append([communicator.broadcast(b"said" * num_bytes if communicator.rank == 0 else None)])
        found[communicator.rank] = rounds

    ranks = meet(size)
    in_threads([lambda rank=rank: run(rank) for rank in ranks])
    assert found == {rank: [*sent, [b"said" * num_bytes]] for rank in range(size)}


@every_backend
@pytest.mark.parametrize("widths", [[3, 5], [70_000, 69_999], [4, 0], [1, 2, 3]])
def test_columns_come_beside_each_other(backend: str, meet: Meeting, widths: list[int]) -> None:
    """This holds even if a slot ends in the middle of a row."""
    dice = np.random.default_rng(0)
    matrix = [dice.bytes(sum(widths)) for _ in range(9)]
    begins = [0, *itertools.accumulate(widths)]
    found: dict[int, list[bytes]] = {}

    def run(communicator: Communicator) -> None:
        begin = begins[communicator.rank]
        columns = [row[begin : begin + widths[communicator.rank]] for row in matrix]
        found[communicator.rank] = gather_rows(communicator, columns, widths)

    ranks = meet(len(widths))
    in_threads([lambda rank=rank: run(rank) for rank in ranks])
    assert found == dict.fromkeys(range(len(widths)), matrix)


@pytest.mark.parametrize("backend", ["unix", "tcp", "shared memory"])  # a device does not look at what it sends
def test_ranks_that_send_other_sizes_than_awaited_notice(backend: str, meet: Meeting) -> None:
    first, second = meet(2)
    lost: list[str] = []

    def run(communicator: Communicator, sizes: list[int]) -> None:
        try:
            gather(communicator, bytes(sizes[communicator.rank]), sizes)
        except RankLost as error:
            lost.append(str(error))
        finally:
            communicator.close()

    in_threads([lambda: run(first, [1, 4]), lambda: run(second, [4, 4])])
    assert any("rank 0 is lost: it sent 1 bytes" in words and "rank 1 awaited 4" in words for words in lost), lost


@pytest.mark.parametrize("backend", ["unix", "tcp"])
def test_ranks_in_different_operations_notice(backend: str, meet: Meeting) -> None:
    first, second = meet(2)
    first.broadcast(b"what the other takes for its part of a gather")
    with pytest.raises(RankLost, match="rank 0 is lost: it sent 45 bytes in its operation 2, rank 1 awaited 4"):
        gather(second, b"four", [4, 4])


@every_backend
def test_a_rank_that_leaves_is_noticed(backend: str, meet: Meeting) -> None:
    first, second = meet(2)
    second.close()
    with pytest.raises(RankLost, match="rank 1 is lost"):
        gather(first, b"x", [1, 1])
    with pytest.raises(RankLost, match="rank 1 is lost"):
        first.barrier()


@pytest.mark.parametrize("backend", ["shared memory"])  # with sockets no rank is done before all have sent
def test_a_rank_that_ended_behind_its_last_gather_has_left_its_part(
    backend: str, meet: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The late rank waits, loses its processor, and runs again when the other has its part and is gone."""
    late, other = meet(2)
    assert isinstance(late, SharedMemoryCommunicator)
    operation = late._gather  # pyright: ignore[reportPrivateUsage]
    of_other: list[bytes] = []

    class LosesItsProcessor:
        start = operation.start

        def advance(self, patience_us: int) -> int:
            if of_other:
                return operation.advance(patience_us)
            of_other.extend(gather(other, b"other", [4, 5]))
            other.close()
            return other.rank

    monkeypatch.setattr(late, "_gather", LosesItsProcessor())
    assert gather(late, b"late", [4, 5]) == of_other == [b"late", b"other"]


_PEER = """
import sys
from contextlib import closing
sys.path.append(sys.argv[3])
from test_communicator import communicator_of
from twostroke.communicator.rendezvous import join
with closing(communicator_of(sys.argv[2], 1, join(sys.argv[1], 1, 2, 30))) as peer:
    peer.barrier()
    peer.broadcast(None)
"""


@pytest.fixture
def other_process(backend: str, tmp_path: Path) -> Iterator[tuple[Communicator, subprocess.Popen[bytes]]]:
    """Rank 0 here, and rank 1 in a process that waits for a message."""
    address = f"{tmp_path}/0"
    with listen(address) as listener:
        command = [sys.executable, "-c", _PEER, address, backend, str(Path(__file__).parent)]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        sockets = await_ranks(listener, 2, 60)
    with closing(communicator_of(backend, 0, sockets)) as communicator:
        communicator.barrier()
        yield communicator, process
    process.wait(30)


@pytest.mark.parametrize("backend", ["unix", "shared memory", "gloo"])
def test_a_killed_rank_is_noticed(backend: str, other_process: tuple[Communicator, subprocess.Popen[bytes]]) -> None:
    communicator, process = other_process
    killer = threading.Timer(0.2, os.kill, (process.pid, signal.SIGKILL))
    killer.start()
    with pytest.raises(RankLost, match="rank 1 is lost"):
        gather(communicator, b"x" * 100, [100, 100])
    killer.join()


@pytest.mark.parametrize("backend", ["gloo"])
def test_what_was_begun_before_a_rank_was_killed_is_not_believed(
    backend: str, other_process: tuple[Communicator, subprocess.Popen[bytes]]
) -> None:
    """On a GPU a gather has only begun when it returns: its result is looked at behind `verify`."""
    communicator, process = other_process
    communicator.verify()
    process.kill()
    process.wait(30)
    time.sleep(0.5)  # it is looked for ten times a second
    with pytest.raises(RankLost, match="rank 1 is lost: its process has ended"):
        communicator.verify()


@pytest.mark.parametrize("backend", ["shared memory", "gloo"])
def test_a_rank_that_waits_for_a_step_takes_no_processor_time_and_ends_with_rank_0(
    backend: str, other_process: tuple[Communicator, subprocess.Popen[bytes]]
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
    assert process.wait(30) == 1  # by RankLost


def test_who_is_not_one_of_the_ranks_is_sent_away(tmp_path: Path) -> None:
    """The real ranks connect nevertheless."""
    address = f"{tmp_path}/0"
    refused: list[str] = []
    with listen(address) as listener:
        found: dict[int, socket.socket] = {}
        meeting = threading.Thread(target=lambda: found.update(await_ranks(listener, 2, 30)))
        meeting.start()
        for rank, size in ((1, 3), (2, 2)):
            with pytest.raises(SetupError) as caught:
                join(address, rank, size, 30)
            refused.append(str(caught.value))
        joined = join(address, 1, 2, 30)
        meeting.join()
    for peer in (*joined.values(), *found.values()):
        peer.close()
    assert (list(joined), list(found)) == ([0], [1])
    assert all("rank 0 awaits ranks 1 to 1 of 2" in words for words in refused), refused


def test_ranks_that_do_not_come_are_named(tmp_path: Path) -> None:
    with listen(f"{tmp_path}/0") as listener:
        with pytest.raises(SetupError, match=r"rank 1, 2 of 3 is missing: they did not come within 0 s"):
            await_ranks(listener, 3, 0)
        with pytest.raises(SetupError, match="exited with code 1"):
            await_ranks(listener, 3, 60, lambda: "the process of rank 1 exited with code 1")
    with pytest.raises(SetupError, match="found no rank 0"):
        join(f"{tmp_path}/nobody", 1, 2, 30)
    with pytest.raises(SetupError, match="ranks cannot meet there"):
        listen("203.0.113.7:5555")

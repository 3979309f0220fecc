"""Faults that only NIXL can have: invalid agents, missing blocks, a lender that dies during a read."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest

from lent_kv import DIGEST, EPOCH, NUM_BLOCKS, NUM_ENTRIES, PLAIN, UNTOUCHED, Borrowing
from twostroke.errors import SetupError
from twostroke.kv_transfer import nixl_reads
from twostroke.kv_transfer.address import Address, listen
from twostroke.kv_transfer.frames import (
    FROM_BORROWER,
    All,
    EntriesReady,
    Fetch,
    LenderFrame,
    RemoteMemory,
    Terms,
    Valid,
    encode_frame,
    receive,
)
from twostroke.kv_transfer.geometry import KVGeometry, layout_facts
from twostroke.kv_transfer.memory import KVMemory
from twostroke.kv_transfer.nixl_reads import NixlAgent, check_nixl
from twostroke.kv_transfer.transport import Fetched, KVSource

GEOMETRY = KVGeometry({"model": "m"}, {"kernels": "k"}, layout_facts(PLAIN, "any"))
NUM_BYTES = NUM_BLOCKS * PLAIN.bytes_per_block
ROWS = (tuple(range(NUM_ENTRIES)),)
_CHILD = """
import sys, msgspec
from lent_kv import NUM_BLOCKS, PLAIN
from twostroke.kv_transfer.memory import KVMemory
from twostroke.kv_transfer.nixl_reads import NixlAgent
data = bytearray(b"7" * (NUM_BLOCKS * PLAIN.bytes_per_block))
agent = NixlAgent(KVMemory(PLAIN, memoryview(data)))
print(msgspec.msgpack.encode(agent.facts).hex(), flush=True)
with agent.lending():
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _with_nixl(need_nixl: Callable[[], None]) -> None:
    need_nixl()


def played(says: list[LenderFrame | Callable[[], object]]) -> tuple[Fetched, Borrowing, Fetch]:
    """Run a borrower that reads by NIXL from a lender that sends these frames; then call a function."""
    listener, address = listen(Address(host="127.0.0.1", by_nixl=True))
    is_over = threading.Event()
    heard: list[Fetch] = []

    def lend() -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            fetch = receive(connection, FROM_BORROWER)
            assert isinstance(fetch, Fetch)
            heard.append(fetch)
            for said in says:
                if isinstance(said, LenderFrame):
                    connection.sendall(encode_frame(said))
                else:
                    said()
            is_over.wait(60)

    lender = threading.Thread(target=lend)
    lender.start()
    borrowing = Borrowing(PLAIN, GEOMETRY, by_nixl=True)
    fetched = borrowing.fetch(KVSource(address, EPOCH, 1))
    is_over.set()
    lender.join()
    listener.close()
    return fetched, borrowing, heard[0]


@pytest.fixture
def lent() -> Iterator[NixlAgent]:
    """A pool in this process whose bytes are all 7."""
    agent = NixlAgent(KVMemory(PLAIN, memoryview(bytearray(b"\x07" * NUM_BYTES))))
    with agent.lending():
        yield agent


def test_blocks_are_read_and_nothing_is_sent(lent: NixlAgent) -> None:
    says = [Terms(GEOMETRY, NUM_BYTES, lent.facts), EntriesReady(0, 6, 0, 4, ROWS), All(DIGEST), Valid()]
    fetched, borrowing, fetch = played([*says])
    assert fetch.shares_memory
    assert (fetched.problem, fetched.num_bytes) == ("", NUM_ENTRIES * PLAIN.bytes_per_block)
    assert (borrowing.blocks == 7).sum() == fetched.num_bytes


@pytest.mark.parametrize(
    ("changed", "rows", "problem"),
    [
        ({}, ((0, 1, 2, 3, 4, NUM_BLOCKS),), "pages that it does not have: its memory ends at byte 40,960"),
        ({}, ((0, 1, 2, 3, 4, -1),), "pages that it does not have"),
        ({}, ((0, 1),), "not as many of its pages"),
        ({}, (), "not as many of its pages"),
        ({"agent": b"nobody"}, ROWS, "NIXL: "),
        ({"addresses": (4096,)}, ROWS, "NIXL: "),
        ({"addresses": ()}, ROWS, "memory of 0 ranks; it has 1"),
    ],
)
def test_memory_that_is_not_there_is_not_read(
    lent: NixlAgent, changed: dict[str, object], rows: tuple[tuple[int, ...], ...], problem: str
) -> None:
    remote = msgspec.structs.replace(lent.facts, **changed)
    fetched, borrowing, _ = played([Terms(GEOMETRY, NUM_BYTES, remote), EntriesReady(0, 6, 0, 4, rows)])
    assert problem in fetched.problem
    assert (borrowing.blocks == UNTOUCHED).all()


def test_a_lender_that_dies_between_two_reads_ends_the_second() -> None:
    """The lender's memory is in its own process, which is killed; the connection for messages stays open."""
    with subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{_CHILD}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        remote = msgspec.msgpack.decode(bytes.fromhex(child.stdout.readline()), type=RemoteMemory)

        def die() -> None:
            child.kill()
            child.wait()

        terms = Terms(GEOMETRY, NUM_BYTES, remote)
        fetched, borrowing, _ = played(
            [terms, EntriesReady(0, 3, 0, 4, (ROWS[0][:3],)), die, EntriesReady(3, 6, 0, 4, (ROWS[0][3:],))]
        )
    assert "NIXL" in fetched.problem
    assert fetched.num_bytes in (0, 3 * PLAIN.bytes_per_block)  # the first read may have been overtaken by the death
    assert (borrowing.blocks[list(borrowing.into.rows[0][3:])] == UNTOUCHED).all()


def test_who_has_it_not_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_reads.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SetupError, match=r"nixl needs NIXL, which is not installed. .*pip install 'twostroke\[nixl\]'"):
        check_nixl()

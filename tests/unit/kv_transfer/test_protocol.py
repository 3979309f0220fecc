"""Protocol of one side, frame by frame: messages that a peer must not send, and late ends of leases."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from lent_kv import DIGEST, EPOCH, NUM_ENTRIES, PLAIN, UNTOUCHED, Borrowing, Pools
from twostroke.config.layer_spec import KVSpec
from twostroke.kernels.head_order import HeadOrder, Section, plain_order
from twostroke.kernels.reference.kv_codec import recode
from twostroke.kv_transfer.address import Address, connect, listen
from twostroke.kv_transfer.block_import import BlockReading
from twostroke.kv_transfer.connection import Connection
from twostroke.kv_transfer.frames import (
    FROM_BORROWER,
    FROM_LENDER,
    PROTOCOL,
    All,
    Copied,
    EntriesReady,
    Fetch,
    FetchRefused,
    LenderFrame,
    Terms,
    TransferBroken,
    Valid,
    Waiting,
    encode_frame,
    receive,
    receive_exactly,
)
from twostroke.kv_transfer.geometry import KVGeometry, layout_facts
from twostroke.kv_transfer.transport import Fetched, KVSource

MakePools = Callable[..., Pools]
GEOMETRY = KVGeometry({"model": "m"}, {"kernels": "k"}, layout_facts(PLAIN, "any"))
NUM_BYTES = NUM_ENTRIES * PLAIN.bytes_per_block


def fetch_of(lent: Pools, **changed: object) -> Fetch:
    """Return the request that a borrower sends to get the bytes over the connection."""
    asked = {
        "protocol": PROTOCOL,
        "epoch": EPOCH,
        "lease_id": 1,
        "first_entries": (0,),
        "num_blocks": NUM_ENTRIES,
        "shares_memory": False,
        "geometry": lent.geometry,
        "allows_drift": False,
    }
    return Fetch(**{**asked, **changed})  # pyright: ignore


def asked(lent: Pools, question: Fetch) -> tuple[Connection, LenderFrame]:
    """Return a connection, and the first answer on it."""
    connection = lent.connect()
    connection.sendall(encode_frame(question))
    return connection, receive(connection, FROM_LENDER)


def test_a_lease_that_dies_after_its_last_byte_is_still_refused(make_pools: MakePools) -> None:
    lent = make_pools()
    lent.lend(1)
    connection, terms = asked(lent, fetch_of(lent))
    with connection:
        assert isinstance(terms, Terms)
        assert receive(connection, FROM_LENDER) == EntriesReady(0, NUM_ENTRIES, 0, 4, ())
        assert bytes(receive_exactly(connection, NUM_BYTES)) == lent.blocks[list(lent.rows[0])].tobytes()
        assert receive(connection, FROM_LENDER) == All(DIGEST)
        assert lent.over.empty()  # a reader holds the lease
        lent.lender.invalidate(1, "its blocks were taken")
        connection.sendall(encode_frame(Copied()))
        assert receive(connection, FROM_LENDER) == FetchRefused("its blocks were taken")
    assert lent.over.get(timeout=60) == 1


def test_a_reader_is_told_at_once_that_a_lease_dies(make_pools: MakePools) -> None:
    lent = make_pools()
    lent.lender.grant(1, NUM_ENTRIES)
    connection, _ = asked(lent, fetch_of(lent))
    with connection:
        lent.lender.begin_part(1, lent.rows, 2, is_computed=True)
        assert receive(connection, FROM_LENDER) == EntriesReady(0, 2, 0, 4, ())
        receive_exactly(connection, 2 * PLAIN.bytes_per_block)
        lent.lender.invalidate(1, "its request had to give way to others")
        assert receive(connection, FROM_LENDER) == FetchRefused("its request had to give way to others")


def test_a_reader_of_what_will_never_be_complete_is_told(make_pools: MakePools) -> None:
    lent = make_pools()
    lent.lender.grant(1, NUM_ENTRIES)
    connection, _ = asked(lent, fetch_of(lent))
    with connection:
        lent.lender.close()
        assert receive(connection, FROM_LENDER) == FetchRefused("the process that computed it has stopped")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"protocol": PROTOCOL + 1}, f"protocol {PROTOCOL + 1} there, {PROTOCOL} here. Run the same version"),
        ({"epoch": 0}, "is gone"),
        ({"first_entries": ()}, r"first entries \(\): one from 0 to 6 for each of 1 KV groups"),
        ({"first_entries": (0, 0)}, "for each of 1 KV groups"),
        ({"first_entries": (-1,)}, "one from 0 to 6"),
        ({"first_entries": (7,)}, "one from 0 to 6"),
        ({"num_blocks": 7}, "is of 6 blocks; 7 were asked for"),
    ],
)
def test_a_question_that_does_not_fit_is_refused(changed: dict[str, object], said: str, make_pools: MakePools) -> None:
    lent = make_pools()
    lent.lend(1)
    connection, answer = asked(lent, fetch_of(lent, **changed))
    with connection:
        assert isinstance(answer, FetchRefused)
        with pytest.raises(AssertionError, match=said):
            raise AssertionError(answer.reason)
    assert lent.lender.num_leases == 1


@pytest.mark.parametrize(
    "sent", [encode_frame(Copied()), b"\xff\xff\xff\xff", b"GET / HTTP/1.1\r\n\r\n", b"\x03\x00\x00\x00abc"]
)
def test_who_speaks_otherwise_is_hung_up_on(sent: bytes, make_pools: MakePools) -> None:
    lent = make_pools()
    lent.lend(1)
    with lent.connect() as connection:
        connection.sendall(sent)
        with pytest.raises((TransferBroken, ConnectionResetError)):
            receive(connection, FROM_LENDER)
    assert lent.borrowing().fetch(lent.source(1)).problem == ""  # the others are served


def test_a_borrower_that_says_nothing_is_hung_up_on(make_pools: MakePools) -> None:
    lent = make_pools(timeout_s=0.01)
    lent.lend(1)
    with lent.connect() as connection, pytest.raises(TransferBroken, match="closed the connection"):
        receive(connection, FROM_LENDER)
    connection, _ = asked(lent, fetch_of(lent))
    with connection:  # nor does one that has everything and does not say so keep the lease
        receive(connection, FROM_LENDER)
        receive_exactly(connection, NUM_BYTES)
        assert receive(connection, FROM_LENDER) == All(DIGEST)
        with pytest.raises(TransferBroken, match="closed the connection"):
            receive(connection, FROM_LENDER)
    assert lent.lender.num_leases == 1


def played(says: list[LenderFrame | bytes], *, timeout_s: float = 30, **options: Any) -> tuple[Fetched, Borrowing]:
    """Run our borrower against a lender that sends these frames over TCP and then waits."""
    listener, address = listen(Address(host="127.0.0.1"))
    is_over = threading.Event()

    def lend() -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):  # the borrower may hang up in the middle
            receive(connection, FROM_BORROWER)
            for said in says:
                connection.sendall(said if isinstance(said, bytes) else encode_frame(said))
            is_over.wait(60)

    lender = threading.Thread(target=lend)
    lender.start()
    borrowing = Borrowing(PLAIN, GEOMETRY, timeout_s=timeout_s, **options)
    with listener:
        fetched = borrowing.fetch(KVSource(address, EPOCH, 1))
        is_over.set()
        lender.join()
    return fetched, borrowing


def saying(**layout: str) -> KVGeometry:
    """Return the geometry of a lender with another layout of blocks."""
    return replace(GEOMETRY, layout={**GEOMETRY.layout, **layout})


TERMS = Terms(GEOMETRY, 0)
HALF = bytes(NUM_BYTES // 2)


@pytest.mark.parametrize(
    ("says", "problem"),
    [
        ([FetchRefused("it is raining")], "it is raining"),
        ([Waiting()], "expected Terms, not Waiting"),
        ([Terms(KVGeometry({"model": "n"}, {}, {}), 0)], "models differ"),
        ([Terms(saying(block_size="8"), 0)], "its blocks have 8 tokens; blocks of 4 were asked for"),
        ([Terms(saying(block_size="6"), 0)], "block_size is 4 here and 6 there"),
        ([Terms(saying(block_size=""), 0)], "block layouts differ"),
        ([Terms(saying(ranks="3"), 0)], "2 KV heads cannot be dealt among its 3 ranks"),
        ([Terms(saying(ranks="0"), 0)], "among its 0 ranks"),
        ([TERMS, Valid()], "unexpected: Valid"),
        ([TERMS, All(DIGEST)], "sent 0 of 6 entries"),
        ([TERMS, EntriesReady(0, 3, 0, 4, ()), HALF, All(DIGEST)], "sent 3 of 6 entries"),
        ([TERMS, EntriesReady(0, 3, 0, 4, ()), HALF, EntriesReady(0, 3, 0, 4, ())], "entry 3 is due, in layer 0"),
        ([TERMS, EntriesReady(0, 6, 0, 2, ()), HALF, EntriesReady(0, 6, 1, 3, ())], "entry 0 is due, in layer 2"),
        ([TERMS, EntriesReady(0, 6, 0, 2, ()), HALF, EntriesReady(0, 3, 2, 4, ())], "entry 0 is due, in layer 2"),
        ([TERMS, EntriesReady(0, 7, 0, 4, ())], "entries 0 to 7"),
        ([TERMS, EntriesReady(0, 6, 0, 5, ())], "layers 0 to 5"),
        ([TERMS, EntriesReady(0, 0, 0, 4, ())], "entries 0 to 0"),
        ([TERMS, EntriesReady(-1, 6, 0, 4, ())], "entries -1 to 6"),
        ([TERMS, EntriesReady(0, 6, 0, 4, ()), HALF, HALF, All(DIGEST), All(DIGEST)], "unexpected: All"),
        ([TERMS, EntriesReady(0, 6, 0, 4, ()), HALF, HALF, All(DIGEST), FetchRefused("too late")], "too late"),
        ([b"\x01\x00\x00\x00\xc1"], "not understood"),
    ],
)
def test_a_lender_that_says_what_is_not_due_is_not_believed(says: list[LenderFrame | bytes], problem: str) -> None:
    fetched, _ = played(says)
    assert problem in fetched.problem


CONVERTING: dict[str, Any] = {
    "allows_drift": True,
    "reading": BlockReading(lambda kv, _: plain_order(PLAIN.kv_format, kv.head_dim), recode),
}
INT8 = replace(GEOMETRY, numerics={**GEOMETRY.numerics, "kv_cache_dtype": "int8"})


@pytest.mark.parametrize(
    ("terms", "problem"),
    [
        (Terms(INT8, 0), "its blocks have another format, which this process cannot convert"),
        (Terms(INT8, 0, orders=(plain_order("bf16", 8),)), "blocks of int8 do not lie as it says"),
        (Terms(INT8, 0, orders=(HeadOrder((Section(3, 12, 1),), (Section(1, 12, 1),)),)), "do not lie as it says"),
        (Terms(INT8, 0, orders=(HeadOrder((), ()),)), "do not lie as it says"),
        (Terms(INT8, 0, orders=(HeadOrder((Section(1, -12, -1),), (Section(1, 1, 12),)),)), "do not lie as it says"),
        (Terms(INT8, 0, orders=(dataclasses.replace(plain_order("int8", 8), halves=16),)), "do not lie as it says"),
        (Terms(replace(INT8, numerics={"kv_cache_dtype": "int9"}), 0), "kv_cache_dtype=int9: no KV format"),
    ],
)
def test_blocks_that_cannot_lie_so_are_not_converted(terms: Terms, problem: str) -> None:
    fetched, borrowing = played([terms], **CONVERTING)
    assert problem in fetched.problem
    assert (borrowing.blocks == UNTOUCHED).all()


def test_whoever_waits_is_told_of_a_fault_of_our_own() -> None:
    """A thread that died of it would leave the request waiting for ever."""

    def order(kv: KVSpec, size: int) -> HeadOrder:
        raise KeyError(kv.head_dim, size)

    terms = Terms(INT8, 0, orders=(plain_order("int8", 8),))
    fetched, borrowing = played([terms], allows_drift=True, reading=BlockReading(order, recode))
    assert "its KV could not be stored: (8, 4)" in fetched.problem
    assert (borrowing.blocks == UNTOUCHED).all()


def test_blocks_of_another_format_are_refused_without_permission() -> None:
    fetched, _ = played([Terms(INT8, 0, orders=(plain_order("int8", 8),))], reading=CONVERTING["reading"])
    assert "numerics differ: kv_cache_dtype is absent here and int8 there" in fetched.problem


def test_a_lender_that_says_all_that_is_due_is_believed() -> None:
    fetched, borrowing = played(
        [TERMS, Waiting(), EntriesReady(0, 6, 0, 4, ()), HALF, HALF, Waiting(), All(DIGEST), Valid()]
    )
    assert (fetched.problem, fetched.num_bytes) == ("", NUM_BYTES)
    assert (borrowing.blocks == 0).sum() == NUM_BYTES


@pytest.mark.parametrize("says", [[], [TERMS], [TERMS, EntriesReady(0, 6, 0, 4, ()), HALF], [TERMS, b"\x01"]])
def test_a_lender_that_falls_silent_is_given_up(says: list[LenderFrame | bytes]) -> None:
    fetched, _ = played(says, timeout_s=0.05)
    assert "has said nothing for 0.05 s" in fetched.problem


@pytest.mark.parametrize(
    ("num_bytes", "rows", "problem"),
    [
        (2 * PLAIN.bytes_per_block, ((0, 1, 0, 1, 0, 2),), "pages that it does not have: it has 2"),
        (2 * PLAIN.bytes_per_block, ((0, 1, 0, 1, 0, -1),), "pages that it does not have"),
        (2 * PLAIN.bytes_per_block, ((0, 1),), "not as many of its pages"),
        (2 * PLAIN.bytes_per_block, (), "not as many of its pages"),
        (2 * PLAIN.bytes_per_block + 1, ((0, 1, 0, 1, 0, 1),), "cannot use its memory"),
        (3 * PLAIN.bytes_per_block, ((0, 1, 0, 1, 0, 1),), "cannot use its memory"),
    ],
)
def test_memory_that_is_not_there_is_not_read(
    num_bytes: int, rows: tuple[tuple[int, ...], ...], problem: str, tmp_path: Path
) -> None:
    """The lender shares two blocks."""
    listener, address = listen(Address(path=str(tmp_path / "kv")))
    shared = (tmp_path / "shared").open("w+b")
    shared.truncate(2 * PLAIN.bytes_per_block + 1)
    is_over = threading.Event()

    def lend() -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            receive(connection, FROM_BORROWER)
            terms = encode_frame(Terms(GEOMETRY, num_bytes))
            socket.send_fds(connection, [terms], [shared.fileno()])
            connection.sendall(encode_frame(EntriesReady(0, NUM_ENTRIES, 0, 4, rows)))
            is_over.wait(60)

    lender = threading.Thread(target=lend)
    lender.start()
    with listener, shared:
        fetched = Borrowing(PLAIN, GEOMETRY).fetch(KVSource(address, EPOCH, 1))
        is_over.set()
        lender.join()
    assert problem in fetched.problem


def test_memory_of_some_of_its_ranks_is_not_read(tmp_path: Path) -> None:
    listener, address = listen(Address(path=str(tmp_path / "kv")))
    shared = (tmp_path / "shared").open("w+b")
    shared.truncate(2 * PLAIN.bytes_per_block)

    def lend() -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            receive(connection, FROM_BORROWER)
            socket.send_fds(
                connection, [encode_frame(Terms(saying(ranks="2"), 2 * PLAIN.bytes_per_block))], [shared.fileno()]
            )
            connection.recv(1)

    lender = threading.Thread(target=lend)
    lender.start()
    with listener, shared:
        fetched = Borrowing(PLAIN, GEOMETRY).fetch(KVSource(address, EPOCH, 1))
        lender.join()
    assert "memory of 1 ranks; it has 2" in fetched.problem


def test_a_prefix_that_is_no_whole_blocks_of_the_lenders_is_not_asked_for(make_pools: MakePools) -> None:
    lent = make_pools()
    lent.lend(1)
    fetched = Borrowing(PLAIN, lent.geometry).fetch(lent.source(1, block_size=16))
    assert "24 tokens are no whole pages of 16" in fetched.problem
    assert lent.lender.num_leases == 1


def test_nobody_is_there(tmp_path: Path) -> None:
    for address in (Address(path=str(tmp_path / "nobody")), Address(host="127.0.0.1", port=1)):
        assert str(address) in Borrowing(PLAIN, GEOMETRY).fetch(KVSource(address, EPOCH, 1)).problem
        with pytest.raises(OSError, match=r"No such file|refused"):
            connect(address, 1)

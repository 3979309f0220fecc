"""Frames between two sockets: what is said arrives, and what no peer of ours would say is refused."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
from hypothesis import given

from twostroke.kernels.native.kv_order import head_order
from twostroke.kv_transfer.frames import (
    FROM_BORROWER,
    FROM_LENDER,
    All,
    BorrowerFrame,
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
    receive_pieces,
    send_pieces,
)
from twostroke.kv_transfer.geometry import KVGeometry

GEOMETRY = KVGeometry({"model": "m"}, {"kernels": "k"}, {"block_size": "4"})
LENDER_SAYS: list[LenderFrame] = [
    FetchRefused("no"),
    Terms(GEOMETRY, 1 << 40, orders=(head_order("int4", 32, 16),)),
    EntriesReady(0, 2, 3, 4, ((7, 8), (9, 1))),
    Waiting(),
    All(b"\x00\xff"),
    Valid(),
]
BORROWER_SAYS: list[BorrowerFrame] = [Fetch(1, 2**63, 3, (0, 4), 9, True, GEOMETRY, False), Copied()]


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    here, there = socket.socketpair()
    with here, there:
        here.settimeout(10)
        there.settimeout(10)
        yield here, there


@pytest.mark.parametrize("said", LENDER_SAYS, ids=lambda said: type(said).__name__)
def test_what_the_lender_says_arrives(said: LenderFrame, ends: tuple[socket.socket, socket.socket]) -> None:
    ends[0].sendall(encode_frame(said))
    assert receive(ends[1], FROM_LENDER) == said


@pytest.mark.parametrize("said", BORROWER_SAYS, ids=lambda said: type(said).__name__)
def test_what_the_borrower_says_arrives(said: BorrowerFrame, ends: tuple[socket.socket, socket.socket]) -> None:
    ends[0].sendall(encode_frame(said))
    assert receive(ends[1], FROM_BORROWER) == said


def test_a_frame_may_come_in_bytes(ends: tuple[socket.socket, socket.socket]) -> None:
    for byte in encode_frame(LENDER_SAYS[2]):
        ends[0].send(bytes([byte]))
    assert receive(ends[1], FROM_LENDER) == LENDER_SAYS[2]


@pytest.mark.parametrize("said", [*LENDER_SAYS, *BORROWER_SAYS], ids=lambda said: type(said).__name__)
def test_the_end_of_the_connection_inside_a_frame_is_said(said: LenderFrame | BorrowerFrame) -> None:
    data = encode_frame(said)
    for length in range(len(data)):
        here, there = socket.socketpair()
        with here, there:
            here.sendall(data[:length])
            here.close()
            with pytest.raises(TransferBroken, match="closed the connection"):
                receive(there, FROM_LENDER if type(said) in map(type, LENDER_SAYS) else FROM_BORROWER)


def test_a_frame_that_is_too_long_is_refused_unread(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[0].sendall((2**32 - 1).to_bytes(4, "little"))
    with pytest.raises(TransferBroken, match=r"4,294,967,295 bytes, at most 1,048,576"):
        receive(ends[1], FROM_LENDER)


@given(body=st.binary(max_size=60))
def test_garbage_is_refused_or_a_frame(body: bytes) -> None:
    here, there = socket.socketpair()
    with here, there:
        here.sendall(len(body).to_bytes(4, "little") + body)
        try:
            said = receive(there, FROM_LENDER)
        except TransferBroken as error:
            assert "not understood" in str(error)  # noqa: PT017
        else:
            assert isinstance(said, LenderFrame)


def test_the_other_sides_words_are_garbage(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[0].sendall(encode_frame(Copied()))
    with pytest.raises(TransferBroken, match="another version"):
        receive(ends[1], FROM_LENDER)


def test_a_silent_peer_is_waited_for_so_long(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[1].settimeout(0.01)
    with pytest.raises(TimeoutError):
        receive(ends[1], FROM_LENDER)


@given(
    sizes=st.lists(st.integers(1, 300), max_size=200),
    cuts=st.lists(st.integers(1, 300), min_size=1, max_size=20),
)
def test_pieces_arrive_however_both_sides_cut_them(sizes: list[int], cuts: list[int]) -> None:
    data = bytes(index % 251 for index in range(sum(sizes)))
    pieces = list(_cut(memoryview(data), sizes))
    got = bytearray(len(data))
    places = list(_cut(memoryview(got), cuts))
    here, there = socket.socketpair()
    with here, there:
        sender = threading.Thread(target=send_pieces, args=(here, pieces))
        sender.start()
        receive_pieces(there, places)
        sender.join()
    assert got == data


def test_pieces_of_megabytes_arrive(ends: tuple[socket.socket, socket.socket]) -> None:
    data = bytes(range(256)) * (3 << 14)  # 12 MiB: no buffer takes it at once
    got = bytearray(len(data))
    sender = threading.Thread(target=send_pieces, args=(ends[0], list(_cut(memoryview(data), [5 << 20, 1, 70_000]))))
    sender.start()
    receive_pieces(ends[1], list(_cut(memoryview(got), [100_000, 3 << 20])))
    sender.join()
    assert got == data


def test_the_end_of_the_connection_inside_pieces_is_said(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[0].sendall(b"123")
    ends[0].close()
    with pytest.raises(TransferBroken, match="closed the connection"):
        receive_pieces(ends[1], [memoryview(bytearray(2)), memoryview(bytearray(2))])


def _cut(data: memoryview, sizes: list[int]) -> Iterator[memoryview]:
    """Cut into pieces of these sizes, repeatedly."""
    index = 0
    while len(data):
        size = sizes[index % len(sizes)]
        yield data[:size]
        data, index = data[size:], index + 1

"""A communicator over connected stream sockets, one between any two ranks: socket pairs on a host, TCP across hosts."""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Mapping, Sequence

from twostroke.errors import RankLost

_HEADER = struct.Struct("<QQ")
"""The number of the operation, and the bytes that follow: ranks that are not in the same operation notice."""

_READ, _WRITE = select.POLLIN, select.POLLOUT


class SocketCommunicator:
    """Sends and receives at once, so that buffers of any size pass each other. Waiting takes no processor time.

    The kernel closes the sockets of a process that dies, in whatever way, so the others notice at once.
    """

    def __init__(self, rank: int, peers: Mapping[int, socket.socket]) -> None:
        """Takes over connected sockets to all other ranks, by rank."""
        self._rank, self._size = rank, len(peers) + 1
        assert sorted((*peers, rank)) == list(range(self._size)), (rank, sorted(peers))
        self._peers = dict(peers)
        self._operation = 0
        for peer in self._peers.values():
            peer.setblocking(False)
            if peer.family in (socket.AF_INET, socket.AF_INET6):  # small messages, each waited for
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def rank(self) -> int:
        """See Communicator."""
        return self._rank

    @property
    def size(self) -> int:
        """See Communicator."""
        return self._size

    def all_gather(self, local: memoryview, out: Sequence[memoryview]) -> None:
        """See Communicator."""
        assert len(out) == self._size, (len(out), self._size)
        assert out[self._rank].nbytes == local.nbytes, (out[self._rank].nbytes, local.nbytes)
        self._operation += 1
        local = local.cast("B")
        header = _HEADER.pack(self._operation, local.nbytes)
        headers = {rank: bytearray(_HEADER.size) for rank in self._peers}
        self._exchange(
            {rank: [memoryview(header), local] for rank in self._peers},
            {rank: [memoryview(headers[rank]), out[rank].cast("B")] for rank in self._peers},
        )
        for rank, received in headers.items():
            self._check(rank, bytes(received), out[rank].nbytes)
        out[self._rank].cast("B")[:] = local

    def broadcast(self, message: bytes | None) -> bytes:
        """See Communicator."""
        self._operation += 1
        if self._rank == 0:
            assert message is not None, "rank 0 says what is sent"
            header = _HEADER.pack(self._operation, len(message))
            self._exchange({rank: [memoryview(header), memoryview(message)] for rank in self._peers}, {})
            return message
        received = bytearray(_HEADER.size)
        self._exchange({}, {0: [memoryview(received)]})
        operation, num_bytes = _HEADER.unpack(received)
        self._check(0, _HEADER.pack(operation, num_bytes), num_bytes)
        body = bytearray(num_bytes)
        self._exchange({}, {0: [memoryview(body)]})
        return bytes(body)

    def barrier(self) -> None:
        """See Communicator."""
        nothing = memoryview(b"")
        self.all_gather(nothing, [memoryview(bytearray()) for _ in range(self._size)])

    def close(self) -> None:
        """See Communicator."""
        for peer in self._peers.values():
            peer.close()

    def _check(self, rank: int, header: bytes, num_bytes: int) -> None:
        found = _HEADER.unpack(header)
        if found != (self._operation, num_bytes):
            raise RankLost(
                rank,
                f"it sent {found[1]} bytes in its operation {found[0]}, rank {self._rank} awaited {num_bytes} bytes in "
                f"operation {self._operation}",
            )

    def _exchange(self, sends: dict[int, list[memoryview]], receives: dict[int, list[memoryview]]) -> None:
        """Sends and fills buffers of several ranks, whichever is ready first."""
        for buffers in (*sends.values(), *receives.values()):
            _drop_done(buffers)
        ranks = {peer.fileno(): rank for rank, peer in self._peers.items()}
        while True:
            poll, num_open = select.poll(), 0
            for descriptor, rank in ranks.items():
                self._send(rank, sends.get(rank, []))
                self._receive(rank, receives.get(rank, []))
                wanted = (_WRITE if sends.get(rank) else 0) | (_READ if receives.get(rank) else 0)
                if wanted:
                    num_open += 1
                    poll.register(descriptor, wanted)
            if not num_open:
                return
            poll.poll()

    def _send(self, rank: int, buffers: list[memoryview]) -> None:
        try:
            while buffers:
                num_sent = self._peers[rank].sendmsg(buffers)
                _take(buffers, num_sent)
        except BlockingIOError:
            return
        except OSError as error:
            raise RankLost(rank, f"nothing can be sent to it ({error})") from error

    def _receive(self, rank: int, buffers: list[memoryview]) -> None:
        try:
            while buffers:
                num_received = self._peers[rank].recv_into(buffers[0])
                if not num_received:
                    raise RankLost(rank, "its process has ended")
                _take(buffers, num_received)
        except BlockingIOError:
            return
        except OSError as error:
            raise RankLost(rank, f"nothing can be received from it ({error})") from error


def _take(buffers: list[memoryview], num_bytes: int) -> None:
    """Takes what has been sent or filled off the front."""
    while num_bytes and buffers:
        done = min(num_bytes, buffers[0].nbytes)
        buffers[0] = buffers[0][done:]
        num_bytes -= done
        _drop_done(buffers)


def _drop_done(buffers: list[memoryview]) -> None:
    while buffers and not buffers[0].nbytes:
        del buffers[0]


def socket_mesh(size: int) -> list[dict[int, socket.socket]]:
    """Connected pairs between `size` ranks of one host: for each rank, its sockets by the rank at their other end."""
    found: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    for first in range(size):
        for second in range(first + 1, size):
            found[first][second], found[second][first] = socket.socketpair()
    return found

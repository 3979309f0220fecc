"""A communicator over connected stream sockets, one between any two ranks, on one host or several."""

from __future__ import annotations

import ctypes
import select
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from twostroke.errors import RankLost

if TYPE_CHECKING:
    from torch import Tensor

_HEADER = struct.Struct("<QQ")
"""Number of the operation and of the bytes that follow, so that ranks in different operations notice."""

_READ, _WRITE = select.POLLIN, select.POLLOUT
_HUNG_UP = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR

_KEEP_ALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 15_000))
"""Keep-alive options. A host that is gone cannot close its sockets; the kernel does so after a quarter of a minute of
silence."""


class SocketCommunicator:
    """A communicator that sends and receives at the same time, so buffers of any size cannot deadlock. Waiting sleeps.

    The kernel closes the sockets of a process that dies, for any reason, so the others notice at once.
    """

    def __init__(self, rank: int, peers: Mapping[int, socket.socket]) -> None:
        """Take over connected sockets to all other ranks, by rank."""
        self._rank, self._size = rank, len(peers) + 1
        assert sorted((*peers, rank)) == list(range(self._size)), (rank, sorted(peers))
        self._peers = dict(peers)
        self._operation = 0
        self._hang_ups = select.poll()
        self._ranks: dict[int, int] = {}
        """Rank by the descriptor of its socket."""
        for peer_rank, peer in self._peers.items():
            peer.setblocking(False)
            if peer.family in (socket.AF_INET, socket.AF_INET6):
                _set_options(peer)
            self._ranks[peer.fileno()] = peer_rank
            self._hang_ups.register(peer, _HUNG_UP & ~_READ)

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @property
    def own_host(self) -> str:
        """Host of this rank, as the first of the others reaches it."""
        name = next(iter(self._peers.values())).getsockname()
        return "127.0.0.1" if isinstance(name, str) else name[0]

    def all_gather(self, local: Tensor, out: Tensor, widths: Sequence[int], num_rows: int = 1) -> None:
        self._gather(local.data_ptr(), out.data_ptr(), widths, num_rows)

    def _gather(self, local: int, out: int, widths: Sequence[int], num_rows: int) -> None:
        """Gather from address `local` to address `out`."""
        assert len(widths) == self._size, (len(widths), self._size)
        self._operation += 1
        sent = _memory(local, num_rows * widths[self._rank])
        header = memoryview(_HEADER.pack(self._operation, sent.nbytes))
        parts = {rank: memoryview(bytearray(num_rows * widths[rank])) for rank in self._peers}
        self._exchange(
            {rank: [header, sent] for rank in self._peers},
            {rank: _Incoming(self, rank, part) for rank, part in parts.items()},
        )
        whole = np.frombuffer(_memory(out, num_rows * sum(widths)), np.uint8).reshape(num_rows, -1)
        begin = 0
        for rank, width in enumerate(widths):
            part = np.frombuffer(parts.get(rank, sent), np.uint8)
            whole[:, begin : begin + width] = part.reshape(num_rows, width)
            begin += width

    def broadcast(self, message: bytes | None) -> bytes:
        self._operation += 1
        if self._rank == 0:
            assert message is not None, "rank 0 says what is sent"
            header = memoryview(_HEADER.pack(self._operation, len(message)))
            self._exchange({rank: [header, memoryview(message)] for rank in self._peers}, {})
            return message
        incoming = _Incoming(self, 0, None)
        self._exchange({}, {0: incoming})
        return bytes(incoming.body)

    def barrier(self) -> None:
        self._gather(0, 0, [0] * self._size, 1)

    def verify(self) -> None:
        """Do nothing: a gather is complete when it returns."""

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()

    def check_ranks(self, wait_ms: int) -> None:
        for descriptor, _ in self._hang_ups.poll(wait_ms):
            raise RankLost(self._ranks[descriptor], "its process has ended")

    def check_header(self, rank: int, operation: int, num_bytes: int, awaited: int) -> None:
        """Check a rank's header against the current operation.

        Raises:
            RankLost: the rank is in another operation, or sends another number of bytes.
        """
        if (operation, num_bytes) != (self._operation, awaited):
            raise RankLost(
                rank,
                f"it sent {num_bytes} bytes in its operation {operation}, rank {self._rank} awaited {awaited} bytes in "
                f"operation {self._operation}",
            )

    def _exchange(self, sends: dict[int, list[memoryview]], receives: dict[int, _Incoming]) -> None:
        """Send buffers to some ranks and fill buffers from some, in the order in which sockets become ready."""
        while True:
            poll, num_open = select.poll(), 0
            for rank, peer in self._peers.items():
                self._send(rank, sends.get(rank, []))
                incoming = receives.get(rank)
                if incoming is not None:
                    self._receive(rank, incoming)
                wanted = (_WRITE if sends.get(rank) else 0) | (_READ if incoming and incoming.missing else 0)
                if wanted:
                    num_open += 1
                    poll.register(peer, wanted)
            if not num_open:
                return
            poll.poll()

    def _send(self, rank: int, buffers: list[memoryview]) -> None:
        try:
            while buffers:
                _consume(buffers, self._peers[rank].sendmsg(buffers))
        except BlockingIOError:
            return
        except OSError as error:
            raise RankLost(rank, f"nothing can be sent to it ({error})") from error

    def _receive(self, rank: int, incoming: _Incoming) -> None:
        try:
            while incoming.missing:
                num_received = self._peers[rank].recvmsg_into(incoming.missing)[0]
                if not num_received:
                    raise RankLost(rank, "its process has ended")
                incoming.received(num_received)
        except BlockingIOError:
            return
        except OSError as error:
            raise RankLost(rank, f"nothing can be received from it ({error})") from error


class _Incoming:
    """A header and the bytes that it announces; the header is checked before the rest arrives."""

    def __init__(self, owner: SocketCommunicator, rank: int, body: memoryview | None) -> None:
        """Prepare to receive into `body`; None: the header tells the size."""
        self._owner, self._rank = owner, rank
        self._header = bytearray(_HEADER.size)
        self._has_header = False
        self._body = body
        self.missing = [memoryview(self._header)] + ([] if body is None else [body])
        """Buffers still to be filled, in order."""

    @property
    def body(self) -> memoryview:
        """Bytes received, once nothing is missing."""
        assert self._body is not None, "the header has not come"
        return self._body

    def received(self, num_bytes: int) -> None:
        """Record that more bytes have arrived."""
        in_header = 0 if self._has_header else self.missing[0].nbytes
        _consume(self.missing, num_bytes)
        if not self._has_header and num_bytes >= in_header:
            self._has_header = True
            operation, announced = _HEADER.unpack(self._header)
            if self._body is None:
                self._owner.check_header(self._rank, operation, announced, announced)
                self._body = memoryview(bytearray(announced))
                self.missing = [self._body] if announced else []
            else:
                self._owner.check_header(self._rank, operation, announced, self._body.nbytes)


def _consume(buffers: list[memoryview], num_bytes: int) -> None:
    """Remove bytes that were sent or filled from the front of the buffers, and buffers that are empty."""
    while buffers and num_bytes >= buffers[0].nbytes:
        num_bytes -= buffers[0].nbytes
        del buffers[0]
    if num_bytes:
        buffers[0] = buffers[0][num_bytes:]


def _memory(address: int, num_bytes: int) -> memoryview:
    """Return the memory at an address."""
    if not num_bytes:
        return memoryview(bytearray())
    return memoryview((ctypes.c_ubyte * num_bytes).from_address(address)).cast("B")


def _set_options(connection: socket.socket) -> None:
    """Set socket options: no delay, because each message is waited for, and keep-alive (see _KEEP_ALIVE)."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE:
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

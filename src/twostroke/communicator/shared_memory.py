"""A communicator of ranks on one host: what is gathered goes through memory that all of them map.

Sockets beside it carry what is waited for long (broadcasts, barriers), and tell who is gone.
"""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from twostroke.communicator.sockets import SocketCommunicator
from twostroke.errors import RankLost
from twostroke.log import get_logger

if TYPE_CHECKING:
    from torch import Tensor

log = get_logger(__name__)

_SLOT_BYTES = 1 << 18
"""Of each rank and each of two rounds; a gather of more takes several rounds."""

_PATIENCE_US = 1000
"""So long the ranks of a step are waited for with a processor."""


class SharedMemoryCommunicator:
    """Ranks that compute the same step come within microseconds: they wait for each other awake, for a millisecond."""

    def __init__(self, rank: int, peers: Mapping[int, socket.socket], memory: mmap.mmap) -> None:
        """Takes over Unix sockets to all other ranks, and memory of `num_shared_bytes`, zero at first."""
        from twostroke.kernels.native.extension import native

        self._sockets = SocketCommunicator(rank, peers)
        self._memory = memory
        address = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
        self._gather = native.SharedGather(address, rank, self.size, _SLOT_BYTES)

    @property
    def rank(self) -> int:
        return self._sockets.rank

    @property
    def size(self) -> int:
        return self._sockets.size

    def all_gather(self, local: Tensor, out: Tensor, widths: Sequence[int], num_rows: int = 1) -> None:
        self._gather.start(local.data_ptr(), out.data_ptr(), widths, num_rows)
        num_waits, awaited = 0, 0
        try:
            while (awaited := self._gather.advance(_PATIENCE_US)) >= 0:
                self._check_others(wait_ms=min(num_waits, 10))
                num_waits += 1
        except RuntimeError as error:
            raise RankLost(awaited, str(error)) from None

    def _check_others(self, wait_ms: int) -> None:
        """Raise RankLost if a rank is gone before it left its part of the gather; wait for that a little."""
        try:
            self._sockets.check_others(wait_ms)
        except RankLost:
            # A rank that ended behind its last gather has left its part in memory.
            if self._gather.advance(0) >= 0:
                raise

    def broadcast(self, message: bytes | None) -> bytes:
        return self._sockets.broadcast(message)

    def barrier(self) -> None:
        self._sockets.barrier()

    def verify(self) -> None:
        """See Communicator. What `all_gather` returns from is done."""

    @property
    def own_host(self) -> str:
        return self._sockets.own_host

    def check_others(self, wait_ms: int) -> None:
        self._sockets.check_others(wait_ms)

    def close(self) -> None:
        self._sockets.close()


def num_shared_bytes(size: int) -> int:
    """What so many ranks map.

    Raises:
        ImportError: the native module was not built.
    """
    from twostroke.kernels.native.extension import native

    return native.SharedGather.memory_bytes(size, _SLOT_BYTES)


def share_memory(rank: int, peers: Mapping[int, socket.socket]) -> mmap.mmap | None:
    """Memory that all ranks of this host map, from rank 0 to the others through the sockets between them.

    Args:
        rank: this one; all call it.
        peers: Unix sockets to the others, by rank; blocking.

    Returns:
        None, to everybody, where rank 0 finds that there is none: then sockets serve.

    Raises:
        OSError: another rank is gone.
    """
    if rank == 0:
        descriptor, num_bytes = _make(len(peers) + 1)
        for peer in peers.values():
            socket.send_fds(peer, [num_bytes.to_bytes(8, "little")], [] if descriptor is None else [descriptor])
    else:
        said, descriptors, _, _ = socket.recv_fds(peers[0], 8, 1)
        descriptor, num_bytes = next(iter(descriptors), None), int.from_bytes(said, "little")
    if descriptor is None:
        return None
    try:
        return mmap.mmap(descriptor, num_bytes)
    finally:
        os.close(descriptor)


def _make(size: int) -> tuple[int | None, int]:
    try:
        num_bytes = num_shared_bytes(size)
        descriptor = os.memfd_create("twostroke-ranks", os.MFD_CLOEXEC)
    except (ImportError, AttributeError, OSError) as error:  # not built; not on Linux: no such call
        log.warning("ranks have no memory in common (%s); they gather through sockets, slower", error)
        return None, 0
    os.ftruncate(descriptor, num_bytes)
    return descriptor, num_bytes

"""A communicator of ranks on one host, which gathers through memory that all of them map.

Sockets carry operations with long waits (broadcasts, barriers), and show which ranks are gone.
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
"""Bytes of a slot for each rank and each of two rounds; a larger gather takes several rounds."""

_TIMEOUT_US = 1000
"""Microseconds of busy waiting for the other ranks of a step."""


class SharedMemoryCommunicator:
    """A communicator through shared memory.

    Ranks that compute the same step arrive within microseconds, so they wait for each other busily, for a millisecond.
    """

    def __init__(self, rank: int, peers: Mapping[int, socket.socket], memory: mmap.mmap) -> None:
        """Take over Unix sockets to all other ranks, and zeroed memory of `num_shared_bytes`."""
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
            while (awaited := self._gather.advance(_TIMEOUT_US)) >= 0:
                self._check_others(wait_ms=min(num_waits, 10))
                num_waits += 1
        except RuntimeError as error:
            raise RankLost(awaited, str(error)) from None

    def _check_others(self, wait_ms: int) -> None:
        """Wait briefly; raise RankLost if a rank is gone and its part of the gather is missing."""
        try:
            self._sockets.check_ranks(wait_ms)
        except RankLost:
            # A rank that ended after its last gather has written its part.
            if self._gather.advance(0) >= 0:
                raise

    def broadcast(self, message: bytes | None) -> bytes:
        return self._sockets.broadcast(message)

    def barrier(self) -> None:
        self._sockets.barrier()

    def verify(self) -> None:
        """Do nothing: a gather is complete when it returns."""

    @property
    def own_host(self) -> str:
        return self._sockets.own_host

    def check_ranks(self, wait_ms: int) -> None:
        self._sockets.check_ranks(wait_ms)

    def close(self) -> None:
        self._sockets.close()


def num_shared_bytes(size: int) -> int:
    """Return the size of the memory that so many ranks share.

    Raises:
        ImportError: the native module was not built.
    """
    from twostroke.kernels.native.extension import native

    return native.SharedGather.memory_bytes(size, _SLOT_BYTES)


def share_memory(rank: int, peers: Mapping[int, socket.socket]) -> mmap.mmap | None:
    """Create shared memory on rank 0, pass it to the other ranks through their sockets, and map it on all.

    Args:
        rank: this one; all call it.
        peers: Unix sockets to the others, by rank; blocking.

    Returns:
        The memory; None on all ranks if rank 0 cannot create it: then sockets are used.

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
    except (ImportError, AttributeError, OSError) as error:  # not built, or not Linux
        log.warning("ranks cannot share memory (%s); they gather through sockets, which is slower", error)
        return None, 0
    os.ftruncate(descriptor, num_bytes)
    return descriptor, num_bytes

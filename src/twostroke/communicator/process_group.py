"""A communicator whose gathers stay on the device: torch.distributed's NCCL between GPUs, and gloo between CPUs for
tests.

A second communicator over sockets carries broadcasts and barriers, which wait without CPU time, and shows which ranks
are gone.
"""

from __future__ import annotations

import datetime
import socket
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from twostroke.communicator.interface import WatchedCommunicator
from twostroke.errors import RankLost

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend  # pyright: ignore[reportPrivateImportUsage]

TIMEOUT = datetime.timedelta(minutes=10)
"""Time limit for a rank that neither arrives nor ends. A rank that ends is noticed at once."""
_POLL_MS = 100
_NOTICE_S = 5.0
"""Seconds for the sockets to show which rank is gone, after a gather failed."""


class ProcessGroupCommunicator:
    """A communicator that gathers tensors on their device.

    Between GPUs `all_gather` only starts a gather. It runs in stream order: after earlier work of the stream, and
    before later work. If a rank is gone, the gather would never end. So a thread watches the sockets and aborts
    gathers in progress. Results computed from an aborted gather are invalid, and `verify` raises.
    """

    def __init__(self, beside: WatchedCommunicator, group: Backend) -> None:
        """Take over both communicators."""
        self._host_group = beside
        self._group: Backend | None = group
        self._lost: RankLost | None = None
        self._is_closed, self._is_rank_lost = threading.Event(), threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="twostroke-ranks")
        self._watcher.start()

    @property
    def rank(self) -> int:
        return self._host_group.rank

    @property
    def size(self) -> int:
        return self._host_group.size

    def all_gather(self, local: Tensor, out: Tensor, widths: Sequence[int], num_rows: int = 1) -> None:
        """Gather as described in Communicator.

        Every rank sends the same amount: narrow columns are padded to the widest. Ranks that disagree on widths go
        unnoticed.
        """
        self.verify()
        columns = [width // local.itemsize for width in widths]
        widest = max(columns)
        if not widest or not num_rows:
            return
        sent = local.view(num_rows, columns[self.rank])
        if columns[self.rank] < widest:
            sent = torch.nn.functional.pad(sent, (0, widest - columns[self.rank]))
        are_equal, whole = min(columns) == widest, out.view(num_rows, sum(columns))
        in_place = are_equal and num_rows == 1
        found = whole.view(self.size, 1, widest) if in_place else out.new_empty(self.size, num_rows, widest)
        self._gather(sent.contiguous(), found)
        if in_place:
            return
        if are_equal:
            whole.view(num_rows, self.size, widest).copy_(found.transpose(0, 1))
            return
        for part, of_rank in zip(whole.split(columns, dim=1), found, strict=True):
            part.copy_(of_rank[:, : part.shape[1]])

    def broadcast(self, message: bytes | None) -> bytes:
        return self._host_group.broadcast(message)

    def barrier(self) -> None:
        self._host_group.barrier()

    def verify(self) -> None:
        if self._lost is not None:
            raise self._lost

    def close(self) -> None:
        """Leave, and abort gathers in progress.

        Call it before the interpreter ends: a watcher that aborts the group at that time ends the process with SIGABRT.
        """
        self._is_closed.set()
        self._watcher.join()
        self._abort()
        self._group = None  # gloo closes its connections, which others may wait for, only with the group
        self._host_group.close()

    def _gather(self, sent: Tensor, found: Tensor) -> None:
        """Gather as bytes, because not every backend supports every type."""
        assert self._group is not None, "a gather behind the end"
        try:
            parts = found.view(-1).view(torch.uint8), sent.view(-1).view(torch.uint8)
            self._group._allgather_base(*parts).wait()  # pyright: ignore
        except RuntimeError as error:
            self._is_rank_lost.wait(_NOTICE_S)
            raise self._lost or RankLost(0 if self.rank else 1, f"a gather failed ({error})") from error

    def _watch(self) -> None:
        """Watch the other ranks until this communicator is closed or a rank is gone."""
        while not self._is_closed.is_set():
            try:
                self._host_group.check_ranks(_POLL_MS)
            except RankLost as lost:
                self._lost = lost  # set before the abort, which wakes up readers of it
                self._is_rank_lost.set()
                self._abort()
                return

    def _abort(self) -> None:
        if self._group is not None:
            self._group.abort()


def process_group(beside: WatchedCommunicator, device_type: str) -> ProcessGroupCommunicator:
    """Create a process group; all ranks call it, and it returns when all have.

    Args:
        beside: communicator between them; it is taken over.
        device_type: of the tensors: NCCL serves "cuda", gloo "cpu".

    Raises:
        RankLost: another rank is gone.
    """
    try:
        group = _group(device_type, _store(beside), beside.rank, beside.size)
    except RuntimeError as error:
        raise RankLost(0 if beside.rank else 1, f"it did not join the process group ({error})") from error
    communicator = ProcessGroupCommunicator(beside, group)
    try:
        communicator.barrier()
    except BaseException:
        communicator.close()
        raise
    return communicator


def _store(beside: WatchedCommunicator) -> dist.TCPStore:
    """Return the store in which backends exchange addresses: on rank 0, at a port that only the ranks know."""
    if beside.rank:
        host, _, port = beside.broadcast(None).decode().rpartition(":")
        return dist.TCPStore(host, int(port), beside.size, is_master=False, timeout=TIMEOUT)
    listener = socket.create_server((beside.own_host, 0), backlog=128)
    host, port = listener.getsockname()[:2]
    # pass the listener, or the store would listen on every interface; the store closes it
    store = dist.TCPStore(
        host, port, beside.size, is_master=True, timeout=TIMEOUT, wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )  # fmt: skip
    beside.broadcast(f"{host}:{port}".encode())
    return store


def _group(device_type: str, store: dist.Store, rank: int, size: int) -> Backend:
    """Return a process group other than torch's global one, because a process may have several engines."""
    if device_type == "cpu":
        return dist.ProcessGroupGloo(store, rank, size, TIMEOUT)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = TIMEOUT  # pyright: ignore[reportPrivateUsage]
    return dist.ProcessGroupNCCL(store, rank, size, options)

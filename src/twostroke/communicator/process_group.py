"""A communicator whose gathers stay on the device: torch.distributed's NCCL between GPUs, and gloo between CPUs, with
which the same code is tested.

A communicator through sockets beside it carries broadcasts and barriers, which wait without a processor, and tells who
is gone.
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

from twostroke.communicator.interface import Watching
from twostroke.errors import RankLost

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend  # pyright: ignore[reportPrivateImportUsage]

TIMEOUT = datetime.timedelta(minutes=10)
"""For a rank that neither comes nor ends. One that ends is noticed at once."""
_LOOK_MS = 100
_NOTICE_S = 5.0
"""For the sockets to tell who is gone, behind a gather that failed."""


class ProcessGroupCommunicator:
    """Gathers tensors where they are.

    A gather between GPUs is only begun when `all_gather` returns: it is behind what the stream computes, and whatever
    the stream computes next is behind it. When a rank is gone, it would never end; so a thread watches the sockets and
    aborts what is under way. What was computed from it then is worth nothing, and `verify` says so.
    """

    def __init__(self, beside: Watching, group: Backend) -> None:
        """Takes over both."""
        self._beside = beside
        self._group: Backend | None = group
        self._lost: RankLost | None = None
        self._is_closed, self._is_gone = threading.Event(), threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="twostroke-ranks")
        self._watcher.start()

    @property
    def rank(self) -> int:
        return self._beside.rank

    @property
    def size(self) -> int:
        return self._beside.size

    def all_gather(self, local: Tensor, out: Tensor, widths: Sequence[int], num_rows: int = 1) -> None:
        """See Communicator.

        Every rank sends as much: narrow columns are filled up to the widest. Ranks that mean other widths go unnoticed.
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
        return self._beside.broadcast(message)

    def barrier(self) -> None:
        self._beside.barrier()

    def verify(self) -> None:
        if self._lost is not None:
            raise self._lost

    def close(self) -> None:
        """See Communicator.

        Call it before the interpreter ends: a watcher that aborts the group meanwhile ends the process with SIGABRT.
        """
        self._is_closed.set()
        self._watcher.join()
        self._abort()
        self._group = None  # gloo ends its connections, and with them what others wait for, only with the group itself
        self._beside.close()

    def _gather(self, sent: Tensor, found: Tensor) -> None:
        """Bytes, because not every backend knows every type."""
        assert self._group is not None, "a gather behind the end"
        try:
            parts = found.view(-1).view(torch.uint8), sent.view(-1).view(torch.uint8)
            self._group._allgather_base(*parts).wait()  # pyright: ignore
        except RuntimeError as error:
            self._is_gone.wait(_NOTICE_S)
            raise self._lost or RankLost(0 if self.rank else 1, f"a gather failed ({error})") from error

    def _watch(self) -> None:
        """Until this communicator is closed, or another rank is gone."""
        while not self._is_closed.is_set():
            try:
                self._beside.check_others(_LOOK_MS)
            except RankLost as lost:
                self._lost = lost  # before the abort: whoever is woken by that looks here
                self._is_gone.set()
                self._abort()
                return

    def _abort(self) -> None:
        if self._group is not None:
            self._group.abort()


def process_group(beside: Watching, device_type: str) -> ProcessGroupCommunicator:
    """All ranks of a communicator call it; returns when all of them are there.

    Args:
        beside: between them; it is taken over.
        device_type: of the tensors: NCCL serves "cuda", gloo "cpu".

    Raises:
        RankLost: another rank is gone.
    """
    try:
        group = _group(device_type, _store(beside), beside.rank, beside.size)
    except RuntimeError as error:
        raise RankLost(0 if beside.rank else 1, f"it did not come to a process group ({error})") from error
    communicator = ProcessGroupCommunicator(beside, group)
    try:
        communicator.barrier()
    except BaseException:
        communicator.close()
        raise
    return communicator


def _store(beside: Watching) -> dist.TCPStore:
    """Where backends exchange addresses: rank 0's, on a port that only the ranks hear of."""
    if beside.rank:
        host, _, port = beside.broadcast(None).decode().rpartition(":")
        return dist.TCPStore(host, int(port), beside.size, is_master=False, timeout=TIMEOUT)
    listener = socket.create_server((beside.own_host, 0), backlog=128)
    host, port = listener.getsockname()[:2]
    # given as it is: by itself it would listen on every interface; it closes what it is given
    store = dist.TCPStore(
        host, port, beside.size, is_master=True, timeout=TIMEOUT, wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )  # fmt: skip
    beside.broadcast(f"{host}:{port}".encode())
    return store


def _group(device_type: str, store: dist.Store, rank: int, size: int) -> Backend:
    """Without torch's one group of the process, because a process may have several engines."""
    if device_type == "cpu":
        return dist.ProcessGroupGloo(store, rank, size, TIMEOUT)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = TIMEOUT  # pyright: ignore[reportPrivateUsage]
    return dist.ProcessGroupNCCL(store, rank, size, options)

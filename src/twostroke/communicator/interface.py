"""Communicator: exchange of bytes between the ranks that compute one model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Communicator(Protocol):
    """One rank's connection to the others. All ranks call the same operations in the same order."""

    @property
    def rank(self) -> int:
        """Index of this rank, from 0."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def all_gather(self, local: Tensor, out: Tensor, widths: Sequence[int], num_rows: int = 1) -> None:
        """Concatenate the ranks' columns of a matrix; with one row, the ranks' bytes.

        Between GPUs the gather is only started; see `verify`.

        Args:
            local: [num_rows, widths[rank]] bytes, contiguous, of any shape and type.
            out: [num_rows, sum(widths)] bytes, contiguous, of the same type.
            widths: bytes of a row that each rank sends, whole elements; they may differ.
            num_rows: of both.

        Raises:
            RankLost: a rank has ended, or is in another operation.
        """
        ...

    def broadcast(self, message: bytes | None) -> bytes:
        """Send rank 0's message to all ranks, and return it.

        Args:
            message: on rank 0; None on the others.

        Raises:
            RankLost: as for `all_gather`.
        """
        ...

    def barrier(self) -> None:
        """Wait until every rank has called it.

        Raises:
            RankLost: as for `all_gather`.
        """
        ...

    def verify(self) -> None:
        """Check that all gathers started before the last device synchronization received the ranks' data.

        Called after a step, before its results are used.

        Raises:
            RankLost: a gather did not, because a rank has ended.
        """
        ...

    def close(self) -> None:
        """Leave; a rank that waits for this one gets a RankLost."""
        ...


class WatchedCommunicator(Communicator, Protocol):
    """A communicator over sockets, which the kernel closes when a process dies."""

    @property
    def own_host(self) -> str:
        """Host of this rank, as the others reach it."""
        ...

    def check_ranks(self, wait_ms: int) -> None:
        """Wait briefly for any other rank to end; used while waiting for the ranks in another way.

        Raises:
            RankLost: a rank is gone.
        """
        ...


class SingleRank:
    """The communicator of a single rank."""

    rank = 0
    size = 1

    def all_gather(self, local: Tensor, out: Tensor, widths: Sequence[int], num_rows: int = 1) -> None:
        assert local.nbytes == out.nbytes == widths[0] * num_rows, (local.nbytes, out.nbytes, widths, num_rows)
        out.view(local.shape).copy_(local)

    def broadcast(self, message: bytes | None) -> bytes:
        assert message is not None, "rank 0 says what is sent"
        return message

    def barrier(self) -> None:
        """Do nothing: there are no other ranks."""

    def verify(self) -> None:
        """Do nothing: a gather is complete when it returns."""

    def close(self) -> None:
        """Do nothing: there are no connections."""

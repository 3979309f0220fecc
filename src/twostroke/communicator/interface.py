"""Communicator: how the ranks that compute one model together exchange bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Communicator(Protocol):
    """One rank's door to the others. All ranks call the same operations in the same order."""

    @property
    def rank(self) -> int:
        """Which one this is, from 0."""
        ...

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    def all_gather(self, local: Tensor, out: Tensor, widths: Sequence[int], num_rows: int = 1) -> None:
        """Puts every rank's columns of a matrix beside each other. With one row: every rank's bytes behind each other.

        Between GPUs it is only begun; see `verify`.

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
        """Rank 0's message, to everybody.

        Args:
            message: of rank 0; None of the others.

        Raises:
            RankLost: as for `all_gather`.
        """
        ...

    def barrier(self) -> None:
        """Returns when every rank has come here.

        Raises:
            RankLost: as for `all_gather`.
        """
        ...

    def verify(self) -> None:
        """Behind a step, before anybody sees what came out of it: every gather that was begun before the device was
        waited for has brought what the ranks sent.

        Raises:
            RankLost: one has not, because a rank has ended.
        """
        ...

    def close(self) -> None:
        """Leaves; whoever still waits for this rank gets a RankLost."""
        ...


class Watching(Communicator, Protocol):
    """A communicator through sockets, which the kernel closes when a process dies."""

    @property
    def own_host(self) -> str:
        """Of this rank, as the others reach it."""
        ...

    def check_others(self, wait_ms: int) -> None:
        """Waits a little for any other rank to go, for who waits for them in another way.

        Raises:
            RankLost: one is gone.
        """
        ...


class Alone:
    """Rank 0 of 1."""

    rank = 0
    size = 1

    def all_gather(self, local: Tensor, out: Tensor, widths: Sequence[int], num_rows: int = 1) -> None:
        assert local.nbytes == out.nbytes == widths[0] * num_rows, (local.nbytes, out.nbytes, widths, num_rows)
        out.view(local.shape).copy_(local)

    def broadcast(self, message: bytes | None) -> bytes:
        assert message is not None, "rank 0 says what is sent"
        return message

    def barrier(self) -> None:
        """See Communicator."""

    def verify(self) -> None:
        """See Communicator."""

    def close(self) -> None:
        """See Communicator."""

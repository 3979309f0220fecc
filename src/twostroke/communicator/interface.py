"""Communicator: how the ranks that compute one model together exchange bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


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

    def all_gather(self, local: int, out: int, widths: Sequence[int], num_rows: int = 1) -> None:
        """Puts every rank's columns of a matrix beside each other. With one row: every rank's bytes behind each other.

        Addresses, as kernels take them: this is called four times a layer, and making a buffer of a tensor takes as
        long as what is done here.

        Args:
            local: address of [num_rows, widths[rank]] bytes, contiguous.
            out: address of [num_rows, sum(widths)] bytes, contiguous.
            widths: bytes of a row that each rank sends; they may differ.
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

    def close(self) -> None:
        """Leaves; whoever still waits for this rank gets a RankLost."""
        ...

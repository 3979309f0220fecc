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

    def all_gather(self, local: memoryview, out: Sequence[memoryview]) -> None:
        """Puts every rank's bytes into `out`, in the order of ranks.

        Args:
            local: this rank's bytes, contiguous.
            out: for each rank a contiguous buffer of exactly the bytes that it sends; sizes may differ.

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

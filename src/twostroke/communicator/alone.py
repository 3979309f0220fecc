"""The communicator of a model that one rank computes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence


class Alone:
    """Rank 0 of 1."""

    rank = 0
    size = 1

    def all_gather(self, local: int, out: int, widths: Sequence[int], num_rows: int = 1) -> None:
        """See Communicator."""
        ctypes.memmove(out, local, widths[0] * num_rows)

    def broadcast(self, message: bytes | None) -> bytes:
        """See Communicator."""
        assert message is not None, "rank 0 says what is sent"
        return message

    def barrier(self) -> None:
        """See Communicator."""

    def close(self) -> None:
        """See Communicator."""

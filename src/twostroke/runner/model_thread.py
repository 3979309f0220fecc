"""The thread that runs the model, on the CPUs that it is given."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Collection


class ModelThread:
    """Pins whoever computes the first step, and lets go at the end: the offline API computes in its caller's thread."""

    def __init__(self, cpus: Collection[int]) -> None:
        """Takes the CPUs; none: nothing is pinned."""
        self._cpus = frozenset(cpus)
        self._pinned: int | None = None
        self._before: tuple[int, set[int]] | None = None
        """The system's number of the thread, and where it might run."""

    def pin(self) -> None:
        """Pin the thread that calls, unless it is pinned."""
        if not self._cpus or self._pinned == threading.get_ident():
            return
        self.release()
        self._before = threading.get_native_id(), os.sched_getaffinity(0)
        os.sched_setaffinity(0, self._cpus)
        self._pinned = threading.get_ident()

    def release(self) -> None:
        """Let the thread run where it might before."""
        if self._before is not None:
            thread, cpus = self._before
            with contextlib.suppress(OSError):  # the thread has ended, or its CPUs were taken away
                os.sched_setaffinity(thread, cpus)
        self._pinned = self._before = None

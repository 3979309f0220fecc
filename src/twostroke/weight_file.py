"""Weight files, which are read and never mapped: a mapped file that shrinks kills the process (SIGBUS)."""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path

import numpy as np
import numpy.typing as npt

from twostroke.errors import CorruptCheckpoint

_REMEDY = "Wait until it is complete, and start again."


class WeightFile:
    """An open weight file. Reads return copies; a file that changes meanwhile is refused by name.

    A file that is replaced by another of its name is still read to its end as it was, until it is closed.
    """

    def __init__(self, path: Path) -> None:
        """Open the file.

        Raises:
            OSError: it cannot be opened.
        """
        self.path = path
        self._file = path.open("rb", buffering=0)
        weakref.finalize(self, self._file.close)
        self._lock = threading.Lock()
        self._state = self._now()
        self.size = self._state[0]

    def read(self, begin: int, num_bytes: int, what: str) -> npt.NDArray[np.uint8]:
        """Return bytes of the file; errors name them by `what`.

        Raises:
            CorruptCheckpoint: the file has become shorter, has been written to, or cannot be read.
        """
        found = np.empty(num_bytes, np.uint8)
        view, done = found.data, 0
        with self._lock:
            try:
                self._file.seek(begin)
                while done < num_bytes and (count := self._file.readinto(view[done:])):
                    done += count
            except OSError as error:
                told = f"{self.path}: {what} cannot be read ({error.strerror}). Check the disk."
                raise CorruptCheckpoint(told) from error
        if done < num_bytes:
            raise CorruptCheckpoint(
                f"{self.path} became shorter while it was read: {what} ends at byte {begin + num_bytes:,} of now "
                f"{self._now()[0]:,}. {_REMEDY}"
            )
        self.check_unchanged(what)
        return found

    @property
    def descriptor(self) -> int:
        """File descriptor, for code that reads by itself and calls `check_unchanged` afterwards."""
        return self._file.fileno()

    def check_unchanged(self, what: str) -> None:
        """Refuse a file that has changed since it was opened; the error names what was read last.

        Raises:
            CorruptCheckpoint: the file has changed.
        """
        if self._now() != self._state:
            raise CorruptCheckpoint(f"{self.path} was written to while it was read, at {what}. {_REMEDY}")

    def _now(self) -> tuple[int, int]:
        """Return the size and the time of the last change."""
        found = os.fstat(self._file.fileno())
        return found.st_size, found.st_mtime_ns

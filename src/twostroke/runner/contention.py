"""Detection of other processes at work during a measurement, and a lock between this project's own measurements."""

from __future__ import annotations

import contextlib
import importlib
import os
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

MIN_OWN_SHARE = 0.85
"""Least share of its threads' processor time that a measurement gets on an idle machine."""
MAX_OTHER_SHARE, MAX_OTHERS = 0.1, 0.5
"""Share of all processors, and number of processors, that other processes may keep busy; an idle machine stays below
them. One process on a core of its own can take half of the memory's bandwidth, of however many cores."""
MAX_WAIT_S = 10.0
"""Seconds to wait for other measurements, each of which takes less than a second."""
_POLL_INTERVAL_S = 0.02
_TICKS_OF_CPU = slice(1, 9)
"""Fields: user, nice, system, idle, iowait, irq, softirq, steal."""
_IDLE = (3, 4)


class ContentionReading(NamedTuple):
    """Clock values at one moment, in seconds."""

    wall_s: float
    own_s: float
    """Processor time of this process."""
    busy_s: float | None
    """Processor time of all processes, stolen time included; None where the system does not report it."""


class ContentionDetector(Protocol):
    """Protocol for detecting other work between two moments."""

    def read(self) -> ContentionReading:
        """Read the clocks."""
        ...

    def was_contended(self, before: ContentionReading, after: ContentionReading) -> bool:
        """Return whether other processes were at work between two readings."""
        ...


class ContentionMeter:
    """Comparison of this process's processor time with the clock and with that of all processes.

    Args:
        num_threads: threads that the measured work keeps busy.
        read: function that reads the clocks.
        num_processors: processors of the machine.
        num_usable: processors that this process may run on.
    """

    def __init__(
        self,
        num_threads: int,
        read: Callable[[], ContentionReading] | None = None,
        num_processors: int | None = None,
        num_usable: int | None = None,
    ) -> None:
        self.read = read or _read
        """Function that reads the clocks."""
        self._most_others = min(MAX_OTHER_SHARE * (num_processors or os.cpu_count() or 1), MAX_OTHERS)
        self._num_threads = min(num_threads, num_usable or _num_usable())

    def was_contended(self, before: ContentionReading, after: ContentionReading) -> bool:
        """Return whether other processes were at work between two readings.

        That is so if this process did not get its processors. It is also so if others kept more than a tenth of all
        processors busy, or half of one, because they share memory bandwidth and clock rate even where this process got
        its own.
        """
        wall_s, own_s = after.wall_s - before.wall_s, after.own_s - before.own_s
        if wall_s <= 0.0:
            return False
        if own_s < MIN_OWN_SHARE * wall_s * self._num_threads:
            return True
        if before.busy_s is None or after.busy_s is None:
            return False
        return after.busy_s - before.busy_s - own_s > wall_s * self._most_others


@contextlib.contextmanager
def measurement_lock(folder: Path | None = None, timeout_s: float = MAX_WAIT_S) -> Generator[None]:
    """Wait until no other process of this user measures, and keep others waiting meanwhile.

    The wait is bounded, so that a process stopped during its measurement does not block others. A measurement made
    beside another one detects the contention. Without file locks (Windows), or where no file can be written, there is
    no wait.

    Args:
        folder: folder of the lock; default: the system's folder for temporary files.
        timeout_s: seconds to wait at most.
    """
    path = (folder or Path(tempfile.gettempdir())) / f"twostroke-measuring-{_user()}.lock"
    try:
        fcntl: Any = importlib.import_module("fcntl")
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | getattr(os, "O_NOFOLLOW", 0), 0o600)
    except (ImportError, OSError):
        yield
        return
    try:
        _lock(fcntl, descriptor, timeout_s)
        yield
    finally:
        os.close(descriptor)  # releases the lock


def _lock(fcntl: Any, descriptor: int, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                return None
            time.sleep(_POLL_INTERVAL_S)


def _read() -> ContentionReading:
    return ContentionReading(time.perf_counter(), time.process_time(), _busy_s())


def _busy_s(stat: Path = Path("/proc/stat")) -> float | None:
    try:
        ticks = [int(word) for word in stat.read_text().split("\n", 1)[0].split()[_TICKS_OF_CPU]]
    except (OSError, ValueError):
        return None
    busy = sum(count for i, count in enumerate(ticks) if i not in _IDLE)
    return busy / os.sysconf("SC_CLK_TCK")


def _num_usable() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0

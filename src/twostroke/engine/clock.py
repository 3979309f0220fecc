"""The engine's source of time; a simulation passes its own."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds that never go back; only differences are meaningful."""


class MonotonicClock:
    """The machine's monotonic clock, shared by its processes; on another machine, that of the process that started this
    one."""

    __slots__ = ("ahead_s",)

    def __init__(self) -> None:
        self.ahead_s = 0.0
        """Seconds by which this machine's clock is ahead of the shared one. Set once, before the first reading."""

    def __call__(self) -> float:
        """Return the time in seconds."""
        return time.monotonic() - self.ahead_s


monotonic_clock = MonotonicClock()

"""Where the engine's time comes from; a simulation brings its own."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds, never going back; only differences mean something."""


class MonotonicClock:
    """The machine's, which all its processes share; on other machines, that of who started the process."""

    __slots__ = ("ahead_s",)

    def __init__(self) -> None:
        self.ahead_s = 0.0
        """How far this machine's is ahead of it. Set once, before anybody has asked for the time."""

    def __call__(self) -> float:
        """The time."""
        return time.monotonic() - self.ahead_s


monotonic_clock = MonotonicClock()

"""Where the engine's time comes from; a simulation brings its own."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds, never going back; only differences mean something."""

monotonic_clock: Clock = time.monotonic

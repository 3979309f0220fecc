"""Time since this process was started, by the system's record: imports are part of a start's duration."""

from __future__ import annotations

import os
import time
from pathlib import Path

_LOADED_S = time.monotonic()
_START_FIELD = 19
"""Index of `starttime` after the name in /proc/PID/stat, in ticks since the machine was booted (proc(5))."""


def seconds_since_start(stat: Path = Path("/proc/self/stat")) -> float:
    """Return the seconds since the process's start, to a hundredth; if unknown, since this module was imported."""
    try:
        fields = stat.read_text().rsplit(")", 1)[1].split()
        started_s = int(fields[_START_FIELD]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
    except (OSError, ValueError, IndexError, AttributeError):
        return time.monotonic() - _LOADED_S

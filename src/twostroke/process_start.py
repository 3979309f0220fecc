"""How long ago this process was started, by the system's own account: what imports take is part of a start."""

from __future__ import annotations

import os
import time
from pathlib import Path

_LOADED_S = time.monotonic()
_START_FIELD = 19
"""Of those behind the name in /proc/PID/stat: `starttime`, in ticks since the machine was booted (proc(5))."""


def seconds_since_start(stat: Path = Path("/proc/self/stat")) -> float:
    """Return it to a hundredth of a second; where the system does not tell, since this module was imported."""
    try:
        fields = stat.read_text().rsplit(")", 1)[1].split()
        started_s = int(fields[_START_FIELD]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
    except (OSError, ValueError, IndexError, AttributeError):
        return time.monotonic() - _LOADED_S

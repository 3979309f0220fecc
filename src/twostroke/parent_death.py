"""Signal to a child at its parent's end, which works even while the child is stopped.

A child that holds a pipe of its parent notices the parent's end when the pipe closes. A stopped child (SIGSTOP, a
debugger) does not run, and would stay forever. On Linux the kernel can send it a signal: SIGKILL ends it, stopped or
not; SIGCONT continues it, so that it sees the closed pipe.
"""

from __future__ import annotations

import ctypes
import signal
import sys

_SET_PARENT_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of Linux's prctl."""


def signal_at_parent_death(number: signal.Signals) -> None:
    """Ask the kernel for a signal to this process when its parent ends; do nothing on other systems.

    A parent that ended earlier is not noticed; a running child sees its pipe closed.

    Args:
        number: of the signal. It comes at the end of the thread that started this process: use SIGKILL for children
            that must end with that thread; SIGCONT does no harm.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, int(number), 0, 0, 0)

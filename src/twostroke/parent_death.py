"""A child that learns of its parent's end also while it is stopped, when it sees no pipe close.

A child that holds a pipe of its parent notices the parent's end when the pipe closes. A child that is stopped (SIGSTOP,
a debugger) does not run, and would stay for ever. On Linux the kernel can send it a signal: SIGKILL ends it, stopped or
not; SIGCONT lets it go on, so that it sees the pipe.
"""

from __future__ import annotations

import ctypes
import signal
import sys

_SET_PARENT_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of Linux's prctl."""


def signal_at_parents_death(number: signal.Signals) -> None:
    """Ask the kernel for a signal to this process when its parent ends; on other systems nothing happens.

    A parent that has ended before is not noticed: a child that runs sees its pipe closed.

    Args:
        number: of the signal. It comes at the end of the thread that started this process: SIGKILL is for children
            that are to end with that thread, SIGCONT does no harm.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, int(number), 0, 0, 0)

"""Runs another module as a program: `python -m twostroke.child MODULE ARGUMENTS`, the start of every process of ours.

A child that is stopped while it imports torch has asked the kernel for nothing yet, and nobody would ever let it go on
after its parent's end. So the first thing that it does is to ask for that. What is left is the start of Python itself.
"""

from __future__ import annotations

import gc
import runpy
import signal
import sys

from twostroke.parent_death import signal_at_parents_death

_LOADS_A_MODEL = "twostroke.cluster.process"


def main() -> None:
    """The process's entry."""
    signal_at_parents_death(signal.SIGCONT)
    if sys.argv[1] == _LOADS_A_MODEL:
        gc.disable()  # until it has loaded everything, see engine/garbage.py
    del sys.argv[0]  # the module's own name takes its place
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

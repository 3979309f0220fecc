"""Start of every child process: runs another module as a program, `python -m twostroke.child MODULE ARGUMENTS`.

A child that is stopped (SIGSTOP) while it imports torch has not yet asked the kernel for a signal at its parent's end,
so it would stay forever. Therefore this module asks for it first. Only the start of Python itself remains uncovered.
"""

from __future__ import annotations

import gc
import runpy
import signal
import sys

from twostroke.parent_death import signal_at_parent_death

_LOADS_A_MODEL = "twostroke.cluster.process"


def main() -> None:
    """Run the module that the command line names."""
    signal_at_parent_death(signal.SIGCONT)
    if sys.argv[1] == _LOADS_A_MODEL:
        gc.disable()  # until the model is loaded, see engine/garbage.py
    del sys.argv[0]  # the module's own name takes its place
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

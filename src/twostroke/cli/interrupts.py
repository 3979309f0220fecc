"""Handling of Ctrl-C during imports, which take seconds: the process exits at once and prints nothing.

An interrupted import would print a library's traceback, and some libraries turn the interrupt into another error.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT, as in shells."""
_IMPORTING = "<frozen importlib._bootstrap>"


_before_exit: list[Callable[[], object]] = []


def before_exit(call: Callable[[], object]) -> None:
    """Register a call for before such an exit, which does not run what is registered with `atexit`."""
    _before_exit.append(call)


def exit_quietly_on_interrupted_imports() -> None:
    """Exit at once on a Ctrl-C during an import; otherwise Ctrl-C raises KeyboardInterrupt as usual.

    If the parent process had Ctrl-C ignored, as shells do for background processes, it stays ignored.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def restore_interrupt_handler() -> None:
    """Restore Python's own handler of Ctrl-C; event loops install theirs only in place of that one."""
    if signal.getsignal(signal.SIGINT) is _interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    above = frame
    while above is not None:
        if above.f_code.co_filename == _IMPORTING:
            for call in _before_exit:
                call()
            os._exit(INTERRUPTED)
        above = above.f_back
    signal.default_int_handler(signum, frame)

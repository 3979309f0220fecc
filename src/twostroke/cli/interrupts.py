"""Ctrl-C while modules are imported, which takes seconds: the command ends at once and says nothing.

An import that is interrupted shows the insides of a library, and some libraries turn the interrupt into another error.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType

INTERRUPTED = 130
"""The exit code: 128 + SIGINT, as shells have it."""
_IMPORTING = "<frozen importlib._bootstrap>"


_before: list[Callable[[], object]] = []


def before_ending(call: Callable[[], object]) -> None:
    """Call something before the process ends like that; what is registered with `atexit` does not run then."""
    _before.append(call)


def end_quietly_while_importing() -> None:
    """From now on Ctrl-C ends the process at once if it is importing something, and is Python's own otherwise.

    Whoever starts the process may have it ignore Ctrl-C, as shells do in the background; that stays.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def imports_are_done() -> None:
    """Ctrl-C is Python's own again, which event loops look for before they take it over."""
    if signal.getsignal(signal.SIGINT) is _interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    above = frame
    while above is not None:
        if above.f_code.co_filename == _IMPORTING:
            for call in _before:
                call()
            os._exit(INTERRUPTED)
        above = above.f_back
    signal.default_int_handler(signum, frame)

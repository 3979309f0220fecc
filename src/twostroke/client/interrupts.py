"""Ctrl-C between two steps instead of within one: an engine whose books are half written cannot go on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_held() -> Generator[Callable[[], None]]:
    """Holds SIGINT back; what it yields is to be called between steps and lets the signal through if it came.

    The handler that was there before then runs, which raises KeyboardInterrupt unless a program has its own. A second
    Ctrl-C does not wait: somebody who insists gets out, and an engine that it catches in the middle of a step says so
    from then on. Only the main thread gets signals, so elsewhere nothing is held.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield lambda: None
        return
    held: list[tuple[int, FrameType | None]] = []

    def hold(signum: int, frame: FrameType | None) -> None:
        held.append((signum, frame))
        signal.signal(signal.SIGINT, before)

    def let_through() -> None:
        if held:
            before(*held.pop())

    signal.signal(signal.SIGINT, hold)
    try:
        yield let_through
    finally:
        signal.signal(signal.SIGINT, before)
        let_through()

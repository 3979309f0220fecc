"""Garbage collection settings of a start and of a server, where many objects live for ever and many die at once."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from collections.abc import Generator

YOUNG_THRESHOLD = 20_000
"""Objects made before the young generation is collected. A token makes some twenty. None of them is part of a cycle, so
the structs that carry a token through a step are not tracked (`gc=False`)."""
IDLE_THRESHOLD = YOUNG_THRESHOLD // 2
"""Objects made before a collection in an idle moment; a collection takes 1 to 2 ms."""
OLDER_THRESHOLDS = (10, 2)
"""Thresholds of the older generations. A connection is a cycle, and one that is open during a young collection counts
as old from then on. The old generation is collected about every 400,000 objects; it is small, because objects made
at the start are frozen. With a threshold of a million, 500 clients that come and go made the process grow for four
minutes before its size settled."""


def disable_gc() -> None:
    """Disable garbage collection before a long start.

    What is imported and loaded stays, and collecting takes a tenth of the start. `freeze_gc` ends it.
    """
    gc.disable()


@contextlib.contextmanager
def paused_gc() -> Generator[None]:
    """Disable garbage collection while a model is loaded in a process that is not ours, such as a user's script.

    A tokenizer alone makes some hundred thousand objects, all of which stay. Collection goes on as before afterwards.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def freeze_gc() -> None:
    """Enable garbage collection again, and exempt every object that exists now (modules, the model's parts).

    A collection of all of them takes 80 ms in the middle of a step, whenever there are a quarter more objects than
    last time. None runs now either: at the end of a start 8,000 objects are garbage, and none is large.
    """
    gc.enable()
    gc.freeze()
    gc.set_threshold(YOUNG_THRESHOLD, *OLDER_THRESHOLDS)


def collect_when_idle() -> None:
    """Collect young garbage now if a collection is due soon, because no request waits for a token now.

    The old generation is collected as often as the interpreter would do it; the interpreter never gets to it where this
    function is used.
    """
    young, middle, old = gc.get_count()
    if young > IDLE_THRESHOLD:
        is_due = middle > OLDER_THRESHOLDS[0]
        gc.collect(2 if is_due and old > OLDER_THRESHOLDS[1] else int(is_due))


def trim_heap() -> None:
    """Return freed memory that the C library keeps to the system, where that is possible (glibc).

    A tokenizer takes two hundred bytes for each character of a long text. The C library keeps what a thread freed for
    that thread: half a gigabyte after a text of three megabytes. The call takes milliseconds and releases the GIL.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)

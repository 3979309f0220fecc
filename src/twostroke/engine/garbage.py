"""Memory of a server: much stays for ever, and much is gone at once."""

from __future__ import annotations

import ctypes
import gc
import sys

YOUNG = 20_000
"""Objects made before garbage is looked for: a token makes some twenty, and none of them is part of a cycle, which is
why the structs of a token's share in a step are left out (`gc=False`)."""
IN_A_LULL = YOUNG // 2
"""Objects made before garbage is looked for by who has just finished something: a look takes 1 to 2 ms."""
OLDER = (10, 2)
"""A connection is a cycle, and one that is open while young garbage is looked for counts as old from then on. The old
are looked through about every 400,000 objects, of which there are few, since what the start made is left out. At every
million, 500 clients that come and go had the process grow for four minutes before it stayed as large; so for one."""


def look_for_none_while_loading() -> None:
    """Call it before a long start: what is imported and loaded stays, and looking through it takes a tenth of the time.

    `keep_what_is_there` is its end.
    """
    gc.disable()


def keep_what_is_there() -> None:
    """Call it when everything is loaded: modules and the model's parts are never looked through again.

    A look through all of them takes 80 ms, in the middle of a step, as soon as there are a quarter more objects than
    at the last look. There is none now, either: of 8,000 objects that are garbage at the end of a start, none is large.
    """
    gc.enable()
    gc.freeze()
    gc.set_threshold(YOUNG, *OLDER)


def look_in_a_lull() -> None:
    """Look for young garbage now if a look is due soon: now nobody waits for a token.

    The old are looked through as often as the interpreter would, which never comes to it where lulls are used.
    """
    young, middle, old = gc.get_count()
    if young > IN_A_LULL:
        is_due = middle > OLDER[0]
        gc.collect(2 if is_due and old > OLDER[1] else int(is_due))


def give_back_what_is_free() -> None:
    """Gives the system what the C library keeps of memory that was freed, where that can be asked for (glibc).

    A tokenizer takes two hundred bytes for each character of a long text. What one thread has freed is kept for it,
    half a gigabyte after a text of three megabytes. Takes milliseconds, without the interpreter's lock.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)

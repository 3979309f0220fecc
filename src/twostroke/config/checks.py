"""What a setting has to be: the checks that every config and SamplingParams share.

From the command line a value has passed a parser; from Python it is whatever the caller wrote. Each check takes
`object` for that reason, and says the value and the limit.
"""

from __future__ import annotations

import math
from typing import Any

from twostroke.errors import MOST_SHOWN, InvalidParameter, shown


def one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Refuses what is not one of a Literal's texts.

    >>> one_of("policy", "fcfs", ("fcfs", "priority"))
    """
    if not isinstance(value, str) or value not in allowed:
        raise InvalidParameter(name, value, f"must be one of {', '.join(map(repr, allowed))}")


def switch(name: str, value: object) -> None:
    """Refuses what is neither True nor False: a text is true whatever it says."""
    if not isinstance(value, bool):
        raise InvalidParameter(name, value, "must be true or false")


def text(name: str, value: object) -> None:
    """Refuses what is no text, and an empty one."""
    if not isinstance(value, str) or not value:
        raise InvalidParameter(name, value, "must be a text" + (" that is not empty" if value == "" else ""))


def unicode(name: str, value: str) -> None:
    """Refuses what UTF-8 cannot write; no tokenizer reads or makes it, and no log could hold it."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        limit = f"has half a character (a lone surrogate) at position {error.start}"
        raise InvalidParameter(name, value, limit, "Send valid Unicode.") from error


def whole_number(name: str, value: object, low: int, high: int | None = None, *, limit: str = "") -> None:
    """Refuses what is no int (True is none), or outside low to high, both included; `limit` says it in other words."""
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        limit = limit or (f"a whole number of at least {low}" if high is None else f"a whole number, {low} to {high}")
        raise InvalidParameter(name, value, f"must be {limit}")


def number(name: str, value: object, low: float, high: float, limit: str, *, low_open: bool = False) -> None:
    """Refuses what is no finite number, or outside low to high; `low_open` leaves low itself out."""
    given: Any = value
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    # the range first: an int beyond every float has no isfinite
    if not is_number or not low <= given <= high or (low_open and given == low) or not math.isfinite(given):
        raise InvalidParameter(name, value, f"must be {limit}")


def whole_numbers(name: str, given: str, low: int, high: int) -> tuple[int, ...]:
    """A list with commas between, sorted, each once.

    Raises:
        InvalidParameter: empty, what is no whole number, or outside low to high.

    >>> whole_numbers("sizes", "4,1,4", 1, 8)
    (1, 4)
    """
    found: set[int] = set()
    for part in filter(None, given.split(",")):
        if not part.strip().isdecimal():
            raise InvalidParameter(name, given, f"has {part!r}, which is no whole number")
        # no int is made of thousands of digits: Python refuses, and one beyond `high` has more digits than it
        digits = part.strip().lstrip("0") or "0"
        value = None if len(digits) > len(str(high)) else int(digits)
        if value is None or not low <= value <= high:
            words = part if len(part) <= MOST_SHOWN else shown(part)
            raise InvalidParameter(name, given, f"has {words}; from {low} to {high}")
        found.add(value)
    if not found:
        raise InvalidParameter(name, given, "names no number", "Give some with commas between, or leave it out.")
    return tuple(sorted(found))

"""Checks of settings that every config and SamplingParams share.

A value from the command line has passed a parser; a value from Python can be anything. Each check therefore takes
`object`, and its error states the value and the limit.
"""

from __future__ import annotations

import math
from typing import Any

from twostroke.errors import MAX_SHOWN_CHARS, InvalidParameter, shown


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise InvalidParameter if a value is none of a Literal's strings.

    >>> check_choice("policy", "fcfs", ("fcfs", "priority"))
    """
    if not isinstance(value, str) or value not in allowed:
        raise InvalidParameter(name, value, f"must be one of {', '.join(map(repr, allowed))}")


def check_bool(name: str, value: object) -> None:
    """Raise InvalidParameter if a value is neither True nor False: every non-empty string would count as true."""
    if not isinstance(value, bool):
        raise InvalidParameter(name, value, "must be true or false")


def check_text(name: str, value: object) -> None:
    """Raise InvalidParameter if a value is no string, or an empty one."""
    if not isinstance(value, str) or not value:
        raise InvalidParameter(name, value, "must be a string" + (" that is not empty" if value == "" else ""))


def check_unicode(name: str, value: str) -> None:
    """Raise InvalidParameter if UTF-8 cannot encode a string; no tokenizer reads or produces such text."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        limit = f"has half a character (a lone surrogate) at position {error.start}"
        raise InvalidParameter(name, value, limit, "Send valid Unicode.") from error


def check_int(name: str, value: object, low: int, high: int | None = None, *, limit: str = "") -> None:
    """Raise InvalidParameter if a value is no int (True is none), or outside low to high, both included.

    `limit` words the limit in the message.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        limit = limit or (f"a whole number of at least {low}" if high is None else f"a whole number, {low} to {high}")
        raise InvalidParameter(name, value, f"must be {limit}")


def check_number(name: str, value: object, low: float, high: float, limit: str, *, low_open: bool = False) -> None:
    """Raise InvalidParameter if a value is no finite number, or outside low to high; `low_open` excludes low itself."""
    given: Any = value
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    # the range first: isfinite fails for an int beyond the range of floats
    if not is_number or not low <= given <= high or (low_open and given == low) or not math.isfinite(given):
        raise InvalidParameter(name, value, f"must be {limit}")


def parse_ints(name: str, given: str, low: int, high: int) -> tuple[int, ...]:
    """Return the numbers of a list with commas, sorted, each once.

    Raises:
        InvalidParameter: it is empty, or an entry is no whole number or outside low to high.

    >>> parse_ints("sizes", "4,1,4", 1, 8)
    (1, 4)
    """
    found: set[int] = set()
    for part in filter(None, given.split(",")):
        if not part.strip().isdecimal():
            raise InvalidParameter(name, given, f"has {part!r}, which is no whole number")
        # Python refuses to parse thousands of digits; a number with more digits than `high` is too large anyway
        digits = part.strip().lstrip("0") or "0"
        value = None if len(digits) > len(str(high)) else int(digits)
        if value is None or not low <= value <= high:
            words = part if len(part) <= MAX_SHOWN_CHARS else shown(part)
            raise InvalidParameter(name, given, f"has {words}; from {low} to {high}")
        found.add(value)
    if not found:
        raise InvalidParameter(name, given, "contains no number", "Give some with commas between, or leave it out.")
    return tuple(sorted(found))

"""Values and exceptions in words for users, who know JSON and what they typed, but no Python classes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import floor, isfinite, log10

_KINDS: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (bool, "a boolean"),  # before the numbers: in Python a bool is an int
    ((int, float), "a number"),
    (str, "a string"),
    (bytes, "bytes"),
    (Mapping, "an object"),
    ((list, tuple), "a list"),
)


_MAX_REASON_CHARS = 2000
"""Most characters of a reason; an exception may repeat its whole input."""
_TOO_MANY_DIGITS = re.compile(r"Exceeds the limit \((\d+) digits\) for integer string conversion.*")


def kind_of(value: object) -> str:
    """Return the type of a value in JSON's words.

    >>> [kind_of(value) for value in (None, True, 3, 0.5, "a", [1], {})]
    ['null', 'a boolean', 'a number', 'a number', 'a string', 'a list', 'an object']
    """
    if value is None:
        return "null"
    return next((words for kinds, words in _KINDS if isinstance(value, kinds)), "something else")


def reason_of(error: BaseException) -> str:
    """Return an exception's message as one printable line of bounded length, without the name of its class.

    >>> reason_of(ValueError("too\\n  long")), reason_of(KeyError("name")), reason_of(MemoryError())
    ('too long', "'name' is missing", 'there is not enough memory')
    >>> reason_of(FileNotFoundError(2, "No such file or directory", "/a")), reason_of(RuntimeError())
    ('No such file or directory: /a', 'no reason was given; the log says where it happened')
    >>> reason_of(ValueError("\\x1b[31m")), len(reason_of(ValueError("a" * 10**6)))
    ('\\\\x1b[31m', 2022)
    """
    text = printable(_TOO_MANY_DIGITS.sub(r"a number has more than \1 digits", " ".join(str(error).split())))
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is not {error.encoding.upper()}"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {printable(str(error.filename))}" if error.filename is not None else error.strerror
    if isinstance(error, KeyError):
        return f"{text} is missing"
    if not text and isinstance(error, MemoryError):
        return "there is not enough memory"
    return text or "no reason was given; the log says where it happened"


def printable(text: str, most: int = _MAX_REASON_CHARS, beginning: int | None = None) -> str:
    """Return the text with terminal control characters escaped; for a long one its beginning and its size.

    Args:
        text: of any length.
        most: characters of a string that is returned whole.
        beginning: characters of a longer text that are returned; None: as many.
    """
    spelled = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text[:most])
    is_whole = max(len(text), len(spelled)) <= most
    return spelled if is_whole else f"{spelled[: beginning or most]}… ({len(text)} characters)"


# ---------------------------------------------------------------------- numbers


def counted(number: int, noun: str) -> str:
    """Return a number with its noun.

    >>> counted(1, "token"), counted(2, "token")
    ('1 token', '2 tokens')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


MOST_TIMES = 100.0
"""Largest ratio that is printed as a number. Ratios beyond it, or below its inverse, tell that two figures do not
belong together, not how they relate."""


def significant(value: float, digits: int = 3) -> str:
    """Return a number with `digits` significant digits, without an exponent where it stays readable.

    >>> significant(12279.4), significant(2.5), significant(0.0042), significant(0.0000123), significant(0.0)
    ('12,279', '2.50', '0.00420', '1.23e-05', '0')
    """
    if value == 0.0:
        return "0"
    magnitude = floor(log10(abs(value)))
    if magnitude < -4:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.{max(0, digits - 1 - magnitude)}f}"


def multiple(ratio: float) -> str:
    """Return a ratio as the number before "times"; only a bound where it is beyond `MOST_TIMES`.

    >>> multiple(1.254), multiple(12279.4), multiple(0.0004), multiple(float("inf")), multiple(0.0)
    ('1.25', 'over 100', 'under 0.01', 'over 100', '0')
    """
    if not isfinite(ratio) or ratio > MOST_TIMES:
        return f"over {MOST_TIMES:.0f}"
    if 0.0 < ratio < 1 / MOST_TIMES:
        return f"under {1 / MOST_TIMES}"
    return significant(ratio)


def deviation(error: float) -> str:
    """Return predicted / measured - 1 in percent; only a bound beyond `MOST_TIMES`.

    >>> deviation(0.1234), deviation(-0.5), deviation(12279.4)
    ('+12.3%', '-50.0%', 'over +9,900%')
    """
    if not isfinite(error) or error + 1 > MOST_TIMES:
        return f"over {MOST_TIMES - 1:+,.0%}"
    return f"{error:+.1%}"


def exact_ms(seconds: float) -> str:
    """Return seconds as milliseconds, to the microsecond.

    >>> exact_ms(1.2345678), exact_ms(0.0), exact_ms(2e-7)
    ('1,234.568', '0', 'under 0.001')
    """
    if seconds == 0.0:
        return "0"
    return "under 0.001" if 0.0 < seconds < 5e-7 else f"{seconds * 1e3:,.3f}"

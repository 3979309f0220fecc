"""Numbers as people write them: 4GiB of memory, a context of 32k tokens, 1_000_000.

Units of bytes are the usual ones: kB, MB, GB, TB of 1000 and KiB, MiB, GiB, TiB of 1024. A single letter is vLLM's
unit: k, m, g, t of 1000 and K, M, G, T of 1024. Numbers of tokens take the letters. A comma separates thousands
and nothing else: 1,5GB is refused, since some readers take it for 1.5 GB.

Times are written 50ms, 0.3s, 2m.
"""

from __future__ import annotations

import re
from decimal import Decimal

from twostroke.config.checks import check_number
from twostroke.errors import InvalidParameter

_INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3}){1,12}|[0-9][0-9_]{0,40})?"
"""Longer ones are no sizes; Python refuses to parse integers of thousands of digits."""
_WRITTEN = re.compile(rf"\s*\+?({_INTEGER}(?:\.[0-9]{{0,40}})?(?:[eE]\+?[0-9]{{1,2}})?)\s*([A-Za-z]*)\s*")
_POWERS = {letter: power for power, letter in enumerate("kmgtp", start=1)}
_BYTE_WORDS = ("", "b", "byte", "bytes")


def byte_count(name: str, given: str) -> int:
    """Return a number of bytes, written with or without a unit.

    >>> [byte_count("memory", text) for text in ("4096", "1GB", "1 GiB", "1G", "1g", "1.5kB")]
    [4096, 1000000000, 1073741824, 1073741824, 1000000000, 1500]

    Raises:
        InvalidParameter: it is no number of bytes.
    """
    found = _WRITTEN.fullmatch(given)
    factor = None if found is None else _byte_factor(found[2])
    if found is None or factor is None or (count := _whole(found[1], factor)) is None:
        limit = "must be a number of bytes, which may have a unit (kB, MB, GB of 1000; KiB, MiB, GiB of 1024)"
        raise InvalidParameter(name, given, limit, "Such as 4GiB.")
    return count


def count(name: str, given: str) -> int:
    """Return a whole number that may be written in thousands: 32k is 32000, and 32K is 32768.

    >>> [count("max_model_len", text) for text in ("4096", "32k", "32K", "1.5k", "1_000", "1,000", "1e3")]
    [4096, 32000, 32768, 1500, 1000, 1000, 1000]

    Raises:
        InvalidParameter: it is no whole number.
    """
    found = _WRITTEN.fullmatch(given)
    factor = None if found is None or len(found[2]) > 1 else _letter_factor(found[2])
    if found is None or factor is None or (number := _whole(found[1], factor)) is None:
        raise InvalidParameter(name, given, "must be a whole number")
    return number


def read_sizes(config: object, *names: str) -> None:
    """Replace strings such as "4GiB" by numbers of bytes, in these fields of a frozen dataclass.

    Raises:
        InvalidParameter: one of them is no size.
    """
    for name in names:
        given = getattr(config, name)
        if isinstance(given, str):
            object.__setattr__(config, name, byte_count(name, given))


def _byte_factor(unit: str) -> int | None:
    lower = unit.lower()
    if lower in _BYTE_WORDS:
        return 1
    power = _POWERS.get(lower[0])
    if power is None:
        return None
    if len(unit) == 1:
        return _letter_factor(unit)
    return {"b": 1000**power, "ib": 1024**power, "i": 1024**power}.get(lower[1:])


def _letter_factor(letter: str) -> int | None:
    if not letter:
        return 1
    power = _POWERS.get(letter.lower())
    return None if power is None else (1024 if letter.isupper() else 1000) ** power


def _whole(digits: str, factor: int) -> int | None:
    """Return the number times its unit, rounded down to whole bytes; None for a fraction without a unit."""
    plain = digits.replace("_", "").replace(",", "")
    if not any(character.isdigit() for character in plain.lower().partition("e")[0]):
        return None
    number = Decimal(plain) * factor
    if factor == 1 and number != int(number):
        return None
    return int(number)


_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_WRITTEN_TIME = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e-?[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def seconds(name: str, given: object, *, most_s: float = 3600.0) -> float:
    """Return a time in seconds; a number is in seconds, a string has a unit.

    Raises:
        InvalidParameter: a string has no unit, or the value is no time, or not more than 0 and at most `most_s`.

    >>> seconds("itl_slo", "50ms"), seconds("itl_slo", 0.05), seconds("ttft_slo", "1.5 s")
    (0.05, 0.05, 1.5)
    """
    value: object = given
    if isinstance(given, str):
        found = _WRITTEN_TIME.fullmatch(given)
        if found is None or found[2].lower() not in _UNITS:
            raise InvalidParameter(name, given, f"must be a time with its unit ({', '.join(_UNITS)})", "Such as 50ms.")
        value = float(found[1]) * _UNITS[found[2].lower()]
    check_number(name, value, 0, most_s, f"a time more than 0 and at most {most_s:g} seconds", low_open=True)
    assert isinstance(value, int | float)
    return float(value)

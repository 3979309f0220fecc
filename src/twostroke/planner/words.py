"""Readable numbers: a nonzero value is never rounded to zero."""

from __future__ import annotations

from math import floor, log10

_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


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


def milliseconds(seconds: float) -> str:
    """Return seconds as milliseconds.

    >>> milliseconds(0.1898), milliseconds(4.2e-7)
    ('190 ms', '0.000420 ms')
    """
    return f"{significant(seconds * 1e3, 4 if seconds >= 1.0 else 3)} ms"


def binary(num_bytes: int) -> str:
    """Return bytes in KiB, MiB or GiB.

    >>> binary(32_768_000_000), binary(1 << 31), binary(9 << 19), binary(1 << 19)
    ('30.5 GiB', '2.00 GiB', '4.50 MiB', '512 KiB')
    """
    unit = "KiB" if num_bytes < 1 << 20 else "MiB" if num_bytes < 1 << 30 else "GiB"
    return f"{significant(num_bytes / _UNITS[unit])} {unit}"

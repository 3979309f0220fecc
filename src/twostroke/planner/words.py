"""Readable numbers: a nonzero value is never rounded to zero."""

from __future__ import annotations

from twostroke.plain_words import significant

_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


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

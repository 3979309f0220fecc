"""Times as people write them: 50ms, 0.3s, 2m."""

from __future__ import annotations

import re

from twostroke.config.checks import number
from twostroke.errors import InvalidParameter

_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_WRITTEN_TIME = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e-?[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def seconds(name: str, given: object, *, most_s: float = 3600.0) -> float:
    """A time in seconds: a number is seconds, a text has a unit.

    Raises:
        InvalidParameter: a text without a unit, or what is no time, or not more than 0 and at most `most_s`.

    >>> seconds("itl_slo", "50ms"), seconds("itl_slo", 0.05), seconds("ttft_slo", "1.5 s")
    (0.05, 0.05, 1.5)
    """
    value: object = given
    if isinstance(given, str):
        found = _WRITTEN_TIME.fullmatch(given)
        if found is None or found[2].lower() not in _UNITS:
            raise InvalidParameter(name, given, f"must be a time with its unit ({', '.join(_UNITS)})", "Such as 50ms.")
        value = float(found[1]) * _UNITS[found[2].lower()]
    number(name, value, 0, most_s, f"a time more than 0 and at most {most_s:g} seconds", low_open=True)
    assert isinstance(value, int | float)
    return float(value)

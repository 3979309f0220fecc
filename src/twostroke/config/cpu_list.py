"""Lists of CPUs as taskset and llama.cpp's --cpu-range write them: `0,2` or `0-3,8`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from twostroke.errors import InvalidParameter

_MOST_CPUS = 4096
_PART = re.compile(r"\d{1,4}(-\d{1,4})?", re.ASCII)


def read_cpu_list(name: str, given: object) -> tuple[int, ...]:
    """Return the CPUs that a list names, in its order.

    >>> read_cpu_list("cpu_affinity", "0-3,8")
    (0, 1, 2, 3, 8)

    Raises:
        InvalidParameter: it is no list, or names a CPU twice.
    """
    remedy = "For example 0,2 or 0-3,8."
    found: list[int] = []
    if not isinstance(given, str):
        raise InvalidParameter(name, given, "must be a text", remedy)
    for part in given.split(","):
        if not _PART.fullmatch(part.strip()):
            raise InvalidParameter(name, given, "must be numbers of CPUs and ranges of them, with commas", remedy)
        first, _, last = part.strip().partition("-")
        if int(last or first) < int(first):
            raise InvalidParameter(name, given, f"the range {part.strip()} ends before it begins", remedy)
        if int(last or first) >= _MOST_CPUS:
            raise InvalidParameter(name, given, f"CPUs go to {_MOST_CPUS - 1}")
        found += range(int(first), int(last or first) + 1)
    twice = next((cpu for cpu in found if found.count(cpu) > 1), None)
    if twice is not None:
        raise InvalidParameter(name, given, f"names CPU {twice} twice", "Each thread has a CPU of its own.")
    return tuple(found)


def show_cpus(cpus: Sequence[int]) -> str:
    """Name some CPUs.

    >>> show_cpus([0]), show_cpus([0, 2])
    ('CPU 0', 'CPUs 0, 2')
    """
    return f"CPU{'' if len(cpus) == 1 else 's'} {', '.join(map(str, cpus))}"

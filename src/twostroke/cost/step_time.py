"""How long steps take here: learned from those that ran, by their number of query tokens.

A model of the machine would have to know its caches, its threads and its neighbours. Steps come by the hundred a
second, so asking what the last ones of that size took is simpler, and right on any machine.
"""

from __future__ import annotations

import bisect
import math
from collections import deque

_KEPT = 9
"""Times kept of each size: their median forgets a hiccup, and follows a context that grows."""
_EXACT_UP_TO = 8
_SIZES_PER_DOUBLING = 4
_FIRST_SLOPE = 0.25
"""Until a second size was seen, twice the tokens are taken to need 1.25 times the time: little enough to try it."""


class StepTimes:
    """Seconds by size.

    >>> times = StepTimes()
    >>> times.predicted(4) is None
    True
    >>> times.learn(4, 1.0)
    >>> times.predicted(4), times.predicted(8)
    (1.0, 1.25)
    >>> times.learn(8, 1.5)
    >>> times.predicted(6)
    1.25
    """

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}
        self._sizes: list[int] = []

    def learn(self, num_tokens: int, seconds: float) -> None:
        """A step of so many query tokens took so long."""
        size = _size(num_tokens)
        if size not in self._seconds:
            self._seconds[size] = deque(maxlen=_KEPT)
            bisect.insort(self._sizes, size)
        self._seconds[size].append(seconds)
        kept = sorted(self._seconds[size])
        self._medians[size] = kept[len(kept) // 2]

    def num_learned(self, num_tokens: int) -> int:
        """Times known of steps of this size."""
        return len(self._seconds.get(_size(num_tokens), ()))

    def predicted(self, num_tokens: int) -> float | None:
        """Of a step of so many query tokens; between sizes that ran and beyond them along a line. None: none ran."""
        if not self._sizes:
            return None
        size = _size(num_tokens)
        known = self._medians.get(size)
        if known is not None:
            return known
        place = bisect.bisect(self._sizes, size)
        if place == 0:
            return self._medians[self._sizes[0]]  # smaller than any that ran: no longer than that, at least
        lower = self._sizes[place - 1]
        low_s = self._medians[lower]
        if place < len(self._sizes):
            upper = self._sizes[place]
            slope = (self._medians[upper] - low_s) / (upper - lower)
        elif place >= 2:
            before = self._sizes[place - 2]
            slope = max(0.0, (low_s - self._medians[before]) / (lower - before))
        else:
            slope = _FIRST_SLOPE * low_s / lower
        return low_s + slope * (size - lower)


def _size(num_tokens: int) -> int:
    """Counts that are alike, by their smallest: 1 to 8 each by itself, then four to a doubling.

    >>> [_size(n) for n in (7, 8, 9, 10, 64, 70, 80)]
    [7, 8, 8, 10, 64, 64, 77]
    """
    if num_tokens <= _EXACT_UP_TO:
        return num_tokens
    step = math.floor(_SIZES_PER_DOUBLING * math.log2(num_tokens / _EXACT_UP_TO) + 1e-9)
    return math.ceil(_EXACT_UP_TO * 2 ** (step / _SIZES_PER_DOUBLING) - 1e-9)

"""Step times learned from recent steps, by their number of query tokens.

A model of the machine would have to know its caches, its threads and other processes. Steps run by the hundred a
second, so the latest times of each size are a simpler predictor, and it works on any machine.
"""

from __future__ import annotations

import bisect
import math
from collections import deque

_KEPT = 9
"""Times kept for each size. Their lower quartile counts: it follows a growing context, and other processes on the
machine can only make a step longer."""
_EXACT_UP_TO = 8
_MIN_STEPS = 2
"""Fewest steps of a small size whose time is trusted: fewer may be an outlier, or a line between other sizes."""
_SIZES_PER_DOUBLING = 4
_FIRST_SLOPE = 0.25
"""Assumed growth until larger sizes were seen: twice the tokens take 1.25 times as long, low enough that they are
tried."""
_FAR_APART = 1.25
"""Smallest ratio of two sizes that is used for extrapolation; between nearer sizes noise decides."""


class StepTimes:
    """Seconds by size of a step.

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
        self._steps: dict[int, deque[tuple[float, int]]] = {}
        """By size: seconds and tokens of the latest steps."""
        self._last_seen: dict[int, int] = {}
        """By size: step counter at the latest step."""
        self._points: list[tuple[int, float]] = []
        """Tokens and seconds of the usual step of each size, by rising tokens."""

    def learn(self, num_tokens: int, seconds: float, now: int = 0) -> None:
        """Record a step of `num_tokens` query tokens; `now` counts steps."""
        size = _size(num_tokens)
        self._last_seen[size] = now
        if size not in self._steps:
            self._steps[size] = deque(maxlen=_KEPT)
        self._steps[size].append((seconds, num_tokens))
        kept = sorted(self._steps[size])
        usual_s, tokens = kept[len(kept) // 4]
        place = bisect.bisect_left(self._points, (size,))
        is_known = place < len(self._points) and _size(self._points[place][0]) == size
        self._points[place : place + is_known] = [(tokens, usual_s)]

    def forget(self, before: int) -> None:
        """Forget sizes last seen before step `before`.

        Times from a busy machine would otherwise never be corrected.
        """
        for size in [size for size, seen in self._last_seen.items() if seen < before]:
            del self._steps[size], self._last_seen[size]
            self._points = [point for point in self._points if _size(point[0]) != size]

    @property
    def largest(self) -> int:
        """Largest tokens of a remembered step; 0: none."""
        return self._points[-1][0] if self._points else 0

    def num_learned(self, num_tokens: int) -> int:
        """Return the number of known times of steps of this size."""
        return len(self._steps.get(_size(num_tokens), ()))

    def predicted(self, num_tokens: int) -> float | None:
        """Return the expected seconds of a step, linear between known steps and beyond them; None: no step ran."""
        points = self._points
        if not points:
            return None
        last, last_s = points[-1]
        if num_tokens > last and (len(points) == 1 or points[-2][0] * _FAR_APART > last):
            return last_s * (1 + _FIRST_SLOPE * (num_tokens - last) / last)
        if len(points) == 1:
            return last_s
        place = min(max(bisect.bisect_left(points, (num_tokens,)), 1), len(points) - 1)
        (tokens, seconds), (more_tokens, more_seconds) = points[place - 1], points[place]
        slope = (more_seconds - seconds) / (more_tokens - tokens)
        if not tokens <= num_tokens <= more_tokens:
            slope = max(0.0, slope)  # beyond: more tokens never take less
        return max(0.5 * points[0][1], seconds + slope * (num_tokens - tokens))

    def least(self, num_tokens: int) -> float | None:
        """Return a low estimate of the seconds of a step, to decide whether to try its size.

        Times jump where kernels change. A line between the neighbouring sizes may hide that this size is still
        cheap. A small size with fewer than two steps is therefore taken to cost as much as the next smaller one.

        >>> times = StepTimes()
        >>> for tokens, seconds in ((2, 1.0), (4, 2.0), (4, 2.0)):
        ...     times.learn(tokens, seconds)
        >>> times.predicted(3), times.least(3), times.least(4)
        (1.5, 1.0, 2.0)
        """
        expected = self.predicted(num_tokens)
        if expected is None or num_tokens > _EXACT_UP_TO or self.num_learned(num_tokens) >= _MIN_STEPS:
            return expected
        smaller = [seconds for tokens, seconds in self._points if tokens < num_tokens <= self.largest]
        return min(expected, smaller[-1]) if smaller else expected


def _size(num_tokens: int) -> int:
    """Return the size class of a count, as its smallest count: 1 to 8 each alone, then four classes per doubling.

    >>> [_size(n) for n in (7, 8, 9, 10, 64, 70, 80)]
    [7, 8, 8, 10, 64, 64, 77]
    """
    if num_tokens <= _EXACT_UP_TO:
        return num_tokens
    step = math.floor(_SIZES_PER_DOUBLING * math.log2(num_tokens / _EXACT_UP_TO) + 1e-9)
    return math.ceil(_EXACT_UP_TO * 2 ** (step / _SIZES_PER_DOUBLING) - 1e-9)

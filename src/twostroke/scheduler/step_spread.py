"""The excess of steps over their prediction: an upper quantile of measured / predicted over the latest steps.

    ratios of the last steps   |   . .:. :..  .       :    |
                                                  ▲ value: passed by 1 in 100

The value is the k-th largest of n ratios, k = 1 % of n + 1 rounded down, at least 1. If the next ratio is like those
before it, it is larger with probability k / (n + 1): at most 1 % from the 99th step on. Before that the largest counts.
A value that follows the quantile a little at a time needs more late steps to get there than a short run may have.
"""

from __future__ import annotations

import bisect
from collections import deque

_KEPT = 400
"""Number of latest ratios that count; enough that no single step decides the 99th percentile."""


class StepSpread:
    """Quantile of the latest ratios; it starts without any.

    >>> spread = StepSpread(0.99)
    >>> spread.value is None
    True
    >>> for ratio in (1.0, 1.3, 0.9): spread.learn(ratio)
    >>> spread.value
    1.3
    """

    __slots__ = ("_latest", "_share", "_sorted")

    def __init__(self, quantile: float) -> None:
        self._share = 1 - quantile
        self._latest: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        """Return the number of ratios."""
        return len(self._sorted)

    @property
    def value(self) -> float | None:
        """The quantile; None before the first step."""
        num = len(self._sorted)
        return self._sorted[num - max(1, int(self._share * (num + 1) + 1e-9))] if num else None

    def learn(self, ratio: float) -> None:
        """Add a step; forget the oldest beyond the window."""
        self._latest.append(ratio)
        bisect.insort(self._sorted, ratio)
        if len(self._latest) > _KEPT:
            del self._sorted[bisect.bisect_left(self._sorted, self._latest.popleft())]


class Lateness:
    """The share of late steps among the latest."""

    __slots__ = ("_latest", "_num_late")

    def __init__(self) -> None:
        self._latest: deque[bool] = deque(maxlen=_KEPT)
        self._num_late = 0

    @property
    def share(self) -> float:
        """Late steps over the size of the window; missing steps count as in time."""
        return self._num_late / _KEPT

    def learn(self, is_late: bool) -> None:
        """Add a step; forget the oldest beyond the window."""
        if len(self._latest) == _KEPT:
            self._num_late -= self._latest[0]
        self._latest.append(is_late)
        self._num_late += is_late

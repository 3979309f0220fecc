"""How fast memory grows, from samples of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MB = 2**20


def growth_mb_per_minute(times_s: Sequence[float], sizes: Sequence[int], *, warm_up: float) -> float:
    """Median of the slopes between any two samples behind the warm-up (Theil-Sen); 0 where there are fewer than two.

    A leak is in all of them. A burst that memory stays allocated for, or that goes by, is in few, where a least-squares
    line would follow it.

    Args:
        times_s: rising.
        sizes: in bytes, one for each time.
        warm_up: share of the samples that does not count: caches fill, pages are touched for the first time.

    >>> growth_mb_per_minute([0, 30, 60, 90, 120], [0, 0, 0, 2**20, 2 * 2**20], warm_up=0.3)
    2.0
    """
    begin = int(warm_up * len(sizes)) + 1
    minutes, megabytes = np.array(times_s[begin:]) / 60, np.array(sizes[begin:]) / MB
    earlier, later = np.triu_indices(len(minutes), 1)
    if not len(earlier):
        return 0.0
    slopes = (megabytes[later] - megabytes[earlier]) / (minutes[later] - minutes[earlier])
    return round(float(np.median(slopes)), 6)

"""The largest count that fits."""

from __future__ import annotations

from collections.abc import Callable


def largest(fits: Callable[[int], bool], most: int) -> int:
    """By bisection.

    Args:
        fits: whether a count does; if one does, so do all below it.
        most: count that is asked about.

    Returns:
        From 0, which always fits, to `most`.
    """
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low

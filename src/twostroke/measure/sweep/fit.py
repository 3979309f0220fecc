"""TTFT as a polynomial of the prompt's length: what is fixed, what each token costs, what each pair of tokens costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from twostroke.errors import InvalidParameter


@dataclass(frozen=True, slots=True)
class QuadraticFit:
    """y = a + b n + c n^2, least squares: linear layers make b, attention makes c, a step's fixed cost makes a."""

    a: float
    b: float
    c: float
    r_squared: float
    """Share of y's variance that the curve explains; 1 is all."""
    residuals: tuple[float, ...]
    """Measured less fitted, in the order given."""

    def at(self, n: float) -> float:
        """The curve."""
        return self.a + self.b * n + self.c * n * n


def fit_quadratic(lengths: Sequence[float], values: Sequence[float]) -> QuadraticFit:
    """Fits a curve to (length, value) pairs.

    Args:
        lengths: at least three different ones.
        values: as many.

    Raises:
        InvalidParameter: fewer than three different lengths, which no parabola is determined by.

    >>> fit = fit_quadratic([0, 1, 2, 3], [1.0, 3.5, 7.0, 11.5])
    >>> round(fit.a, 6), round(fit.b, 6), round(fit.c, 6), round(fit.r_squared, 6)
    (1.0, 2.0, 0.5, 1.0)
    """
    if len(set(lengths)) < 3:
        raise InvalidParameter("prompt_lengths", list(lengths), "must be three different lengths or more")
    n, y = np.asarray(lengths, np.float64), np.asarray(values, np.float64)
    largest = max(float(np.abs(n).max()), 1.0)
    x = n / largest  # powers of thousands would leave the solver few digits
    scaled, *_ = np.linalg.lstsq(np.stack([np.ones_like(x), x, x * x], axis=1), y, rcond=None)
    a, b, c = (float(value) for value in scaled / (1.0, largest, largest * largest))
    residuals = y - (a + b * n + c * n * n)
    spread = float(((y - y.mean()) ** 2).sum())
    r_squared = 1.0 - float((residuals**2).sum()) / spread if spread else 1.0
    return QuadraticFit(a, b, c, r_squared, tuple(float(value) for value in residuals))

"""How long prompts and outputs are: fixed, uniform or exponential, and what order statistics to expect of them.

Lengths are whole tokens, at least one. An exponential length is max(1, round(x)) with x of the given mean, and its
expectations are summed exactly for that rounding, so a prediction from them is not off by the discretisation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from twostroke.config.checks import whole_number
from twostroke.errors import InvalidParameter

MAX_LENGTH = 2**24
"""Tokens: longer than any context, and short enough to be drawn and thrown away."""

Kind = Literal["fixed", "uniform", "exponential"]


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths in tokens.

    >>> Lengths.parse("uniform:1:128")
    Lengths(kind='uniform', mean=64.5, low=1, high=128)
    """

    kind: Kind
    mean: float
    """Mean before rounding; of an exponential, its scale."""
    low: int = 1
    high: int = 0
    """Bounds of a uniform length, both possible; unused otherwise."""

    @classmethod
    def fixed(cls, length: int) -> Lengths:
        """Always the same."""
        return cls("fixed", float(_checked("length", length)))

    @classmethod
    def uniform(cls, low: int, high: int) -> Lengths:
        """Every whole number from low to high, equally likely."""
        if _checked("high", high) < _checked("low", low):
            raise InvalidParameter("high", high, f"must be at least low, which is {low}")
        return cls("uniform", (low + high) / 2, low, high)

    @classmethod
    def exponential(cls, mean: float) -> Lengths:
        """Many short ones, few long ones."""
        if not 0 < mean <= MAX_LENGTH / 64:  # one draw in 10^28 is longer than 64 means
            raise InvalidParameter("mean", mean, f"must be more than 0 and at most {MAX_LENGTH // 64}")
        return cls("exponential", float(mean))

    @classmethod
    def parse(cls, text: str, name: str = "lengths") -> Lengths:
        """Reads `fixed:N`, `uniform:LOW:HIGH` or `exponential:MEAN`.

        Args:
            text: one of these.
            name: of the parameter, for the error.

        Raises:
            InvalidParameter: the text has another form, or a length is out of range.
        """
        try:
            match text.split(":"):
                case ["fixed", length]:
                    return cls.fixed(int(length))
                case ["uniform", low, high]:
                    return cls.uniform(int(low), int(high))
                case ["exponential", mean]:
                    return cls.exponential(float(mean))
                case _:
                    raise ValueError("none of these forms")
        except ValueError as error:  # InvalidParameter is one: the number that is out of range, named
            limit = "must be fixed:N, uniform:LOW:HIGH or exponential:MEAN"
            raise InvalidParameter(name, text, f"{limit} ({error})") from error

    def __str__(self) -> str:
        """The form that `parse` reads."""
        if self.kind == "uniform":
            return f"uniform:{self.low}:{self.high}"
        return f"{self.kind}:{self.mean:g}"

    def draw(self, count: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
        """`count` lengths; int64 [count]."""
        if self.kind == "fixed":
            return np.full(count, int(self.mean), np.int64)
        if self.kind == "uniform":
            return rng.integers(self.low, self.high, count, endpoint=True, dtype=np.int64)
        return np.maximum(1, np.rint(rng.exponential(self.mean, count))).astype(np.int64)

    def expected_max(self, of: int) -> float:
        """E[longest of `of` independent lengths], for whole tokens.

        E[max] = sum over k >= 0 of P(max > k) = sum of 1 - P(length <= k) ** of.
        """
        if self.kind == "fixed":
            return self.mean
        if self.kind == "uniform":
            span = self.high - self.low + 1
            return self.low + sum(1 - (k / span) ** of for k in range(1, span))
        total, k = 1.0, 1  # k = 0: every length is longer than 0
        while True:
            # round(x) <= k  <=>  x < k + 1/2; ties have no weight
            term = 1 - (-math.expm1(-(k + 0.5) / self.mean)) ** of
            if term < 1e-12:
                return total
            total, k = total + term, k + 1

    @property
    def expected(self) -> float:
        """E[length], for whole tokens."""
        return self.expected_max(1)

    def textbook_max_over_mean(self, of: int) -> float:
        """E[max of `of`] / mean as one finds it in books, for lengths that are no whole numbers.

        Exponential: the harmonic number. Uniform from zero: 2 B / (B + 1). Constant: 1.
        """
        if self.kind == "fixed":
            return 1.0
        if self.kind == "uniform":
            return 2 * of / (of + 1)
        return sum(1 / i for i in range(1, of + 1))


def _checked(name: str, value: int) -> int:
    whole_number(name, value, 1, MAX_LENGTH)
    return value

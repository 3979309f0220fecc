"""Step-time model: predicted seconds of a step from its counts (step_cost.py). Calibration fits it; predictions use it.

    t = layers(tokens) + head(rows of logits) + pairs x pair_s + seen x seen_s

    layers   seconds for so many query tokens, keys excluded: at first flat (weights are read once for all tokens),
             then a line (arithmetic); it bends at the balance of this machine
    head     the same for the LM head and sampling; zero for no row
    pair_s   seconds of one query-key pair of a chunk in one layer
    seen_s   seconds of one token's K and V that a decode reads in one layer

Curves are lines between measured points, so kernels may have steps. The model knows no bytes or rates. A fixed cost
of a step is a part of its curve.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import Protocol

from twostroke.cost.step_cost import StepWork
from twostroke.errors import InvalidParameter


class PredictsSteps(Protocol):
    """A predictor of step times."""

    def seconds(self, work: StepWork) -> float:
        """Return the predicted seconds of a step with this work."""
        ...


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds as a function of a count: lines between points; the last line continues beyond them.

    >>> Curve((1, 3), (1.0, 2.0)).at(2), Curve((1, 3), (1.0, 2.0)).at(5), Curve((1, 3), (1.0, 2.0)).at(0)
    (1.5, 3.0, 0.0)
    """

    counts: tuple[int, ...]
    """Counts, rising, from 1 on."""
    seconds: tuple[float, ...]
    """Seconds for each count, 0 or more. A count of 0 takes no time."""

    def __post_init__(self) -> None:
        """Refuse points that make no curve; a file may hold anything."""
        counts = list(self.counts)
        if not counts or counts[0] < 1 or counts != sorted(set(counts)) or len(counts) != len(self.seconds):
            raise InvalidParameter("curve", counts, "must be one or more rising counts, from 1 on, each with seconds")
        for value in self.seconds:
            if not 0 <= value < float("inf"):
                raise InvalidParameter("curve", value, "must be seconds, 0 or more")

    def at(self, count: int) -> float:
        """Return the seconds for a count."""
        if count <= 0:
            return 0.0
        counts, seconds = self.counts, self.seconds
        if count <= counts[0] or len(counts) == 1:
            return seconds[0]
        right = min(bisect.bisect_left(counts, count), len(counts) - 1)
        low, low_s = counts[right - 1], seconds[right - 1]
        slope = (seconds[right] - low_s) / (counts[right] - low)
        if count > counts[-1]:
            return seconds[-1] + max(0.0, slope) * (count - counts[-1])  # more never takes less
        return low_s + slope * (count - low)


@dataclass(frozen=True, slots=True, kw_only=True)
class FitQuality:
    """Error of a fit against the steps it was made from."""

    num_steps: int
    median_error: float
    """Median of |predicted / measured - 1|."""
    p95_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeModel:
    """Fitted step times of one model, loaded in one way, on one machine.

    >>> layers, head = Curve((1, 512), (0.010, 0.521)), Curve((1,), (0.001,))
    >>> model = StepTimeModel(layers=layers, head=head, pair_s=0.0, seen_s=1e-7)
    >>> round(model.seconds(StepWork(num_tokens=1, num_logits_rows=1, num_pairs=0, num_seen=10_000)), 4)
    0.012
    """

    layers: Curve
    head: Curve
    pair_s: float
    seen_s: float
    quality: FitQuality | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        """Refuse values that are no seconds."""
        for name in ("pair_s", "seen_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise InvalidParameter(name, getattr(self, name), "must be seconds, 0 or more")

    def seconds(self, work: StepWork) -> float:
        attention_s = work.num_pairs * self.pair_s + work.num_seen * self.seen_s
        return self.layers.at(work.num_tokens) + self.head.at(work.num_logits_rows) + attention_s


UNKNOWN_TIMES = StepTimeModel(layers=Curve((1,), (1.0,)), head=Curve((1,), (0.0,)), pair_s=0.0, seen_s=0.0)
"""Placeholder for an engine that is about to be measured: it has no time limits and reads no calibration."""


def scaled(model: StepTimeModel, factor: float) -> StepTimeModel:
    """Return the model for a machine that takes `factor` times as long for everything."""
    return StepTimeModel(
        layers=_scaled(model.layers, factor),
        head=_scaled(model.head, factor),
        pair_s=model.pair_s * factor,
        seen_s=model.seen_s * factor,
        quality=model.quality,
    )


def _scaled(curve: Curve, factor: float) -> Curve:
    return Curve(curve.counts, tuple(value * factor for value in curve.seconds))


def knots(largest: int) -> tuple[int, ...]:
    """Return the counts at which a curve has points: each doubling up to the largest count, and that count.

    >>> knots(6), knots(8)
    ((1, 2, 4, 6), (1, 2, 4, 8))
    """
    return tuple(sorted({1 << i for i in range(largest.bit_length())} | {largest}))

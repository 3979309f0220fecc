"""Counters, gauges and histograms in plain Python, fast enough that a token costs well under a microsecond.

prometheus_client's own instruments take a lock and a linear search for each observation, and none takes a value many
times at once. A step needs that, since all its tokens have the same gap. For one thread; a scrape runs in the same
one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from typing import TypeVar

from prometheus_client.metrics_core import Metric
from prometheus_client.utils import floatToGoString

from twostroke.metrics.families import Family, Kind

_Instrument = TypeVar("_Instrument", "Number", "Distribution")
Sample = tuple[str, dict[str, str], float]
"""Suffix of the name, labels besides the common ones, value."""


class Number:
    """Counter or gauge, with one number for each combination of its own labels."""

    __slots__ = ("_values", "family")

    def __init__(self, family: Family) -> None:
        assert family.kind is not Kind.HISTOGRAM, family.name
        self.family = family
        self._values: dict[tuple[str, ...], float] = {} if family.labels else {(): 0.0}

    def add(self, amount: float, *labels: str) -> None:
        """Increase the number."""
        self._values[labels] = self._values.get(labels, 0.0) + amount

    def set(self, value: float, *labels: str) -> None:
        """Set the number."""
        self._values[labels] = value

    def clear(self) -> None:
        """Remove all combinations of labels."""
        self._values.clear()

    @property
    def value(self) -> float:
        """Sum over all labels."""
        return sum(self._values.values())

    def samples(self) -> Iterator[Sample]:
        """Yield the samples for the exposition."""
        suffix = "_total" if self.family.kind is Kind.COUNTER else ""
        for labels, value in self._values.items():
            yield suffix, dict(zip(self.family.labels, labels, strict=True)), value


class Distribution:
    """Histogram of observed values."""

    __slots__ = ("_bounds", "_counts", "_total", "family")

    def __init__(self, family: Family) -> None:
        assert family.kind is Kind.HISTOGRAM, family.name
        self.family = family
        self._bounds = family.bounds
        self._counts = [0] * (len(family.bounds) + 1)
        self._total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Add a value `times` times; a bucket counts values up to and including its bound."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times

    @property
    def counts(self) -> tuple[int, ...]:
        """Observations per bucket, not cumulative; the last bucket is above all bounds."""
        return tuple(self._counts)

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self._counts)

    @property
    def total(self) -> float:
        """Sum of the observations."""
        return self._total

    def samples(self) -> Iterator[Sample]:
        """Yield the samples for the exposition, with cumulative buckets."""
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        for bound, count in zip(bounds, accumulate(self._counts), strict=True):
            yield "_bucket", {"le": bound}, float(count)
        yield "_sum", {}, self._total
        yield "_count", {}, float(self.count)


Instrument = Number | Distribution


class Instruments:
    """All instruments of an engine by family name; each is created once."""

    def __init__(self) -> None:
        self._by_name: dict[str, Instrument] = {}

    def __getitem__(self, family: Family) -> Instrument:
        return self._by_name[family.name]

    def number(self, family: Family) -> Number:
        """Create a counter or a gauge."""
        return self._keep(Number(family))

    def distribution(self, family: Family) -> Distribution:
        """Create a histogram."""
        return self._keep(Distribution(family))

    def _keep(self, instrument: _Instrument) -> _Instrument:
        assert instrument.family.name not in self._by_name, f"{instrument.family.name} is made twice"
        self._by_name[instrument.family.name] = instrument
        return instrument


def to_metric(instrument: Instrument, name: str, labels: dict[str, str]) -> Metric:
    """Return the instrument as a Prometheus metric with this name; every sample gets the common labels."""
    metric = Metric(name, instrument.family.help, instrument.family.kind)
    for suffix, own, value in instrument.samples():
        metric.add_sample(name + suffix, labels | own, value)
    return metric

"""Where the numbers are kept: plain Python, so that a token costs well under a microsecond.

prometheus_client's own instruments take a lock and a linear search for each observation, and none of them takes a value
many times at once, which is what a step is: everybody's gap is the same. For one thread; a scrape runs in the same one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from typing import TypeVar

from prometheus_client.metrics_core import Metric
from prometheus_client.utils import floatToGoString

from twostroke.metrics.families import Family, Kind

_Made = TypeVar("_Made", "Number", "Distribution")
Sample = tuple[str, dict[str, str], float]
"""Suffix of the name, labels besides those that all samples have, value."""


class Number:
    """A counter, or a gauge; one number for each combination of its own labels."""

    __slots__ = ("_values", "family")

    def __init__(self, family: Family) -> None:
        assert family.kind is not Kind.HISTOGRAM, family.name
        self.family = family
        self._values: dict[tuple[str, ...], float] = {} if family.labels else {(): 0.0}

    def add(self, amount: float, *labels: str) -> None:
        """More of it."""
        self._values[labels] = self._values.get(labels, 0.0) + amount

    def set(self, value: float, *labels: str) -> None:
        """This much."""
        self._values[labels] = value

    def clear(self) -> None:
        """Forgets every combination of labels."""
        self._values.clear()

    @property
    def value(self) -> float:
        """Over all labels."""
        return sum(self._values.values())

    def samples(self) -> Iterator[Sample]:
        """For the exposition."""
        suffix = "_total" if self.family.kind is Kind.COUNTER else ""
        for labels, value in self._values.items():
            yield suffix, dict(zip(self.family.labels, labels, strict=True)), value


class Distribution:
    """A histogram."""

    __slots__ = ("_bounds", "_counts", "_total", "family")

    def __init__(self, family: Family) -> None:
        assert family.kind is Kind.HISTOGRAM, family.name
        self.family = family
        self._bounds = family.bounds
        self._counts = [0] * (len(family.bounds) + 1)
        self._total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """A value, as often as it occurred; a bucket holds what is at most its bound."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times

    @property
    def counts(self) -> tuple[int, ...]:
        """Observations of each bucket alone; the last is beyond all bounds."""
        return tuple(self._counts)

    @property
    def count(self) -> int:
        """Observations."""
        return sum(self._counts)

    @property
    def total(self) -> float:
        """Their sum."""
        return self._total

    def samples(self) -> Iterator[Sample]:
        """For the exposition: buckets count everything below, too."""
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        for bound, count in zip(bounds, accumulate(self._counts), strict=True):
            yield "_bucket", {"le": bound}, float(count)
        yield "_sum", {}, self._total
        yield "_count", {}, float(self.count)


Instrument = Number | Distribution


class Instruments:
    """All that an engine's metrics consist of, by the name of the family; each is made once."""

    def __init__(self) -> None:
        self._by_name: dict[str, Instrument] = {}

    def __getitem__(self, family: Family) -> Instrument:
        return self._by_name[family.name]

    def number(self, family: Family) -> Number:
        """Makes a counter or a gauge."""
        return self._keep(Number(family))

    def distribution(self, family: Family) -> Distribution:
        """Makes a histogram."""
        return self._keep(Distribution(family))

    def _keep(self, instrument: _Made) -> _Made:
        assert instrument.family.name not in self._by_name, f"{instrument.family.name} is made twice"
        self._by_name[instrument.family.name] = instrument
        return instrument


def exposed(instrument: Instrument, name: str, labels: dict[str, str]) -> Metric:
    """The instrument under a full name, every sample with the common labels."""
    metric = Metric(name, instrument.family.help, instrument.family.kind)
    for suffix, own, value in instrument.samples():
        metric.add_sample(name + suffix, labels | own, value)
    return metric

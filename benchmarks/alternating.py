"""Alternating runs of several variants, A B A B, so that a slow phase of the machine affects all of them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

from twostroke.measure.model_engine import ModelEngine
from twostroke.measure.report import median

Way = TypeVar("Way")
Result = TypeVar("Result")


@contextmanager
def close_together(engines: Mapping[Way, ModelEngine]) -> Generator[Mapping[Way, ModelEngine]]:
    """Yield engines for alternating runs, and close them at the end."""
    try:
        yield engines
    finally:
        for engine in engines.values():
            engine.close()


def alternate(
    rounds: int,
    ways: Iterable[str],
    measure: Callable[[str, int], Result],
    *,
    warm_up: int = 0,
    rotates: bool = False,
) -> dict[str, list[Result]]:
    """Measure every variant once per round, and return the results of each, round by round.

    Args:
        rounds: measured rounds.
        ways: names of the variants.
        measure: called with a variant and the number of the round.
        warm_up: rounds before the others, with negative numbers, that do not count.
        rotates: whether each round begins one variant later, so that each is as often first as any other.
    """
    found: dict[str, list[Result]] = {way: [] for way in ways}
    for number in range(-warm_up, rounds):
        order = list(found)
        first = number % len(order) if rotates else 0
        for way in order[first:] + order[:first]:
            result = measure(way, number)
            if number >= 0:
                found[way].append(result)
    return found


def ratio(ones: Sequence[float], others: Sequence[float]) -> float:
    """Return the median of the ratios of neighbours in time, which is less noisy than the ratio of two medians.

    >>> ratio([1.0, 9.0, 2.0], [1.0, 3.0, 1.0])
    2.0
    """
    return median([one / other for one, other in zip(ones, others, strict=True)])


def in_ms(times_s: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Return times in milliseconds, for a result."""
    return {name: [round(1e3 * value, 4) for value in of] for name, of in times_s.items()}


def columns(rounds: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Return each figure, round by round."""
    return {key: [of_round[key] for of_round in rounds] for key in rounds[0]}


def medians(rounds: Sequence[Mapping[str, float]], keys: Iterable[str] | None = None) -> dict[str, float]:
    """Return the median of each figure over the rounds, only of `keys` if given.

    >>> medians([{"a": 1.0}, {"a": 5.0}, {"a": 2.0}])
    {'a': 2.0}
    """
    return {key: median([of_round[key] for of_round in rounds]) for key in keys or rounds[0]}

"""Lengths: what is drawn agrees with what is expected of it."""

from __future__ import annotations

import numpy as np
import pytest

from twostroke.errors import InvalidParameter
from twostroke.measure.workload import Lengths

ALL = [
    Lengths.fixed(7),
    Lengths.uniform(1, 40),
    Lengths.uniform(5, 5),
    Lengths.exponential(12.0),
    Lengths.exponential(0.4),
]


@pytest.mark.parametrize("lengths", ALL, ids=str)
def test_text_form_reads_back(lengths: Lengths) -> None:
    assert Lengths.parse(str(lengths)) == lengths


@pytest.mark.parametrize(
    "text", ["", "fixed", "fixed:", "fixed:-3", "fixed:0", "uniform:9:3", "exponential:0", "normal:3"]
)
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(InvalidParameter):
        Lengths.parse(text)


@pytest.mark.parametrize("lengths", ALL, ids=str)
@pytest.mark.parametrize("of", [1, 4, 32])
def test_expected_maximum_is_that_of_a_large_sample(lengths: Lengths, of: int) -> None:
    drawn = lengths.draw(40_000 * of, np.random.default_rng(of)).reshape(-1, of)
    assert drawn.min() >= 1
    # four standard errors of the sample's mean
    longest = drawn.max(axis=1)
    tolerance = 4 * longest.std() / np.sqrt(len(longest)) + 1e-9
    assert lengths.expected_max(of) == pytest.approx(longest.mean(), abs=tolerance)


def test_textbook_ratios() -> None:
    exponential = [Lengths.exponential(64).textbook_max_over_mean(b) for b in (4, 8, 16, 32)]
    assert exponential == pytest.approx([2.0833, 2.7179, 3.3807, 4.0585], abs=1e-4)
    assert Lengths.uniform(1, 128).textbook_max_over_mean(32) == pytest.approx(64 / 33)
    assert Lengths.fixed(9).textbook_max_over_mean(32) == 1.0


@pytest.mark.parametrize("of", [4, 32])
def test_rounding_matters_less_the_longer_the_lengths(of: int) -> None:
    def error(mean: float) -> float:
        lengths = Lengths.exponential(mean)
        return abs(lengths.expected_max(of) / lengths.expected / lengths.textbook_max_over_mean(of) - 1)

    assert error(1000) < error(100) < error(10)
    assert error(1000) < 1e-3

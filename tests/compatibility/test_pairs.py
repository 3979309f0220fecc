"""Every pair of features, but those with drafts: both work together, to the last bit, or are refused at start."""

from __future__ import annotations

import re

import pytest

from compatibility.engines import Engines
from compatibility.features import DRAFTS, FEATURES, PAIRS, Pair
from compatibility.outcomes import REFUSALS, named_pairs
from compatibility.pairs import check, name
from compatibility.table import PAGE, markdown


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if not set(pair) & set(DRAFTS)], ids=name)
def test_pair(pair: Pair, engines: Engines) -> None:
    check(pair, engines)


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_alone(feature: object, engines: Engines) -> None:
    """A feature with itself: what is seen of it in pairs is seen of it alone."""
    assert feature in FEATURES
    check(Pair(feature, feature), engines)


def test_a_refusal_names_the_value_and_the_remedy() -> None:
    for refusal in REFUSALS:
        assert re.fullmatch(r"[\w.]+=\S+: .+\. [A-Z].+\.", refusal.text), refusal.text


def test_outcomes_are_of_pairs_that_there_are_and_said_once() -> None:
    named = named_pairs()
    assert set(named) <= {pair.names for pair in PAIRS}
    assert len(set(named)) == len(named)


def test_the_page_is_that_of_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(), "run `make compatibility`"

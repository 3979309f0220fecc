"""The pairs of features with drafts, in a file of their own: tests of two files run side by side."""

from __future__ import annotations

import pytest

from compatibility.engines import Engines
from compatibility.features import DRAFTS, PAIRS, Pair
from compatibility.pairs import check, name


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if set(pair) & set(DRAFTS)], ids=name)
def test_pair(pair: Pair, engines: Engines) -> None:
    check(pair, engines)

"""Checks of a pair, for all tests that run pairs."""

from __future__ import annotations

import pytest

from compatibility.engines import Engines, Run
from compatibility.features import Feature, Pair, Sign
from compatibility.outcomes import idle_of, refusal_of
from compatibility.signs import SIGNS
from twostroke.errors import InvalidParameter, SetupError
from twostroke.request import FinishReason


def name(pair: Pair) -> str:
    """Return the name of the test."""
    return f"{pair.one.name} + {pair.other.name}"


def check(pair: Pair, engines: Engines) -> None:
    """Check that the pair is refused with the table's message, or that both features are seen and no bit differs."""
    expected = refusal_of(pair)
    if expected is not None:
        with pytest.raises((InvalidParameter, SetupError)) as refused:
            engines.run(pair)
        assert engines.words(refused.value) == expected
        return
    run = engines.run(pair)
    reference = engines.reference(pair).essence
    assert run.essence.keys() == reference.keys()
    if any(feature.may_drift for feature in pair):
        ended = [a.finish_reason for a in run.answers.values() if a.token_ids or a.hidden_state is not None]
        assert len(ended) == len(reference)
        assert not {None, FinishReason.ABORT, FinishReason.ERROR} & set(ended)
    else:
        for request_id, answer in reference.items():
            assert run.essence[request_id] == answer, request_id
    idle = idle_of(pair)
    unseen = [feature.name for feature in pair if not is_seen(feature, pair, run, engines)]
    if idle is not None and idle.seldom and not unseen:
        return
    assert unseen == ([] if idle is None else [idle.name]), "a feature was silently left out"


def is_seen(feature: Feature, pair: Pair, run: Run, engines: Engines) -> bool:
    """Return whether the feature did anything."""
    if feature.sign is not Sign.OTHER_NUMBERS:
        return SIGNS[feature.sign](run, feature)
    without = [other for other in pair if other is not feature]
    return run.essence != engines.reference(without).essence

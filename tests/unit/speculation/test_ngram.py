"""Prompt lookup against its definition, read off the text token by token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.sampling.noise import NoiseStream
from twostroke.sampling.state import SamplingRules, SamplingState
from twostroke.sampling_params import SamplingParams
from twostroke.speculation.ngram import NgramProposer
from twostroke.speculation.proposer import DraftRequest


def looked_up(tokens: list[int], num_drafts: int, *, most: int = 5, fewest: int = 1) -> tuple[int, ...]:
    sampling = SamplingState(SamplingRules.compile(SamplingParams(), 8), NoiseStream(0, 0), tokens)
    request = DraftRequest(0, np.array(tokens, np.int32), num_drafts, sampling, [])
    ((drafts, _),) = NgramProposer(max_ngram=most, min_ngram=fewest).propose([request])
    return drafts


def by_definition(tokens: list[int], num_drafts: int, most: int, fewest: int) -> tuple[int, ...]:
    for length in range(min(most, len(tokens) - 1), fewest - 1, -1):
        ending = tokens[len(tokens) - length :]
        for begin in range(len(tokens) - length - 1, -1, -1):
            if tokens[begin : begin + length] == ending:
                text = list(tokens)
                for i in range(num_drafts):  # what is guessed may be copied on
                    text.append(text[begin + length + i])
                return tuple(text[len(tokens) :])
    return ()


@given(
    tokens=st.lists(st.integers(0, 3), max_size=40),
    num_drafts=st.integers(0, 9),
    fewest=st.integers(1, 4),
    more=st.integers(0, 4),
)
def test_it_is_what_the_definition_says(tokens: list[int], num_drafts: int, fewest: int, more: int) -> None:
    expected = by_definition(tokens, num_drafts, fewest + more, fewest)
    assert looked_up(tokens, num_drafts, most=fewest + more, fewest=fewest) == expected


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        ([1, 2, 3, 4, 5, 1, 2, 3], (4, 5, 1)),
        ([7, 7, 7], (7, 7, 7)),  # a repetitive text continues to repeat
        ([9, 1, 2, 8, 1, 2, 5, 1, 2], (5, 1, 2)),  # the latest place
        ([3, 1, 2, 8, 1, 2, 5, 3, 1, 2], (8, 1, 2)),  # but a longer ending before a later one
        ([1, 2, 3], ()),
        ([1], ()),
    ],
    ids=str,
)
def test_examples(tokens: list[int], drafts: tuple[int, ...]) -> None:
    assert looked_up(tokens, 3) == drafts


def test_a_short_ending_is_chance() -> None:
    assert looked_up([1, 2, 9, 2], 2, fewest=2) == ()

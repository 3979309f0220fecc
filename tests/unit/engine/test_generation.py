"""End of a generation by its tokens."""

from __future__ import annotations

from typing import Any

import pytest

from twostroke.engine.generation import TokenStop, find_token_stop
from twostroke.request import FinishReason
from twostroke.sampling_params import SamplingParams

EOS = frozenset({1, 2})
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.mark.parametrize(
    ("new", "before", "params", "expected"),
    [
        ([5], 0, {}, None),
        ([1], 0, {}, TokenStop(1, STOP)),
        ([5, 2, 6], 0, {}, TokenStop(2, STOP)),
        ([1, 1], 0, {"ignore_eos": True}, None),
        ([5], 9, {"max_tokens": 10}, TokenStop(1, LENGTH)),
        ([5, 6, 7], 8, {"max_tokens": 10}, TokenStop(2, LENGTH)),
        ([1], 9, {"max_tokens": 10}, TokenStop(1, STOP)),
        ([5, 6], 8, {"max_tokens": 10, "stop_token_ids": [6]}, TokenStop(2, STOP, 6)),
        ([7], 0, {"stop_token_ids": [7]}, TokenStop(1, STOP, 7)),
        ([7], 0, {"stop_token_ids": [7], "ignore_eos": True}, TokenStop(1, STOP, 7)),
        ([1], 0, {"stop_token_ids": [1]}, TokenStop(1, STOP)),
        ([1], 0, {"stop_token_ids": [1], "ignore_eos": True}, TokenStop(1, STOP, 1)),
        ([1, 7, 7, 7], 0, {"min_tokens": 3, "stop_token_ids": [7]}, TokenStop(4, STOP, 7)),
        ([1], 3, {"min_tokens": 3}, TokenStop(1, STOP)),
        ([1], 2, {"min_tokens": 3}, None),
        ([], 4, {}, None),
    ],
)
def test_find_token_stop(new: list[int], before: int, params: dict[str, Any], expected: TokenStop | None) -> None:
    assert find_token_stop(new, before, SamplingParams(**{"max_tokens": 100} | params), EOS) == expected

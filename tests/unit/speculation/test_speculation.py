"""Drafts through the whole engine: what they save, what is counted, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from twostroke import LLM, SamplingParams
from twostroke.errors import InvalidParameter, UnknownParameter
from twostroke.events import StepCommitted
from twostroke.metrics import families
from twostroke.metrics.engine_metrics import EngineMetrics

REPEATS = "x = 1; y = 2; " * 8


def test_one_pass_makes_a_token_and_every_draft_that_stands() -> None:
    with LLM("embedded", threads=1, speculative_config={"method": "ngram", "num_speculative_tokens": 3}) as llm:
        (output,) = llm.generate([REPEATS], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
        events = list(llm.engine.engine.recent_events)
    metrics = EngineMetrics("m")
    for event in events:
        metrics.observe(event)
    count = {family: metrics.instruments[family] for family in families.FAMILIES}
    num_accepted = sum(value for *_, value in count[families.SPEC_DECODE_NUM_ACCEPTED_TOKENS].samples())
    num_drafted = sum(value for *_, value in count[families.SPEC_DECODE_NUM_DRAFT_TOKENS].samples())
    by_position = {
        labels["position"]: value
        for _, labels, value in count[families.SPEC_DECODE_NUM_ACCEPTED_TOKENS_PER_POS].samples()
    }
    num_tokens = len(output.outputs[0].token_ids)
    passes = [e for e in events if isinstance(e, StepCommitted) and any(c.num_tokens for c in e.commits)]
    assert num_tokens == 60
    assert num_tokens == len(passes) + num_accepted
    assert 20 < num_accepted <= num_drafted, "the text repeats itself: most drafts stand"
    assert sum(by_position.values()) == num_accepted
    assert by_position["0"] >= by_position["1"] >= by_position["2"]
    assert by_position.keys() == {"0", "1", "2"}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"method": "eagel"}, "speculative_config.method='eagel'.*'ngram'"),
        ({}, "needs a method: 'ngram'"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens=0.*1 to 64"),
        ({"method": "ngram", "num_speculative_tokens": 65}, "num_speculative_tokens=65.*1 to 64"),
        ({"method": "ngram", "num_speculative_tokens": True}, "num_speculative_tokens"),
        ({"method": "ngram", "prompt_lookup_min": 6}, "prompt_lookup_min=6.*prompt_lookup_max, which is 5"),
        ([1], "must be an object"),
        ("ngram", "must be an object"),
    ],
    ids=str,
)
def test_what_cannot_be_drafted_is_refused_before_anything_is_loaded(given: Any, told: str) -> None:
    with pytest.raises(InvalidParameter, match=told):
        LLM("no such model", speculative_config=given)


def test_unknown_settings_are_named() -> None:
    with pytest.raises(UnknownParameter, match="speculative_config has no parameter 'lookup'"):
        LLM("no such model", speculative_config={"method": "ngram", "lookup": 3})

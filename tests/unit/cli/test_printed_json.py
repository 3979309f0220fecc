"""`generate --json` prints all that an output has, including fields that are computed when they are read."""

from __future__ import annotations

import json

import pytest

import text_fakes
from twostroke.batch import TokenLogprobs
from twostroke.cli.generate import print_json
from twostroke.client.prompt_scores import PromptScores
from twostroke.outputs import RequestOutput


def test_log_probabilities_of_the_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    scores = PromptScores(text_fakes.tokenizer("byte_level"), 2)
    scores.put(1, [TokenLogprobs((7, 70), (-2.0, -0.5), 3)])
    print_json(RequestOutput("a", "xy", (5, 7), scores, [], finished=True))
    told = json.loads(capsys.readouterr().out)
    assert told["prompt_logprobs"][0] is None
    assert {token: of["logprob"] for token, of in told["prompt_logprobs"][1].items()} == {"7": -2.0, "70": -0.5}

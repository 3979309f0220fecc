"""A request's name is its own while it lives, and free for the next one as soon as it has ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from twostroke.client.text_engine import build_text_engine
from twostroke.config.engine import EngineConfig
from twostroke.errors import InvalidParameter
from twostroke.sampling_params import SamplingParams


def test_the_name_of_an_ended_request_can_be_used_again(random_models: dict[str, Path]) -> None:
    engine = build_text_engine(
        EngineConfig.from_keywords(model=str(random_models["llama"]), threads=1, max_model_len=64)
    )
    params = SamplingParams(max_tokens=3, temperature=0.0)
    found: list[tuple[int, ...]] = []
    for _ in range(2):
        engine.submit({"prompt_token_ids": [5, 6, 7]}, params, request_id="mine")
        with pytest.raises(InvalidParameter, match="in use"):
            engine.submit({"prompt_token_ids": [5]}, params, request_id="mine")
        while engine.has_work:
            found += [output.outputs[0].token_ids for output in engine.step() if output.finished]
    engine.close()
    assert len(found) == 2
    assert found[0] == found[1]

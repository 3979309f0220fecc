"""Hidden states for embeddings: what transformers computes, and the same bits whatever runs beside them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from model_folders import SHAPES
from twostroke import SamplingParams
from twostroke.client.submission import Submission
from twostroke.client.text_engine import TextEngine, build_text_engine
from twostroke.config.engine import EngineConfig
from twostroke.engine.clock import monotonic_clock
from twostroke.events import StepScheduled
from twostroke.outputs import RequestOutput
from twostroke.request import FinishReason

Prompt = tuple[int, ...]


def prompts() -> list[Prompt]:
    """Prompts of many lengths, two with a common beginning."""
    rng = random.Random(3)
    common = tuple(rng.randrange(256) for _ in range(70))
    alone = [tuple(rng.randrange(256) for _ in range(n)) for n in (1, 2, 17, 64, 129)]
    return [*alone, (*common, 5), (*common, 6, 7)]


def engine(model: Path, **config: Any) -> TextEngine:
    return build_text_engine(
        EngineConfig.from_keywords(model=str(model), threads=1, **{"num_kv_blocks": 200, **config})
    )


def embed(
    runner: TextEngine, given: Sequence[Prompt], beside: Sequence[Prompt] = (), max_tokens: int = 20
) -> tuple[list[RequestOutput], list[RequestOutput]]:
    """Return the outputs of embeddings, and of ordinary requests that run beside them."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1, logprobs=0)
    ordinary = [runner.submit({"prompt_token_ids": prompt}, params) for prompt in beside]
    asked: list[str] = []
    for prompt in given:
        checked = runner.prepare({"prompt_token_ids": prompt}, SamplingParams(max_tokens=1))
        wanted = dataclasses.replace(checked, wants_hidden_state=True)
        asked.append(
            runner.enqueue(
                Submission(prompt=wanted, arrival_time_s=monotonic_clock(), request_id=f"embed-{len(asked)}")
            )
        )
    done: dict[str, RequestOutput] = {}
    while runner.has_work:
        done |= {output.request_id: output for output in runner.step() if output.finished}
    return [done[request_id] for request_id in asked], [done[request_id] for request_id in ordinary]


def states(outputs: Sequence[RequestOutput]) -> list[bytes | None]:
    return [output.hidden_state for output in outputs]


@pytest.fixture(scope="module", params=SHAPES)
def model(request: pytest.FixtureRequest, random_models: dict[str, Path]) -> Path:
    return random_models[request.param]


@pytest.fixture(scope="module")
def alone(model: Path) -> list[bytes | None]:
    """Return each output from an engine where nothing else runs and nothing is cached."""
    runner = engine(model, enable_prefix_caching=False)
    return [states(embed(runner, [prompt])[0])[0] for prompt in prompts()]


@torch.no_grad()
def test_states_are_those_of_transformers(model: Path, alone: list[bytes | None]) -> None:
    theirs = transformers.AutoModel.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    for prompt, state in zip(prompts(), alone, strict=True):
        assert state is not None
        expected = theirs(input_ids=torch.tensor([prompt])).last_hidden_state[0, -1].numpy()
        found = np.frombuffer(state, np.float32)
        assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"max_num_batched_tokens": 7},
        {"max_num_seqs": 2},
        {"num_kv_blocks": 400, "block_size": 8},
        {"enable_prefix_caching": False},
    ],
    ids=str,
)
def test_bits_do_not_depend_on_company(model: Path, alone: list[bytes | None], knobs: dict[str, Any]) -> None:
    runner = engine(model, **knobs)
    beside = prompts()[:4]
    _, expected = embed(runner, [], beside)
    found, ordinary = embed(runner, prompts(), beside)
    assert states(found) == alone
    assert [output.outputs[0].logprobs for output in ordinary] == [output.outputs[0].logprobs for output in expected]
    assert {output.hidden_state for output in ordinary} == {None}
    again, _ = embed(runner, prompts())
    assert states(again) == alone
    if "enable_prefix_caching" not in knobs:
        cached = [output.num_cached_tokens for output in again]
        assert max(cached) >= 64, cached
        assert all(output.num_cached_tokens < len(output.prompt_token_ids) for output in again)


def test_no_token_comes_out(model: Path) -> None:
    (output,), _ = embed(engine(model), prompts()[2:3])
    (part,) = output.outputs
    assert (part.text, part.token_ids, part.finish_reason) == ("", (), FinishReason.STOP)


def test_blocks_come_back(model: Path) -> None:
    runner = engine(model)
    embed(runner, prompts(), prompts())
    assert runner.engine.kv_usage.num_used == 0
    assert runner.engine.num_live == 0


def test_preempted_prefills_have_the_same_bits(random_models: dict[str, Path]) -> None:
    """Short prompts that grow push long ones out that are half computed."""
    model = random_models["llama"]
    long = [tuple(range(i, i + 60)) for i in range(6)]
    short = [tuple(range(i, i + 9)) for i in range(12)]
    sizes: dict[str, Any] = {"max_num_batched_tokens": 16, "max_model_len": 80, "block_size": 8}
    roomy, _ = embed(engine(model, **sizes), long)
    tight_engine = engine(model, **{**sizes, "num_kv_blocks": 40})
    tight, _ = embed(tight_engine, long, short, max_tokens=50)
    preempted = {
        request_id
        for event in tight_engine.engine.recent_events
        if isinstance(event, StepScheduled)
        for request_id in event.batch.preempted_request_ids
    }
    assert any(request_id.startswith("embed-") for request_id in preempted), preempted
    assert states(tight) == states(roomy)

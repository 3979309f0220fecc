"""Steps launched before the tokens of the one before are known here give the same bits, whatever becomes of these."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from twostroke import LLM, RequestOutput, SamplingParams
from twostroke.errors import InvalidParameter
from twostroke.runner.async_runner import AsyncModelRunner
from twostroke.sampling.sampler import Sampler
from twostroke.sampling.state import SamplingState

PROMPTS = [tuple(range(i, i + 5 + 3 * i)) for i in range(12)]
FORM = {"regex": "[a-f]{10,20}[0-9]+x"}
CHOICES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "logprobs": 2},
    {"temperature": 0.8, "repetition_penalty": 1.3, "min_tokens": 4},
    {"temperature": 0.0, "bad_words": ["the"], "prompt_logprobs": 0},
    {"temperature": 1.0, "structured_outputs": FORM},
)
KNOBS: tuple[dict[str, Any], ...] = (
    {},
    {"max_num_batched_tokens": 5},
    {"max_num_seqs": 3, "num_kv_blocks": 20, "block_size": 4},
    {"enable_prefix_caching": False, "batching": "static"},
    {"enable_kv_cache": False, "enable_chunked_prefill": False, "enable_prefix_caching": False},
    {"kv_check_rate": 1.0, "block_size": 4},
)


def params(**more: Any) -> list[SamplingParams]:
    choices = [{**CHOICES[i % len(CHOICES)], **more} for i in range(len(PROMPTS))]
    return [SamplingParams(max_tokens=24 + i, seed=i, **chosen) for i, chosen in enumerate(choices)]


def generate(model: str, given: list[SamplingParams], **config: Any) -> list[RequestOutput]:
    with LLM(model, **{"threads": 1, "max_model_len": 80, "num_kv_blocks": 300, **config}) as llm:
        return llm.generate([{"prompt_token_ids": list(prompt)} for prompt in PROMPTS], given)


def essence(outputs: Sequence[RequestOutput]) -> list[Any]:
    return [
        (one.token_ids, one.text, one.finish_reason, one.logprobs, output.prompt_logprobs)
        for output in outputs
        for one in output.outputs
    ]


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return for each step how many of its tokens the device has to pass on itself."""
    counts: list[int] = []
    find = AsyncModelRunner._early_token_indices

    def counting(self: AsyncModelRunner, *args: Any) -> Any:
        places = find(self, *args)
        counts.append(0 if places is None else int((places >= 0).sum()))
        return places

    monkeypatch.setattr(AsyncModelRunner, "_early_token_indices", counting)
    return counts


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
@pytest.mark.parametrize("name", ["qwen3", "mistral"])
def test_same_bits(name: str, knobs: dict[str, Any], random_models: dict[str, Path], ahead: list[int]) -> None:
    model = str(random_models[name])
    expected = essence(generate(model, params(), **knobs))
    assert sum(ahead) == 0
    assert essence(generate(model, params(), **knobs, async_scheduling=True)) == expected
    assert sum(ahead) > 100, "hardly a step was launched ahead"


def test_ends_that_come_while_the_next_step_runs(ahead: list[int]) -> None:
    """End-of-text tokens and stop strings are found while the next step runs."""
    given = params(stop=["e", "\n"], logprobs=None)
    expected = essence(generate("embedded", given))
    assert essence(generate("embedded", given, async_scheduling=True)) == expected
    assert sum(ahead) > 20
    assert {entry[2].value for entry in expected} >= {"stop", "length"}


@pytest.mark.parametrize("share", [0.05, 0.5, 1.0])
def test_tokens_that_were_too_close_to_hand_on_are_drawn_and_their_step_computed_again(
    share: float, random_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, ahead: list[int]
) -> None:
    model, rng = str(random_models["qwen3"]), random.Random(3)
    given = [
        SamplingParams(max_tokens=20 + i, seed=i, temperature=i % 3 / 2, top_p=1 - i % 2 / 10, ignore_eos=True)
        for i in range(len(PROMPTS))
    ]
    expected = essence(generate(model, given))

    def early(self: Sampler, logits: Tensor, states: Sequence[SamplingState]) -> Tensor:
        token_ids = self.draw(logits, states)[0]
        is_close = torch.tensor([rng.random() < share for _ in states])
        return torch.where(is_close, -1, token_ids)

    monkeypatch.setattr(Sampler, "draw_early", early)
    for knobs in ({}, {"num_kv_blocks": 20, "block_size": 4, "max_num_batched_tokens": 9}):
        assert essence(generate(model, given, **knobs, async_scheduling=True)) == expected
    assert sum(ahead) > 200


def test_a_step_that_fails_costs_its_own_requests(random_models: dict[str, Path]) -> None:
    """Requests of the step that was launched after it end, too; later requests are unaffected."""
    model, given = str(random_models["qwen3"]), SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    prompts = [{"prompt_token_ids": list(prompt)} for prompt in PROMPTS[:3]]
    with LLM(model, threads=1, max_model_len=80, num_kv_blocks=100) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, given)]
    for name in ("forward", "compute_logits"):
        with LLM(model, threads=1, max_model_len=80, num_kv_blocks=100, async_scheduling=True) as llm:
            decoder: Any = llm.engine.engine._executor._runner._model  # type: ignore[attr-defined]
            works, calls = getattr(decoder, name), iter(range(1000))

            def fails_once(*args: Any, works: Any = works, calls: Any = calls) -> Any:
                if next(calls) == 4:
                    raise RuntimeError("out of luck")
                return works(*args)

            setattr(decoder, name, fails_once)
            assert {output.outputs[0].finish_reason.value for output in llm.generate(prompts, given)} == {"error"}
            assert [output.outputs[0].token_ids for output in llm.generate(prompts, given)] == expected


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"speculative_config": {"method": "ngram"}}, "drafting needs the tokens of the previous step"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2"),
        ({"async_scheduling": "yes"}, "true or false"),
    ],
)
def test_refused(settings: dict[str, Any], told: str, random_models: dict[str, Path]) -> None:
    with pytest.raises(InvalidParameter, match=told):
        LLM(str(random_models["qwen3"]), **{"async_scheduling": True, **settings})

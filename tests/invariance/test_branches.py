"""Branches of drafts change no bit: of a request that takes one, of other requests, or of the KV in blocks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from knowing_drafter import KNOWING, count_branches, knowing_drafts
from twostroke import LLM, RequestOutput, SamplingParams

KNOBS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "block size 1": {"block_size": 1},
    "block size 8, budget 30": {"block_size": 8, "max_num_batched_tokens": 30},
    "contiguous": {"kv_reservation": "contiguous", "enable_prefix_caching": False},
    "int8 KV": {"kv_cache_dtype": "int8"},
    "preempted": {"num_kv_blocks": 24, "max_model_len": 128},
    "every hit is checked": {"kv_check_rate": 1.0},
}


def essence(outputs: Sequence[RequestOutput]) -> list[Any]:
    return [
        (o.outputs[0].token_ids, [[(t, p.logprob) for t, p in at.items()] for at in o.outputs[0].logprobs or []])
        for o in outputs
    ]


def load() -> tuple[list[dict[str, list[int]]], list[SamplingParams]]:
    dice = random.Random(5)
    prompts = [{"prompt_token_ids": [dice.randint(5, 200) for _ in range(dice.randint(3, 60))]} for _ in range(8)]
    params = [
        SamplingParams(temperature=t, seed=i, max_tokens=40, ignore_eos=True, logprobs=2, presence_penalty=p)
        for i, (t, p) in enumerate([(0.0, 0.0), (0.8, 0.0), (1.0, 0.5), (0.0, 1.0)] * 2)
    ]
    return prompts, params


@cache
def without_drafts(folder: str, kv_cache_dtype: str) -> list[RequestOutput]:
    """Return the run that every knob is compared with; only the format of KV changes bits."""
    with LLM(folder, threads=1, kv_cache_memory=1 << 26, kv_cache_dtype=kv_cache_dtype) as llm:
        return llm.generate(*load())


@pytest.mark.parametrize("model", ["llama", "mistral", "qwen2", "qwen3", "bloom", "embedded"])
@pytest.mark.parametrize("knob", KNOBS)
def test_a_branch_changes_no_bit(
    knob: str, model: str, random_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config: dict[str, Any] = {"threads": 1, "kv_cache_memory": 1 << 26, **KNOBS[knob]}
    if "num_kv_blocks" in config:
        del config["kv_cache_memory"]
    folder = model if model == "embedded" else str(random_models[model])
    prompts, params = load()
    alone = without_drafts(folder, KNOBS[knob].get("kv_cache_dtype", "auto"))
    texts = [(*o.prompt_token_ids, *o.outputs[0].token_ids) for o in alone]

    kept = count_branches(monkeypatch)
    knowing_drafts(monkeypatch, texts)
    with LLM(folder, **config, speculative_config=KNOWING) as llm:
        branched = llm.generate(prompts, params)
        again = llm.generate(prompts, params)  # from blocks that branches were copied to
    assert essence(branched) == essence(alone)
    assert essence(again) == essence(alone)
    if knob == "preempted":
        assert any(o.metrics.num_preemptions for o in branched if o.metrics), "there was room for all"
    assert len(kept) > 40, "too few drafts of branches were accepted"

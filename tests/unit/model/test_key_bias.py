"""Quantized KV stores keys less their bias, so that large biases cost neither accuracy nor a score."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from twostroke import LLM, SamplingParams
from twostroke.config.kv_format import KVCacheDType
from twostroke.engine.input_processor import PromptDict
from twostroke.layers.attention import Attention

PROMPT: PromptDict = {"prompt_token_ids": list(range(3, 90))}
LARGE = 300.0


@pytest.fixture(scope="module")
def model(random_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    """Qwen2 with biases as its trained models have them: large where rotation turns least."""
    folder = tmp_path_factory.mktemp("large-bias")
    shutil.copytree(random_models["qwen2"], folder, dirs_exist_ok=True)
    (path,) = folder.glob("*.safetensors")
    weights = load_file(path)
    for name, weight in weights.items():
        if name.endswith("k_proj.bias"):
            heads = weight.view(4, -1)
            heads[:, -1] = LARGE
            heads[:, heads.shape[1] // 2 - 1] = -LARGE
    save_file(weights, path)
    return str(folder)


def scores(model: str, kv_cache_dtype: KVCacheDType, **settings: Any) -> list[float]:
    """Logprobs of the prompt's tokens."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    with LLM(model, kv_cache_dtype=kv_cache_dtype, num_kv_blocks=32, threads=1, **settings) as llm:
        (output,) = llm.generate([PROMPT], params)
    assert output.prompt_logprobs is not None
    return [next(iter(found.values())).logprob for found in output.prompt_logprobs[1:] if found]


@pytest.mark.parametrize("kernels", ["reference", "auto"])
@pytest.mark.parametrize(("kv_cache_dtype", "limit"), [("int8", 0.08), ("int4", 0.8)])
def test_a_large_bias_costs_little(model: str, kernels: str, kv_cache_dtype: KVCacheDType, limit: float) -> None:
    exact, found = (scores(model, kv, kernels=kernels) for kv in ("f32", kv_cache_dtype))
    assert max(abs(a - b) for a, b in zip(exact, found, strict=True)) < limit


def test_with_whole_keys_it_would_cost_more(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = scores(model, "f32")
    made = Attention.__init__

    def without(self: Attention, *args: Any) -> None:
        made(self, *args[:4])

    monkeypatch.setattr(Attention, "__init__", without)
    whole = scores(model, "int4")
    monkeypatch.undo()
    less = scores(model, "int4")
    worst = [max(abs(a - b) for a, b in zip(exact, found, strict=True)) for found in (whole, less)]
    assert worst[0] > 2 * worst[1]

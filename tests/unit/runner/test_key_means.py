"""Quantized KV stores keys less their means, so that what all keys share costs neither accuracy nor a score."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from twostroke import LLM, SamplingParams
from twostroke.client.input_processor import PromptDict
from twostroke.config.kv_format import KVCacheDType
from twostroke.kernels.dispatch import operators_for
from twostroke.layers.attention import Attention
from twostroke.layers.row_split import RowSplit
from twostroke.model.checkpoint import read_model_config
from twostroke.model.decoder import DecoderModel, Placement
from twostroke.model.loader import load_model, open_weights
from twostroke.runner.key_means import center_keys, key_means, key_means_bytes

CPU = torch.device("cpu")
PROMPT: PromptDict = {"prompt_token_ids": list(range(3, 90))}
LARGE = 300.0
TOKENS = [(7 * i + 3) % 250 for i in range(100)]


def loaded(folder: Path, max_model_len: int, dtype: torch.dtype = torch.float32) -> DecoderModel:
    config = read_model_config(folder)
    operators = operators_for(CPU, dtype)
    source = open_weights(folder, config)
    return load_model(source, config, Placement(operators, dtype, CPU, max_model_len))


def naive_mean(keys: NDArray[np.float64], theta: float, num_positions: int) -> NDArray[np.float64]:
    """Return the mean over positions of keys [heads, tokens, head_dim], rotated pair by pair as complex numbers."""
    half = keys.shape[-1] // 2
    pairs = keys[..., :half] + 1j * keys[..., half:]
    frequencies = theta ** -(np.arange(half) / half)
    turns = np.exp(1j * np.arange(num_positions)[:, None] * frequencies)
    at_zero = (pairs / turns[: pairs.shape[1]])[:, 1:].mean(axis=1)
    mean = at_zero * turns.mean(axis=0)
    return np.concatenate([mean.real, mean.imag], axis=-1)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_means_are_those_of_the_keys_of_transformers(random_models: dict[str, Path], family: str) -> None:
    model = loaded(random_models[family], 64)
    theirs: Any = AutoModelForCausalLM.from_pretrained(random_models[family], dtype=torch.float32)
    with torch.inference_mode():
        cache = theirs(torch.tensor([TOKENS]), use_cache=True).past_key_values
    found = key_means(model, TOKENS, torch.float32, CPU, RowSplit())
    assert list(found) == list(range(model.config.num_layers))
    for layer_id, mean in found.items():
        if model.config.layers[layer_id].kv.window is not None:
            continue  # of these transformers keeps the last keys alone
        rope = model.config.layers[layer_id].rope
        assert rope is not None
        assert rope.rope_type == "default"
        keys = cache.layers[layer_id].keys[0].double().numpy()
        expected = naive_mean(keys, rope.theta, min(2048, model.config.max_context))
        np.testing.assert_allclose(mean.double().numpy(), expected, atol=1e-4)
    assert key_means_bytes(model.config, "int4", 4) == sum(mean.nbytes for mean in found.values())
    assert key_means_bytes(model.config, "f32", 4) == 0


def test_means_do_not_depend_on_the_longest_request(random_models: dict[str, Path]) -> None:
    """Nor do stored keys, which are the same in every engine."""
    folder = random_models["gemma3"]
    short, long = (key_means(loaded(folder, n), TOKENS, torch.float32, CPU, RowSplit()) for n in (2, 300))
    assert short.keys() == long.keys()
    assert all(torch.equal(short[layer_id], long[layer_id]) for layer_id in short)


@pytest.mark.parametrize("token_ids", [[], [5]], ids=str)
def test_a_tokenizer_that_knows_nothing_of_the_text(random_models: dict[str, Path], token_ids: list[int]) -> None:
    model = loaded(random_models["llama"], 64)
    center_keys(model, lambda _: token_ids, torch.float32, CPU, RowSplit())
    assert len(model.key_means) == model.config.num_layers
    assert all(mean.isfinite().all() for mean in model.key_means.values())


def test_keys_of_capped_scores_stay_whole(random_models: dict[str, Path]) -> None:
    assert key_means(loaded(random_models["gemma2"], 64), TOKENS, torch.float32, CPU, RowSplit()) == {}


@pytest.fixture(scope="module")
def model(random_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    """Qwen2 with biases like those of trained models: large where rotation is slowest."""
    folder = tmp_path_factory.mktemp("large-bias")
    shutil.copytree(random_models["qwen2"], folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e9}
    (folder / "config.json").write_text(json.dumps(config))
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

    def keeps_whole(self: Attention, mean: torch.Tensor) -> None:
        del self, mean

    monkeypatch.setattr(Attention, "center_keys", keeps_whole)
    whole = scores(model, "int4")
    monkeypatch.undo()
    less = scores(model, "int4")
    worst = [max(abs(a - b) for a, b in zip(exact, found, strict=True)) for found in (whole, less)]
    assert worst[0] > 2 * worst[1]

"""Random weights in place of a checkpoint's: what is drawn, engines that run on it, and what is refused."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import gguf_files
import quantized_folders
from fixtures.random_models import model_config
from model_folders import write_tokenizer
from two_pools import TwoPools, alone, sequence
from twostroke import LLM, SamplingParams
from twostroke.client.text_engine import build_text_engine
from twostroke.config.engine import EngineConfig
from twostroke.config.load import LoadConfig
from twostroke.errors import InvalidParameter, ModelNotFound
from twostroke.model import checkpoint
from twostroke.model.loader import check_weights, multiplied_parts
from twostroke.model.model_files import find_model, find_model_of
from twostroke.model.random_weights import RandomWeights
from twostroke.startup.handover_setup import identity_facts
from twostroke.startup.preparation import prepare

CPU = torch.device("cpu")
PROMPTS: list[Any] = [{"prompt_token_ids": [7, 8, 9] * n} for n in (1, 9, 20)]


def write_shape(folder: Path, family: str = "qwen3", **changes: Any) -> Path:
    """A folder that has no more than a model's shape and a tokenizer."""
    config = model_config(family, 64, "bfloat16", vocab_size=300, **changes)
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_shape(tmp_path)


def weights_of_shape(folder: Path) -> RandomWeights:
    return RandomWeights(folder, find_model(str(folder)).config(), CPU)


def generated(folder: Path, **settings: Any) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """Greedy tokens, and how likely they were; finite, all of them."""
    given = {"load_format": "dummy", "threads": 1, "num_kv_blocks": 32, "max_model_len": 96, **settings}
    with LLM(str(folder), **given) as llm:
        params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=1)
        outputs = [output.outputs[0] for output in llm.generate(PROMPTS, params)]
    found = [
        (tuple(o.token_ids), tuple(at[t].logprob for t, at in zip(o.token_ids, o.logprobs or [], strict=True)))
        for o in outputs
    ]
    assert all(len(tokens) == 6 for tokens, _ in found)
    assert all(-20 < logprob <= 0 for _, logprobs in found for logprob in logprobs)
    return found


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_folder_of_a_shape_alone_runs(family: str, tied: bool, tmp_path: Path) -> None:
    folder = write_shape(tmp_path, family, tie_word_embeddings=tied)
    check_weights(weights_of_shape(folder), find_model(str(folder)).config(), None)
    found = generated(folder)
    assert found == generated(folder)
    assert not list(folder.glob("*.safetensors"))


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16", "kernels": "reference"},
        {"dtype": "float16", "kernels": "reference"},
        {"quantization": "int8"},
        {"quantization": "int4", "group_size": 64},
        {"quantization": "fp8", "kernels": "reference"},
        {"quantization": "int8", "kernels": "reference"},
    ],
    ids=str,
)
def test_types_and_quantization_on_load(settings: dict[str, Any], folder: Path) -> None:
    assert generated(folder, **settings) == generated(folder, **settings)


def test_a_row_is_what_it_is_in_the_whole(folder: Path) -> None:
    weights = weights_of_shape(folder)
    name = "lm_head.weight"
    whole = weights.read(name, torch.float32)
    assert whole.shape == weights.weights[name].shape == (300, 64)
    for rows in (slice(0, 1), slice(63, 65), slice(128, 300), slice(296, 300)):
        assert torch.equal(weights.read(name, torch.float32, rows), whole[rows])
        assert torch.equal(weights.read(name, torch.bfloat16, rows), whole[rows].bfloat16())
    assert len(torch.unique(whole[:, :8], dim=0)) == 300  # no row is drawn twice


def test_numbers_are_an_initialisers(folder: Path) -> None:
    weights = weights_of_shape(write_shape(folder, "qwen2"))
    config = find_model(str(folder)).config()
    for name in weights.weights:
        found = weights.read(name, torch.float32)
        if name in multiplied_parts(config) or name == "model.embed_tokens.weight":
            assert abs(float(found.mean())) < 0.002
            assert abs(float(found.std()) - 0.02) < 0.002
        else:
            assert torch.equal(found, torch.full_like(found, 0.0 if name.endswith(".bias") else 1.0)), name
    first, second = (weights.read(f"model.layers.{i}.mlp.up_proj.weight", torch.float32) for i in range(2))
    assert not torch.equal(first, second)


def test_files_that_are_there_are_not_read(folder: Path) -> None:
    without = generated(folder)
    (folder / "model.safetensors").write_bytes(b"no such thing")
    assert generated(folder) == without


def test_weights_are_not_fetched_from_a_hub(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    asked: list[list[str]] = []

    def fetch(_: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        assert allow_patterns
        asked.append(ignore_patterns)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert checkpoint.find_model_folder("somebody/some-model") == folder
    assert find_model_of(LoadConfig(model="somebody/some-model", load_format="dummy")).path == folder
    assert ["*.safetensors" in left_out for left_out in asked] == [False, True]


def test_pools_tell_them_from_a_checkpoint(folder: Path) -> None:
    config = find_model(str(folder)).config()
    facts = [identity_facts(folder, config, LoadConfig(load_format=name), [1]) for name in ("auto", "dummy")]  # pyright: ignore
    assert facts[0]["weights"] != facts[1]["weights"]
    other = replace(config, norm_eps=config.norm_eps * 2)  # this does not follow from any weight
    assert identity_facts(folder, other, LoadConfig(load_format="dummy"), [1]) != facts[1]
    assert identity_facts(folder, other, LoadConfig(), [1]) != facts[0]
    same = replace(config, dtype="bfloat16", max_position_embeddings=config.max_position_embeddings // 2)
    assert identity_facts(folder, same, LoadConfig(), [1]) == facts[0]


def test_whoever_starts_it_is_told(folder: Path) -> None:
    settings = {"load_format": "dummy", "threads": 1, "num_kv_blocks": 16, "max_model_len": 64}
    engine = build_text_engine(EngineConfig.from_keywords(model=str(folder), **settings))
    assert "random weights" in engine.startup_lines[0]
    engine.close()


def test_two_pools_are_one_model(folder: Path) -> None:
    given: dict[str, Any] = {
        "model": str(folder),
        "load_format": "dummy",
        "threads": 1,
        "num_kv_blocks": 64,
        "max_model_len": 96,
        "block_size": 4,
    }
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    requests = [sequence(f"r{n}", [7, 8, 9] * n, params) for n in (3, 9)]
    with tempfile.TemporaryDirectory() as place:
        pools = TwoPools(Path(place), **given)
        try:
            answers = pools.run(requests)
        finally:
            pools.close()
    expected = alone(EngineConfig.from_keywords(**given), requests)
    assert {name: a.token_ids for name, a in answers.items()} == {name: a.token_ids for name, a in expected.items()}


def test_without_a_tokenizer_the_remedies_are_named(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelNotFound, match=r"has no tokenizer\.json.*--tokenizer FOLDER.*--tokenizer embedded"):
        generated(folder)
    other = folder / "other"
    other.mkdir()
    write_tokenizer(other)
    assert generated(folder, tokenizer=str(other))


def test_without_config_json(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ModelNotFound, match=r"has no config\.json"):
        generated(folder)


def test_the_default_still_wants_weights(folder: Path) -> None:
    with pytest.raises(ModelNotFound, match="no safetensors files"):
        generated(folder, load_format="auto")


def test_refused_with_a_gguf_file() -> None:
    config = EngineConfig.from_keywords(model=str(gguf_files.fixture("llama-q8_0")), load_format="dummy")
    with pytest.raises(InvalidParameter, match=r"load_format='dummy': .*GGUF file.*Give a folder"):
        prepare(config)


def test_refused_with_a_quantized_checkpoints_shape(tmp_path: Path) -> None:
    shutil.copytree(quantized_folders.FIXTURES / quantized_folders.AWQ, tmp_path / "awq")
    write_tokenizer(tmp_path / "awq", 120)
    config = EngineConfig.from_keywords(model=str(tmp_path / "awq"), load_format="dummy")
    with pytest.raises(InvalidParameter, match=r"load_format='dummy': .*quantized.*quantization_config"):
        prepare(config)


@pytest.mark.parametrize("quantization", ["awq", "gptq", "compressed-tensors", "mxfp4", "gguf"])
def test_refused_with_a_checkpoints_quantization(quantization: Any) -> None:
    with pytest.raises(InvalidParameter, match=f"load_format='dummy': .*quantization={quantization}.*int8, int4, fp8"):
        LoadConfig(load_format="dummy", quantization=quantization)

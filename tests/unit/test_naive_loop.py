"""The engine's greedy answers equal those of the article's naive loop over transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers

from model_folders import SHAPES
from oracle.naive_generation import NaiveGeneration, generate_naive
from twostroke import LLM, SamplingParams
from twostroke.model.model_files import find_model
from twostroke.outputs import RequestOutput
from twostroke.request import FinishReason
from twostroke.tokenizer.tokenizer import Tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
"""The loop keeps the article's names; transformers calls it `cache` from 5.40 on."""

PROMPTS = ("a", "The quick brown fox jumps over the lazy dog. ", "def fibonacci(n):\n    ")


def naive(folder: Path, prompt: str, max_tokens: int, eos_token_ids: tuple[int, ...]) -> NaiveGeneration:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_folder(folder)
    return generate_naive(model, tokenizer, prompt, max_tokens=max_tokens, eos_token_ids=eos_token_ids)


def generate(folder: Path, prompts: tuple[str, ...], max_tokens: int) -> list[RequestOutput]:
    with LLM(str(folder), threads=1, num_kv_blocks=64, dtype="float32") as llm:
        return llm.generate(list(prompts), SamplingParams(temperature=0.0, max_tokens=max_tokens))


@pytest.mark.parametrize("family", SHAPES)
def test_every_family_equals_the_naive_loop(family: str, random_models: dict[str, Path]) -> None:
    """All prompts run in one batch here, and one after the other there."""
    folder = random_models[family]
    for prompt, output in zip(PROMPTS, generate(folder, PROMPTS, 60), strict=True):
        expected = naive(folder, prompt, 60, (256,))
        assert list(output.outputs[0].token_ids) == expected.token_ids
        assert output.outputs[0].text == expected.text
        assert expected.tokens_per_pass[0] == len(output.prompt_token_ids)
        assert set(expected.tokens_per_pass[1:]) == {1}


def test_the_embedded_model_equals_the_naive_loop() -> None:
    """The model has trained weights, and makes some hundred tokens of code."""
    folder = find_model("embedded").path
    (output,) = generate(folder, PROMPTS[2:], 300)
    end = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    expected = naive(folder, PROMPTS[2], 300, (end,))
    assert len(expected.token_ids) >= 100
    assert list(output.outputs[0].token_ids) == expected.token_ids
    assert output.outputs[0].text == expected.text


def test_both_stop_at_the_end_token(random_models: dict[str, Path], tmp_path: Path) -> None:
    """In a copy of the model, a token from the middle of an answer becomes the end token."""
    longer = naive(random_models["llama"], PROMPTS[1], 60, ()).token_ids
    end = next(i for i, token in enumerate(longer) if i >= 8 and token not in longer[:i])
    folder = tmp_path / "model"
    shutil.copytree(random_models["llama"], folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": longer[end]}))
    (output,) = generate(folder, PROMPTS[1:2], 60)
    expected = naive(folder, PROMPTS[1], 60, (longer[end],))
    assert list(output.outputs[0].token_ids) == expected.token_ids == longer[: end + 1]
    assert output.outputs[0].text == expected.text
    assert output.outputs[0].finish_reason is FinishReason.STOP

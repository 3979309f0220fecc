"""Trained models that others made: what llama.cpp makes of the same file, recorded by fixtures/real_models/make.py.

llama.cpp rounds the inputs of its products to 8 bits, as we do by default; here both are held to our float32 arithmetic
on the numbers of the file.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from oracle.paged_driver import PagedDriver
from twostroke.client.input_processor import Prompt
from twostroke.kernels.dispatch import operators_for
from twostroke.llm import LLM
from twostroke.model.decoder import DecoderModel, Placement
from twostroke.model.loader import load_model
from twostroke.model.model_files import GGUFModel
from twostroke.sampling_params import SamplingParams
from twostroke.tokenizer.tokenizer import Tokenizer

TEXT = Path(__file__).parents[2] / "LICENSE"
RECORDINGS: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "fixtures" / "real_models" / "recordings.json").read_text(encoding="utf-8")
)
CPU = torch.device("cpu")
WINDOW: int = RECORDINGS["window"]
NEAR = 0.5
"""Logits: how far llama.cpp's rounded inputs move one token beside another."""


@dataclass(frozen=True)
class Loaded:
    """A trained model in float32 on the reference operators, and what was recorded of it."""

    path: Path
    model: DecoderModel
    tokenizer: Tokenizer
    recorded: dict[str, Any]

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """Logits after each token. [tokens, vocab_size]"""
        driver = PagedDriver(self.model, num_blocks=6 * WINDOW // 16 + 8)
        return driver.logits(driver.step([(driver.add(token_ids), len(token_ids))])[0])

    def windows(self) -> list[list[int]]:
        """Three stretches of the text, each behind what the vocabulary puts in front."""
        front = self.tokenizer.encode("")
        token_ids = self.tokenizer.encode(TEXT.read_text(encoding="utf-8"))[len(front) :]
        assert len(token_ids) == self.recorded["num_text_tokens"]
        size = WINDOW - len(front)
        return [front + token_ids[begin : begin + size] for begin in range(0, 3 * size, size)]


@pytest.fixture(scope="module", params=["smollm2", "gemma3-270m"])
def loaded(request: pytest.FixtureRequest, real_model: Callable[[str], Path]) -> Loaded:
    files = GGUFModel(path := real_model(request.param))
    config = files.config()
    model = load_model(
        files.weights(config, None),
        config,
        Placement(operators_for(CPU, torch.float32, "reference"), torch.float32, CPU, WINDOW + 64),
    )
    return Loaded(path, model, files.tokenizer(), RECORDINGS["models"][request.param])


@pytest.fixture(scope="module")
def float32_losses(loaded: Loaded) -> list[float]:
    """Mean loss of each window's tokens but the first."""
    return [
        float(torch.nn.functional.cross_entropy(loaded.logits(window)[:-1], torch.tensor(window[1:])))
        for window in loaded.windows()
    ]


def test_it_is_the_recorded_file(loaded: Loaded) -> None:
    with loaded.path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == loaded.recorded["sha256"]


def test_perplexity_is_llama_cpps(loaded: Loaded, float32_losses: list[float]) -> None:
    for ours, theirs in zip(float32_losses, loaded.recorded["mean_losses"], strict=True):
        assert math.exp(theirs - ours) == pytest.approx(1, abs=0.015)


def test_its_greedy_tokens_are_the_likeliest_or_near(loaded: Loaded) -> None:
    """Each of its tokens after the same tokens before: ours too, or one that rounding may put first."""
    num_equal = num_tokens = 0
    for recorded in loaded.recorded["greedy"]:
        prompt, following = recorded["prompt_token_ids"], recorded["token_ids"]
        assert loaded.tokenizer.encode(recorded["text"]) == prompt
        logits = loaded.logits([*prompt, *following[:-1]])[len(prompt) - 1 :]
        for row, token_id in zip(logits, following, strict=True):
            assert float(row.max() - row[token_id]) <= NEAR
            num_equal, num_tokens = num_equal + int(row.argmax() == token_id), num_tokens + 1
    assert num_equal / num_tokens >= 0.95


def test_the_defaults_cost_less_than_a_hundredth_of_perplexity(loaded: Loaded, float32_losses: list[float]) -> None:
    windows = loaded.windows()
    prompts: list[Prompt] = [{"prompt_token_ids": window} for window in windows]
    with LLM(str(loaded.path), max_model_len=1024, max_num_seqs=4) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0))
    total = 0.0
    for window, output in zip(windows, outputs, strict=True):
        assert output.prompt_logprobs is not None
        for token_id, found in zip(window[1:], output.prompt_logprobs[1:], strict=True):
            assert found is not None
            total -= found[token_id].logprob
    mean = total / (len(windows) * (WINDOW - 1))
    assert math.exp(mean - sum(float32_losses) / len(windows)) == pytest.approx(1, abs=0.01)


def test_the_template_is_the_recorded_one(loaded: Loaded) -> None:
    templates = loaded.tokenizer.chat_templates
    known = {entry["template"] for entry in RECORDINGS["templates"].values()}
    assert not templates or templates["default"] in known

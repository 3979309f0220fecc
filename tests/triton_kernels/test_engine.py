"""A whole engine on Triton's kernels: the reference's tokens, and in any batch the same ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from triton_device import device
from twostroke import LLM, SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter
PROMPTS = [[5, 6, 7], [9] * 21]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=3),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=20, seed=1, max_tokens=2),
]


def tokens(model: Path, prompts: list[list[int]], params: list[SamplingParams], **settings: Any) -> list[list[int]]:
    settings = {"device": device().type, "threads": 1, "num_kv_blocks": 16, "block_size": 16} | settings
    with LLM(str(model), **settings) as llm:
        return [
            output.outputs[0].token_ids
            for output in llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
        ]


@pytest.mark.parametrize("family", ["qwen3", "bloom", "gpt_oss"])
def test_tokens_are_the_references_in_any_batch(family: str, random_models: dict[str, Path]) -> None:
    model = random_models[family]
    expected = tokens(model, PROMPTS, PARAMS, kernels="reference", device="cpu")
    found = tokens(model, PROMPTS, PARAMS, kernels="triton", max_num_batched_tokens=16)
    assert found == expected
    assert tokens(model, PROMPTS[1:], PARAMS[1:], kernels="triton") == expected[1:]


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_quantized_weights_and_kv(form: str, random_models: dict[str, Path]) -> None:
    """Against the same numbers in torch's operators: there the codes become floats when they are packed."""
    quantized = {"quantization": form, "kv_cache_dtype": form}
    prompts, params = [PROMPTS[0]], PARAMS[:1]
    expected = tokens(random_models["llama"], prompts, params, kernels="reference", device="cpu", **quantized)
    assert tokens(random_models["llama"], prompts, params, kernels="triton", **quantized) == expected

"""Nothing that an engine serves changes its weights."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from held_tensors import tensors_of
from twostroke import LLM, SamplingParams

DRAFTS = {"method": "early_exit", "exit_layer": 1, "num_speculative_tokens": 3}


def digest(model: object) -> str:
    """Return a checksum of all weights of a model, bit by bit."""
    found = hashlib.sha256()
    for tensor in tensors_of(model, set()):
        found.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@pytest.mark.parametrize(
    "given",
    [{}, {"kernels": "reference"}, {"quantization": "int8", "dtype": "bfloat16"}, {"speculative_config": DRAFTS}],
    ids=str,
)
def test_a_load_changes_no_bit_of_the_weights(random_models: dict[str, Path], given: dict[str, Any]) -> None:
    """Chunks, preemptions, cache hits, sampling: the checksum is the same, and nothing is recorded for gradients."""
    sizes = {"num_kv_blocks": 12, "max_model_len": 96, "max_num_batched_tokens": 24}
    prompts = [{"prompt_token_ids": [i % 3, *range(40, 50 + 2 * i)]} for i in range(12)]
    params = [SamplingParams(max_tokens=30, temperature=i % 2, seed=i, logprobs=2, ignore_eos=True) for i in range(12)]
    with LLM(str(random_models["llama"]), threads=1, **sizes, **given) as llm:
        runner: Any = llm.engine.engine._executor._runner  # pyright: ignore
        tensors = list(tensors_of(runner._model, set()))
        assert sum(tensor.nbytes for tensor in tensors) > 50_000
        before = digest(runner._model)
        first, second = llm.generate(prompts, params), llm.generate(prompts, params)
        assert digest(runner._model) == before
        assert not any(tensor.requires_grad or tensor.grad_fn for tensor in tensors_of(runner._model, set()))
        next(tensor for tensor in tensors if tensor.numel() > 1).view(-1)[:1].add_(1)
        assert digest(runner._model) != before, "the checksum sees a single changed number"
    assert [o.outputs[0].token_ids for o in first] == [o.outputs[0].token_ids for o in second]
    assert sum(o.metrics.num_preemptions for o in first if o.metrics) > 0
    assert sum(o.num_cached_tokens for o in second) > 0

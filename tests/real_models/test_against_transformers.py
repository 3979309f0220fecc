"""Trained models that others made, from their packages: perplexity and best tokens are those of transformers on the
numbers that the file encodes."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from oracle.paged_driver import PagedDriver
from twostroke.config.model import ModelConfig
from twostroke.kernels.dispatch import operators_for
from twostroke.model.decoder import Placement
from twostroke.model.gguf.weights import GGUFWeights
from twostroke.model.loader import load_model
from twostroke.model.model_files import GGUFModel

CPU = torch.device("cpu")
TEXT = Path(__file__).parents[2] / "README.md"
WINDOW, NUM_WINDOWS = 680, 3
"""Longer than Gemma's sliding window."""


def config_of(config: ModelConfig) -> Any:
    """transformers' config of the same shape."""
    layer = config.layers[0]
    shared: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.kv.num_kv_heads,
        "head_dim": layer.kv.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
    }
    if config.architecture == "LlamaForCausalLM":
        assert layer.rope is not None
        return transformers.LlamaConfig(
            **shared, rope_parameters={"rope_type": "default", "rope_theta": layer.rope.theta}
        )
    thetas = {layer.kv.window is None: layer.rope.theta for layer in config.layers if layer.rope is not None}
    kinds = {"full_attention": thetas[True], "sliding_attention": thetas[False]}
    return transformers.Gemma3TextConfig(
        **shared,
        query_pre_attn_scalar=round(layer.softmax_scale**-2),
        sliding_window=next(window for window in config.layer_windows if window),
        layer_types=["full_attention" if window is None else "sliding_attention" for window in config.layer_windows],
        rope_parameters={kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in kinds.items()},
    )


def transformers_model(config: ModelConfig, weights: GGUFWeights) -> Any:
    theirs = config_of(config)
    theirs._attn_implementation = "eager"
    model = getattr(transformers, config.architecture)(theirs).eval()
    tensors = {
        name: weights.read(name, torch.float32) if len(stored.shape) == 1 else weights.read_float32(name)
        for name, stored in weights.weights.items()
    }
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    model.tie_weights()
    return model


def losses(logits: Tensor, token_ids: list[int]) -> Tensor:
    """Return the loss of each token but the first."""
    return torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(token_ids[1:]), reduction="none")


@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
@torch.no_grad()
def test_perplexity_and_best_tokens(name: str, real_model: Callable[[str], Path]) -> None:
    files = GGUFModel(real_model(name))
    config = files.config()
    weights = files.weights(config, None)
    assert isinstance(weights, GGUFWeights)
    token_ids = files.tokenizer().encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=False)
    windows = [token_ids[begin : begin + WINDOW] for begin in range(0, WINDOW * NUM_WINDOWS, WINDOW)]
    assert len(windows[-1]) == WINDOW
    theirs = transformers_model(config, weights)
    ours = load_model(
        weights, config, Placement(operators_for(CPU, torch.float32, "reference"), torch.float32, CPU, WINDOW)
    )
    totals, num_equal, num_tokens = [0.0, 0.0], 0, 0
    for window in windows:
        expected = theirs(input_ids=torch.tensor([window]), use_cache=False).logits[0].float()
        driver = PagedDriver(ours, num_blocks=6 * WINDOW // 16 + 8)
        found = driver.logits(driver.step([(driver.add(window), len(window))])[0])
        for i, logits in enumerate((found, expected)):
            totals[i] += float(losses(logits, window).sum())
        best, second = expected.topk(2, dim=-1).values.unbind(-1)
        is_equal = found.argmax(-1) == expected.argmax(-1)
        assert ((best - second)[~is_equal] < 0.05).all(), "only near ties come out otherwise"
        num_equal, num_tokens = num_equal + int(is_equal.sum()), num_tokens + len(window)
    perplexities = [math.exp(total / (num_tokens - NUM_WINDOWS)) for total in totals]
    assert perplexities[0] == pytest.approx(perplexities[1], rel=1e-3)
    assert num_equal / num_tokens >= 0.995

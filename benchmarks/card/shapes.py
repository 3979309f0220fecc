"""Model shapes for measurements of a card: a published model's, and a small one for machines without a card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from twostroke.config.model import ModelConfig

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_scaling": None,
    "use_sliding_window": False,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
}
QWEN3_8B: dict[str, Any] = {
    **_QWEN3,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "max_window_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}
"""Shape in Qwen3-8B's config.json."""
TINY: dict[str, Any] = {
    **_QWEN3,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "max_window_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 4096,
}
"""A small shape; its vocabulary has room for the tokenizer of the embedded model."""


def write_shape(folder: Path, shape: dict[str, Any]) -> Path:
    """Make a model folder with config.json only; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape, indent=1) + "\n", encoding="utf-8")
    return folder


def is_alike(config: ModelConfig, shape: dict[str, Any]) -> bool:
    """Return whether a model has this shape in bfloat16, regardless of its name; the goals apply to this shape."""
    layer = config.layers[0]
    found = {
        "hidden_size": config.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.kv.num_kv_heads,
        "head_dim": layer.kv.head_dim,
        "vocab_size": config.vocab_size,
        "torch_dtype": config.dtype,
    }
    return all(shape[name] == value for name, value in found.items())

"""Shapes of published models, as in their config.json, for plans: no weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model_folders import write_tokenizer

LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A dense decoder with gated MLPs."""

    family: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    context: int
    num_parameters: int
    """Number of parameters as published; an oracle of the shape, not computed from it."""
    head_dim: int = 128
    is_tied: bool = False
    extra: dict[str, Any] | None = None


MODELS = {
    "Llama-2-7B": Published(
        family="Llama",
        hidden=4096,
        intermediate=11008,
        layers=32,
        heads=32,
        kv_heads=32,
        vocab=32000,
        context=4096,
        num_parameters=6_738_415_616,
    ),
    "Llama-2-13B": Published(
        family="Llama",
        hidden=5120,
        intermediate=13824,
        layers=40,
        heads=40,
        kv_heads=40,
        vocab=32000,
        context=4096,
        num_parameters=13_015_864_320,
    ),
    "Llama-3.1-8B": Published(
        family="Llama",
        hidden=4096,
        intermediate=14336,
        layers=32,
        heads=32,
        kv_heads=8,
        vocab=128256,
        context=131072,
        num_parameters=8_030_261_248,
        extra={"rope_theta": 500000.0, "rope_scaling": LLAMA_3_ROPE},
    ),
    "Llama-3.1-70B": Published(
        family="Llama",
        hidden=8192,
        intermediate=28672,
        layers=80,
        heads=64,
        kv_heads=8,
        vocab=128256,
        context=131072,
        num_parameters=70_553_706_496,
        extra={"rope_theta": 500000.0, "rope_scaling": LLAMA_3_ROPE},
    ),
    "Mistral-7B-v0.3": Published(
        family="Mistral",
        hidden=4096,
        intermediate=14336,
        layers=32,
        heads=32,
        kv_heads=8,
        vocab=32768,
        context=32768,
        num_parameters=7_248_023_552,
        extra={"sliding_window": None, "rope_theta": 1000000.0},
    ),
    "Qwen2.5-0.5B": Published(
        family="Qwen2",
        hidden=896,
        intermediate=4864,
        layers=24,
        heads=14,
        kv_heads=2,
        vocab=151936,
        context=32768,
        num_parameters=494_032_768,
        head_dim=64,
        is_tied=True,
        extra={"use_sliding_window": False},
    ),
    "Qwen2.5-7B": Published(
        family="Qwen2",
        hidden=3584,
        intermediate=18944,
        layers=28,
        heads=28,
        kv_heads=4,
        vocab=152064,
        context=32768,
        num_parameters=7_615_616_512,
        extra={"use_sliding_window": False},
    ),
    "Qwen2.5-32B": Published(
        family="Qwen2",
        hidden=5120,
        intermediate=27648,
        layers=64,
        heads=40,
        kv_heads=8,
        vocab=152064,
        context=32768,
        num_parameters=32_763_876_352,
        extra={"use_sliding_window": False},
    ),
    "Qwen3-0.6B": Published(
        family="Qwen3",
        hidden=1024,
        intermediate=3072,
        layers=28,
        heads=16,
        kv_heads=8,
        vocab=151936,
        context=40960,
        num_parameters=596_049_920,
        is_tied=True,
    ),
    "Qwen3-8B": Published(
        family="Qwen3",
        hidden=4096,
        intermediate=12288,
        layers=36,
        heads=32,
        kv_heads=8,
        vocab=151936,
        context=40960,
        num_parameters=8_190_735_360,
    ),
    "Qwen3-32B": Published(
        family="Qwen3",
        hidden=5120,
        intermediate=25600,
        layers=64,
        heads=64,
        kv_heads=8,
        vocab=151936,
        context=40960,
        num_parameters=32_762_123_264,
    ),
}


def write_published(folder: Path, name: str) -> Path:
    """Write config.json and a small tokenizer: enough for a plan with random weights."""
    model = MODELS[name]
    fields: dict[str, Any] = {
        "architectures": [f"{model.family}ForCausalLM"],
        "model_type": model.family.lower(),
        "hidden_size": model.hidden,
        "intermediate_size": model.intermediate,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab,
        "max_position_embeddings": model.context,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": model.is_tied,
        "torch_dtype": "bfloat16",
        "eos_token_id": 2,
        **(model.extra or {}),
    }
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(fields))
    write_tokenizer(path)
    return path

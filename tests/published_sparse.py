"""Sparse models of published sizes, by the config classes of transformers, for plans: no weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from model_folders import write_tokenizer
from oracle.naive_model import config_class, model_class


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedSparse:
    """A decoder with experts."""

    family: str
    total: str
    """Parameters in billions, as published, to the digits that are."""
    active: str
    """Those that a token needs."""
    num_tables: int = 2
    """How many of the embedding table and the head are among these: both, the head, or none."""
    fields: dict[str, Any]

    @property
    def config(self) -> Any:
        """Return the config of transformers."""
        return config_class(self.family)(dtype="bfloat16", **self.fields)

    def on_meta(self) -> Any:
        """Return transformers' model without memory."""
        with torch.device("meta"):
            return model_class(self.family)(self.config)


SPARSE = {
    "Qwen3-30B-A3B": PublishedSparse(
        family="Qwen3Moe",
        total="30.5",
        active="3.3",
        fields={
            "num_hidden_layers": 48,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "norm_topk_prob": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
    ),
    "Mixtral-8x7B": PublishedSparse(
        family="Mixtral", total="46.7", active="12.9", fields={"max_position_embeddings": 32768}
    ),
    "OLMoE-1B-7B": PublishedSparse(family="Olmoe", total="6.9", active="1.3", fields={"intermediate_size": 1024}),
    "Granite-3.0-3b-a800m": PublishedSparse(
        family="GraniteMoe",
        total="3.3",
        active="0.8",
        num_tables=0,
        fields={
            "vocab_size": 49155,
            "hidden_size": 1536,
            "intermediate_size": 512,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "max_position_embeddings": 4096,
            "num_local_experts": 40,
            "num_experts_per_tok": 8,
            "tie_word_embeddings": True,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.015625,
            "residual_multiplier": 0.22,
            "logits_scaling": 6.0,
        },
    ),
    "GLM-4.5-Air": PublishedSparse(
        family="Glm4Moe",
        total="106",
        active="12",
        num_tables=0,
        fields={
            "head_dim": 128,
            "attention_bias": True,
            "eos_token_id": 151329,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "gpt-oss-20b": PublishedSparse(
        family="GptOss",
        total="20.9",
        active="3.6",
        num_tables=1,
        fields={
            "num_hidden_layers": 24,
            "num_local_experts": 32,
            "eos_token_id": 200002,
        },
    ),
    "Gemma-4-26B-A4B": PublishedSparse(
        family="Gemma4",
        total="25.2",
        active="3.8",
        fields={
            "vocab_size": 262144,
            "hidden_size": 2816,
            "intermediate_size": 2112,
            "num_hidden_layers": 30,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "head_dim": 256,
            "global_head_dim": 512,
            "max_position_embeddings": 262144,
            "sliding_window": 1024,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 128,
            "top_k_experts": 8,
            "moe_intermediate_size": 704,
        },
    ),
}
"""Sizes as published."""


def write_sparse(folder: Path, name: str) -> Path:
    """Write config.json and a small tokenizer: enough for a plan with random weights."""
    path, model = folder / name, SPARSE[name]
    path.mkdir(parents=True, exist_ok=True)
    config = model.config
    config.architectures = [model_class(model.family).__name__]
    config.save_pretrained(path)
    write_tokenizer(path)
    return path

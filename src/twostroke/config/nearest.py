"""Help for an unknown architecture: the nearest known one, and the parts in which they differ."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher
from typing import Any, cast

from twostroke.config.fields import is_number, list_of

_ENDINGS = re.compile(r"(For(CausalLM|ConditionalGeneration|TextGeneration)|LMHeadModel)$")
_LEAST_ALIKE = 0.8
"""Mixtral and Mistral are 0.86 alike, OLMoE and OLMo 2 0.8, GPT-2 and GPT-J 0.75."""
_MOST_CHARACTERS = 80
_PARTS: Mapping[str, tuple[str, ...]] = {
    "experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts"),
    "latent attention": ("kv_lora_rank",),
    "recurrent layers": (
        "linear_num_value_heads",
        "mamba_d_state",
        "mamba_d_ssm",
        "mamba_n_heads",
        "mamba_num_heads",
        "ssm_state_size",
        "conv_L_cache",
        "lru_width",
    ),
    "embeddings for each layer": ("hidden_size_per_layer_input",),
    "layers that share KV": ("num_kv_shared_layers",),
    "images": ("vision_config",),
    "sound": ("audio_config",),
}
"""Parts that no known architecture has. A model has one if one of its keys is neither null nor 0."""
_LAYER_TYPES = {"full_attention", "sliding_attention"}


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known architecture that a name is nearest to; None where none is near.

    That is one of the same family, by the number that is nearest; else one that is spelled much alike.

    >>> nearest("Qwen2MoeForCausalLM", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
    'Qwen2ForCausalLM'
    """
    alike = {other: _alikeness(_stem(name), _stem(other)) for other in known}
    best = max(alike, key=lambda other: (alike[other], other), default=None)
    return best if best is not None and any(alike[best]) else None


def unknown_parts(name: str, config: Mapping[str, Any], *, reads_images: bool = False) -> list[str]:
    """Return what a config has that no known architecture has, each with the key that says so.

    Args:
        name: of the architecture.
        config: the parsed config.json.
        reads_images: whether images are no difference.

    >>> unknown_parts("Qwen2MoeForCausalLM", {"num_experts": 60, "kv_lora_rank": None})
    ['experts (num_experts=60)']
    """
    text = config.get("text_config")
    config = {**config, **cast(Mapping[str, Any], text)} if isinstance(text, Mapping) else config
    found: list[str] = []
    for part, keys in _PARTS.items():
        if part == "images" and reads_images:
            continue
        key = next((key for key in keys if config.get(key)), None)
        if key is not None:
            value = config[key]
            found.append(f"{part} ({key}={value})" if is_number(value) else f"{part} ({key})")
        elif part == "experts" and "moe" in name.lower():
            found.append(part)
    kinds = {str(kind) for kind in list_of(config, "layer_types")} - _LAYER_TYPES
    return found + [f"layers of type {kind}" for kind in sorted(kinds)]


def _stem(name: str) -> str:
    """Return a name without what all names end in; of a very long one the beginning."""
    return _ENDINGS.sub("", name)[:_MOST_CHARACTERS]


def _alikeness(stem: str, other: str) -> tuple[int, int, float]:
    """Return how near two stems are: characters of the family that both are of, how far their numbers are apart (less
    is more), and the share of characters in common; zeros where they are not near.
    """
    share = SequenceMatcher(None, stem.lower(), other.lower(), autojunk=False).ratio()
    family = other.rstrip("0123456789")
    rest = stem[len(family) :]
    if stem.startswith(family) and not rest[:1].islower():
        return len(family), -abs(_number(rest) - _number(other[len(family) :])), share
    return (0, 0, share) if share >= _LEAST_ALIKE else (0, 0, 0.0)


def _number(text: str) -> int:
    """Return the number that a text begins with; the first of a family has none."""
    digits = re.match(r"\d+", text)
    return int(digits[0]) if digits else 1

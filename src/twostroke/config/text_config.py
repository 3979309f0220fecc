"""Text model of a checkpoint that also reads images: its config.json is under `text_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from twostroke.config.experts import expert_counts
from twostroke.config.fields import read_bool, read_list, read_mapping, with_defaults
from twostroke.errors import UnsupportedModel, shown

TEXT_MODELS: Mapping[str, Mapping[str, str]] = {
    "Gemma3ForConditionalGeneration": {"gemma3_text": "Gemma3ForCausalLM"},
    "Gemma4ForConditionalGeneration": {"gemma4_text": "Gemma4ForCausalLM"},
    "Mistral3ForConditionalGeneration": {
        "mistral": "MistralForCausalLM",
        "ministral": "MinistralForCausalLM",
        "ministral3": "Ministral3ForCausalLM",
    },
    "Qwen2_5_VLForConditionalGeneration": {"qwen2_5_vl_text": "Qwen2ForCausalLM", "qwen2_5_vl": "Qwen2ForCausalLM"},
    "Qwen3VLForConditionalGeneration": {"qwen3_vl_text": "Qwen3ForCausalLM"},
    "Qwen3VLMoeForConditionalGeneration": {"qwen3_vl_moe_text": "Qwen3MoeForCausalLM"},
    "Glm4vMoeForConditionalGeneration": {"glm4v_moe_text": "Glm4MoeForCausalLM"},
}
"""Architecture of the text model, by the architecture of the whole and the text model's `model_type`. The first
`model_type` is also used for a config without one."""
_TIED = ("Gemma3ForConditionalGeneration", "Gemma4ForConditionalGeneration", "Mistral3ForConditionalGeneration")
"""Whole models whose head is tied to the embedding unless the config denies it."""
_MISTRAL: Mapping[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 131_072,
}
_QWEN2_5_VL: Mapping[str, Any] = {
    "vocab_size": 152_064,
    "hidden_size": 8192,
    "intermediate_size": 29_568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32_768,
    "max_window_layers": 80,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "mistral": _MISTRAL,
    "ministral": _MISTRAL,
    "ministral3": {
        **_MISTRAL,
        "vocab_size": 131_072,
        "num_hidden_layers": 34,
        "max_position_embeddings": 262_144,
    },
    "qwen2_5_vl_text": _QWEN2_5_VL,
    "qwen2_5_vl": _QWEN2_5_VL,
    "qwen3_vl_text": {
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 22_016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 128_000,
        "rope_theta": 500_000.0,
    },
    "qwen3_vl_moe_text": {
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 128_000,
        "rope_theta": 500_000.0,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "norm_topk_prob": True,
    },
    "glm4v_moe_text": {
        "vocab_size": 151_424,
        "hidden_size": 4096,
        "intermediate_size": 10_944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "max_position_embeddings": 65_536,
        "attention_bias": True,
    },
}
"""Values of absent keys by the text model's `model_type`, if its architecture has others or none. Published
checkpoints with images leave transformers' defaults out of `text_config`."""
_OF_THE_WHOLE = ("quantization_config", "compression_config", "dtype", "torch_dtype", "tie_word_embeddings")
"""Keys next to `text_config` that apply to the text model unless it has its own."""


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the text model's config; the given one if the model is for text only.

    Raises:
        CorruptCheckpoint: `text_config` is no object, or has two numbers of experts.
        UnsupportedModel: the text model is not implemented.
    """
    names = [name for name in read_list(config, "architectures") if isinstance(name, str) and name in TEXT_MODELS]
    if not names:
        return config
    # older checkpoints have the text model's keys next to those of the image model
    text = {**(read_mapping(config, "text_config") or config)}
    text |= {key: config[key] for key in _OF_THE_WHOLE if key in config and text.get(key) is None}
    known = TEXT_MODELS[names[0]]
    kind = text.get("model_type") or next(iter(known))
    if not isinstance(kind, str) or kind not in known:
        raise UnsupportedModel(
            f"config.json: text_config of {names[0]} has model_type {shown(kind)}, which is not implemented; known: "
            f"{', '.join(known)}."
        )
    defaults = _DEFAULTS.get(kind, {})
    if "num_experts" in defaults:  # a default must not contradict the other name of the number
        text |= expert_counts(text, "num_experts", "num_experts_per_tok")
    return with_defaults(defaults, text, ("rms_norm_eps",)) | {"architectures": [known[kind]]}


def unread_text_config(config: Mapping[str, Any], architecture: str) -> str:
    """Return a note about a `text_config` that a text model does not read; empty if there is none.

    >>> unread_text_config({"text_config": {"num_hidden_layers": 2}}, "LlamaForCausalLM")
    'text_config is not read, since LlamaForCausalLM is text-only'
    """
    if architecture in TEXT_MODELS or not config.get("text_config"):
        return ""
    whole = next((name for name, kinds in TEXT_MODELS.items() if architecture in kinds.values()), None)
    meant = "" if whole is None else f"; with images it is {whole}"
    return f"text_config is not read, since {architecture} is text-only{meant}"


def tied_text_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the text model's config with a tied head if the whole model's config ties it; None otherwise.

    Some published checkpoints are tied by this and still store a separate head, as the text model's config says.

    Raises:
        CorruptCheckpoint: a switch is neither true nor false, or `text_config` raises.
        UnsupportedModel: the text model is not implemented.
    """
    text = text_config(config)
    if text is config:
        return None
    is_tied = any(name in _TIED for name in read_list(config, "architectures"))
    return {**text, "tie_word_embeddings": True} if read_bool(config, "tie_word_embeddings", default=is_tied) else None

"""The text model of a checkpoint that reads images too: its config.json has the text model's under `text_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from twostroke.config.fields import list_of, mapping
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
}
"""By the architecture of the whole and the text model's `model_type`: the architecture of the text model. The first is
that of a config without a `model_type`."""
_OF_THE_WHOLE = ("quantization_config", "compression_config", "dtype", "torch_dtype", "tie_word_embeddings")
"""Keys that stand beside `text_config` and concern the text model, where that does not have them."""


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the text model's config; the same one where the model is of text alone.

    Raises:
        CorruptCheckpoint: `text_config` is no object.
        UnsupportedModel: a text model that is not implemented.
    """
    names = [name for name in list_of(config, "architectures") if isinstance(name, str) and name in TEXT_MODELS]
    if not names:
        return config
    # older checkpoints have the text model's keys beside those of the images
    text = {**(mapping(config, "text_config") or config)}
    text |= {key: config[key] for key in _OF_THE_WHOLE if key in config and text.get(key) is None}
    known = TEXT_MODELS[names[0]]
    kind = text.get("model_type") or next(iter(known))
    if not isinstance(kind, str) or kind not in known:
        raise UnsupportedModel(
            f"config.json: text_config of {names[0]} has model_type {shown(kind)}, which is not implemented; known: "
            f"{', '.join(known)}."
        )
    text["architectures"] = [known[kind]]
    return text

"""The text model of a checkpoint that reads images too: its config.json has the text model's under `text_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from twostroke.config.fields import list_of, mapping

TEXT_MODELS = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Mistral3ForConditionalGeneration": "MistralForCausalLM",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen3VLForConditionalGeneration": "Qwen3ForCausalLM",
}
"""The architecture of the text model, by that of the whole."""
_BY_TYPE = {"ministral3": "Ministral3ForCausalLM"}
"""Text models that are named by `model_type` where one architecture of the whole has several."""
_OF_THE_WHOLE = ("quantization_config", "dtype", "torch_dtype", "tie_word_embeddings")
"""Keys that stand beside `text_config` and concern the text model, where that does not have them."""


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the text model's config; the same one where the model is of text alone.

    Raises:
        CorruptCheckpoint: `text_config` is no object.
    """
    names = [name for name in list_of(config, "architectures") if isinstance(name, str) and name in TEXT_MODELS]
    if not names:
        return config
    # older checkpoints have the text model's keys beside those of the images
    text = {**(mapping(config, "text_config") or config)}
    text |= {key: config[key] for key in _OF_THE_WHOLE if key in config and text.get(key) is None}
    text["architectures"] = [_BY_TYPE.get(str(text.get("model_type")), TEXT_MODELS[names[0]])]
    return text

"""The tensors of the text model within a checkpoint that reads images too, by the names that they have in one of text.

model.language_model.layers.0.mlp.up_proj.weight   ─► model.layers.0.mlp.up_proj.weight
language_model.model.norm.weight                   ─► model.norm.weight
vision_tower.encoder.layers.0.layer_norm1.weight   ─► none: a request with images is refused
embed_out.weight                                   ─► lm_head.weight: GPT-NeoX's first name of it
h.0.attn.c_attn.weight                             ─► transformer.h.0.attn.c_attn.weight: GPT-2's and BLOOM's
transformer.h.0.ln_mlp.weight                      ─► transformer.h.0.post_attention_layernorm.weight: Falcon 40B's
"""

from __future__ import annotations

import re

from twostroke.config.model import ModelConfig

_TOWERS = ("vision_tower.", "multi_modal_projector.", "visual.", "audio_tower.", "embed_vision.", "embed_audio.")


def text_name(name: str) -> str | None:
    """Return a tensor's name in a checkpoint of text alone; None: the text model does not have it.

    >>> text_name("language_model.lm_head.weight"), text_name("model.visual.merger.norm.weight")
    ('lm_head.weight', None)
    """
    if name.removeprefix("model.").startswith(_TOWERS):
        return None
    if name.startswith("embed_out."):
        return name.replace("embed_out", "lm_head", 1)
    if name.startswith(("h.", "wte.", "wpe.", "ln_f.", "word_embeddings")):
        return f"transformer.{name}"
    if name.startswith("transformer.h."):
        return name.replace(".ln_attn.", ".input_layernorm.").replace(".ln_mlp.", ".post_attention_layernorm.")
    if name.startswith("model.language_model."):
        return name.replace("language_model.", "", 1)
    return name.removeprefix("language_model.")


_CONSTANTS = (
    ".attention.bias",
    ".attention.masked_bias",
    ".attn.bias",
    ".attn.masked_bias",
    ".mlp.act_fn.beta",
    ".mlp.act_fn.eps",
)


def is_constant(name: str) -> bool:
    """Whether a tensor is no weight: the causal masks in old checkpoints of GPT, and what all xIELUs have in common.

    >>> is_constant("transformer.h.0.attn.bias"), is_constant("transformer.h.0.attn.c_attn.bias")
    (True, False)
    """
    return name.endswith(_CONSTANTS)


_OF_KV = re.compile(
    r"(?:model\.layers|blk)\.(?P<layer>\d+)\.(?:self_attn\.(?:k|v)_(?:proj|norm)|attn_(?:k|v|k_norm))\..+"
)


def is_unread_kv(name: str, config: ModelConfig) -> bool:
    """Whether a tensor, by its name in a checkpoint or a GGUF file, makes K and V that its layer takes from another."""
    found = _OF_KV.fullmatch(name)
    layer_id = -1 if found is None else int(found["layer"])
    return 0 <= layer_id < config.num_layers and config.layers[layer_id].kv_source is not None

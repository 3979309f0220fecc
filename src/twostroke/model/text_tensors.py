"""The tensors of the text model within a checkpoint that reads images too, by the names that they have in one of text.

model.language_model.layers.0.mlp.up_proj.weight   ─► model.layers.0.mlp.up_proj.weight
language_model.model.norm.weight                   ─► model.norm.weight
vision_tower.encoder.layers.0.layer_norm1.weight   ─► none: a request with images is refused
"""

from __future__ import annotations

_TOWERS = ("vision_tower.", "multi_modal_projector.", "visual.", "audio_tower.", "embed_vision.", "embed_audio.")


def text_name(name: str) -> str | None:
    """Return a tensor's name in a checkpoint of text alone; None: the text model does not have it.

    >>> text_name("language_model.lm_head.weight"), text_name("model.visual.merger.norm.weight")
    ('lm_head.weight', None)
    """
    if name.removeprefix("model.").startswith(_TOWERS):
        return None
    if name.startswith("model.language_model."):
        return name.replace("language_model.", "", 1)
    return name.removeprefix("language_model.")

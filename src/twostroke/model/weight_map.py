"""Checkpoint names to ours: one table per architecture, nothing else.

A table maps a module of ours to the checkpoint's module, or to several whose rows are laid one under the other when
they are loaded. `{i}` is the layer; `.weight` and `.bias` follow by themselves.
"""

from __future__ import annotations

from collections.abc import Mapping

NameTable = Mapping[str, str | tuple[str, ...]]

LLAMA: NameTable = {
    "embedding": "model.embed_tokens",
    "layers.{i}.attention_norm": "model.layers.{i}.input_layernorm",
    "layers.{i}.qkv": (
        "model.layers.{i}.self_attn.q_proj",
        "model.layers.{i}.self_attn.k_proj",
        "model.layers.{i}.self_attn.v_proj",
    ),
    "layers.{i}.output": "model.layers.{i}.self_attn.o_proj",
    "layers.{i}.mlp_norm": "model.layers.{i}.post_attention_layernorm",
    "layers.{i}.gate_up": ("model.layers.{i}.mlp.gate_proj", "model.layers.{i}.mlp.up_proj"),
    "layers.{i}.down": "model.layers.{i}.mlp.down_proj",
    "norm": "model.norm",
    "lm_head": "lm_head",
}
"""Llama, Mistral and Qwen2 alike."""

QWEN3: NameTable = {
    **LLAMA,
    "layers.{i}.q_norm": "model.layers.{i}.self_attn.q_norm",
    "layers.{i}.k_norm": "model.layers.{i}.self_attn.k_norm",
}


def checkpoint_names(table: NameTable, name: str) -> tuple[str, ...]:
    """The checkpoint's tensors that make up ours.

    >>> checkpoint_names(LLAMA, "layers.7.gate_up.weight")
    ('model.layers.7.mlp.gate_proj.weight', 'model.layers.7.mlp.up_proj.weight')
    """
    module, _, kind = name.rpartition(".")
    layer = ""
    if module.startswith("layers."):
        _, layer, rest = module.split(".", 2)
        module = f"layers.{{i}}.{rest}"
    theirs = table[module]
    parts = (theirs,) if isinstance(theirs, str) else theirs
    return tuple(f"{part.replace('{i}', layer)}.{kind}" for part in parts)

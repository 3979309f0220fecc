"""Rules for Gemma 4's config.json, whose layers differ in more than their window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from twostroke.config.experts import ExpertTraits
from twostroke.config.fields import read_bool, read_count, read_list
from twostroke.config.layer_kinds import layer_overrides
from twostroke.config.layer_spec import LayerSpec
from twostroke.errors import CorruptCheckpoint, UnsupportedModel, shown

GEMMA_4_ROPES: Mapping[str, Any] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
GEMMA_4_EXPERTS = ExpertTraits(
    chosen_key="top_k_experts",
    switch_key="enable_moe_block",
    has_mlp_beside_experts=True,
    reads_renormalization=False,
    norms_router_input=True,
    has_expert_scales=True,
)
PER_LAYER_KEYS = ("head_dim", "num_key_value_heads")
"""Keys that `per_layer_config` may set for a layer."""
_WINDOW_EVERY = 6


def gemma4_keys(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `layer_types`, with the last layer always full."""
    num_layers = read_count(given, "num_hidden_layers")
    kinds = read_list(given, "layer_types") or [
        "sliding_attention" if (layer_id + 1) % _WINDOW_EVERY else "full_attention" for layer_id in range(num_layers)
    ]
    return {"layer_types": [*kinds[:-1], "full_attention"]}


def gemma4_layers(given: Mapping[str, Any], layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    """Return the layers: some with their own numbers of heads, the last ones with the K and V of earlier layers.

    Raises:
        CorruptCheckpoint: a number is invalid, or no layer has the K and V that others share.
        UnsupportedModel: the table of per-layer inputs is shorter than the vocabulary.
    """
    token_input_size = _count_or_none(given, "hidden_size_per_layer_input", 256)
    table_size = given.get("vocab_size_per_layer_input", given.get("vocab_size"))
    if token_input_size and table_size != given.get("vocab_size"):
        raise UnsupportedModel(
            f"vocab_size_per_layer_input={shown(table_size)} is not implemented; known: vocab_size "
            f"({shown(given.get('vocab_size'))})."
        )
    first_shared = len(layers) - _count_or_none(given, "num_kv_shared_layers", 0)
    shares_projection = read_bool(given, "attention_k_eq_v")
    own = [
        _with_own_heads(layer, layer_id, heads, shares_projection=shares_projection and layer.kv.window is None)
        for layer_id, (layer, heads) in enumerate(zip(layers, _heads_of_layers(given, layers), strict=True))
    ]
    found: list[LayerSpec] = []
    for layer_id, layer in enumerate(own):
        changed = replace(layer, score_scale=1.0, has_value_norm=True, token_input_size=token_input_size)
        if layer_id >= first_shared:
            changed = replace(changed, kv_source=_source(own[: max(0, first_shared)], layer, layer_id))
            if read_bool(given, "use_double_wide_mlp"):
                changed = replace(changed, intermediate_size=2 * layer.intermediate_size)
        found.append(changed)
    return tuple(found)


def _count_or_none(given: Mapping[str, Any], name: str, default: int) -> int:
    """Return a number that may be 0 or null, which mean the same."""
    value = given.get(name, default)
    return 0 if value in (None, 0) else read_count({name: value}, name)


def _with_own_heads(layer: LayerSpec, layer_id: int, heads: Mapping[str, Any], *, shares_projection: bool) -> LayerSpec:
    """Return a layer with its own numbers of heads applied."""
    num_kv_heads = read_count(heads, "num_key_value_heads", layer.kv.num_kv_heads)
    head_dim = read_count(heads, "head_dim", layer.kv.head_dim)
    if layer.num_heads % num_kv_heads or head_dim % 2:
        raise CorruptCheckpoint(
            f"config.json: layer {layer_id} has {num_kv_heads} KV heads of {head_dim} numbers; num_attention_heads "
            f"{layer.num_heads} must be a multiple, and a head even."
        )
    kv = replace(layer.kv, num_kv_heads=num_kv_heads, head_dim=head_dim)
    return replace(layer, kv=kv, has_value_projection=not shares_projection)


def _heads_of_layers(given: Mapping[str, Any], layers: Sequence[LayerSpec]) -> list[Mapping[str, Any]]:
    """Return each layer's settings of heads: from `per_layer_config`, or one set for all full layers.

    If `per_layer_config` is present, transformers ignores the other keys, even if it sets no layer.
    """
    if "per_layer_config" in given:
        by_layer = layer_overrides(given, len(layers), PER_LAYER_KEYS)
        return [by_layer.get(layer_id, {}) for layer_id in range(len(layers))]
    of_full: dict[str, Any] = {"head_dim": given.get("global_head_dim", 512)}
    if read_bool(given, "attention_k_eq_v") and given.get("num_global_key_value_heads") is not None:
        of_full["num_key_value_heads"] = given["num_global_key_value_heads"]
    return [of_full if layer.kv.window is None else {} for layer in layers]


def _source(before: Sequence[LayerSpec], layer: LayerSpec, layer_id: int) -> int:
    """Return the last layer before the sharing ones whose K and V have the same shape."""
    for source in range(len(before) - 1, -1, -1):
        if before[source].kv == layer.kv:
            return source
    raise CorruptCheckpoint(
        f"config.json: num_kv_shared_layers leaves no layer whose K and V layer {layer_id} could read."
    )

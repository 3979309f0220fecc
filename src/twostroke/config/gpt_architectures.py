"""Traits of the architectures built like GPT: layer norms with biases, an MLP without a gate; no torch.

Defaults of absent keys are those of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from twostroke.config.architecture_traits import GELUS, ArchitectureTraits
from twostroke.config.fields import read_bool, read_count
from twostroke.config.layer_spec import LayerSpec
from twostroke.config.rope import rotary_share
from twostroke.errors import UnsupportedModel, shown

_GPT = ArchitectureTraits(
    reads_attention_bias=True,
    reads_mlp_bias=True,
    norm="layer_bias",
    epsilon_key="layer_norm_epsilon",
    has_gate=False,
    activations=GELUS,
    has_partial_rotary=True,
)
_GPT2_KEYS = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
}


_EQUAL_HEADS = {"num_key_value_heads": None, "head_dim": None}
"""Keys that are not read here: heads share hidden_size equally, and each has its own K and V."""


def _of_falcon(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the common keys for Falcon's first architecture (7B) and its second (40B, 180B, 11B)."""
    is_new = read_bool(given, "new_decoder_architecture")
    num_kv_heads = 1 if read_bool(given, "multi_query", default=True) else given.get("num_attention_heads")
    return _EQUAL_HEADS | {
        "num_key_value_heads": given.get("num_kv_heads") if is_new else num_kv_heads,
        "intermediate_size": given.get("ffn_hidden_size") or 4 * read_count(given, "hidden_size"),
        "parallel_attn": is_new or read_bool(given, "parallel_attn", default=True),
        "num_ln_in_parallel_attn": read_count(given, "num_ln_in_parallel_attn", 2, most=2) if is_new else 1,
    }


def _gpt2_layers(given: Mapping[str, Any], layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    """Return layers whose scores are divided by the layer's number if the config says so."""
    if not read_bool(given, "scale_attn_by_inverse_layer_idx"):
        return tuple(layers)
    return tuple(replace(layer, score_scale=layer.softmax_scale / i) for i, layer in enumerate(layers, start=1))


def _of_neox(given: Mapping[str, Any]) -> Mapping[str, Any]:
    head_dim = read_count(given, "hidden_size") // read_count(given, "num_attention_heads")
    if given.get("head_dim") not in (None, head_dim):
        known = f"hidden_size / num_attention_heads ({head_dim})"
        raise UnsupportedModel(f"head_dim={shown(given['head_dim'])} is not implemented here; known: {known}.")
    return _EQUAL_HEADS


def _of_gpt2(given: Mapping[str, Any]) -> dict[str, Any]:
    return _EQUAL_HEADS | {"intermediate_size": given.get("n_inner") or 4 * read_count(given, "hidden_size")}


def _of_bloom(given: Mapping[str, Any]) -> dict[str, Any]:
    return _EQUAL_HEADS | {"intermediate_size": 4 * read_count(given, "hidden_size")}


def _of_opt(given: Mapping[str, Any]) -> Mapping[str, Any]:
    width, hidden_size = given.get("word_embed_proj_dim"), given.get("hidden_size")
    if width not in (None, hidden_size):
        known = f"hidden_size ({hidden_size})"
        raise UnsupportedModel(f"word_embed_proj_dim={shown(width)} is not implemented; known: {known}.")
    return _EQUAL_HEADS


def _of_gptj(given: Mapping[str, Any]) -> dict[str, Any]:
    head_dim = read_count(given, "hidden_size") // read_count(given, "num_attention_heads")
    share = rotary_share(read_count(given, "rotary_dim", most=head_dim), head_dim)
    rotation = {"rope_theta": None, "rope_scaling": None, "rope_parameters": None, "partial_rotary_factor": share}
    return _of_gpt2(given) | rotation  # transformers reads no other key of the rotation


GPT_TRAITS: dict[str, ArchitectureTraits] = {
    "PhiForCausalLM": replace(
        _GPT,
        head_bias=True,
        only={"qk_layernorm": False},
        epsilon_key="layer_norm_eps",
        is_parallel=True,
        defaults={"attention_bias": True, "mlp_bias": True, "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    ),
    "GPTNeoXForCausalLM": replace(
        _GPT,
        keys={"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"},
        derived=_of_neox,
        epsilon_key="layer_norm_eps",
        parallel_key="use_parallel_residual",
        parallel_norms="before",
        activations={"gelu": "gelu", **GELUS},
        defaults={
            "attention_bias": True,
            "mlp_bias": True,
            "layer_norm_eps": 1e-5,
            "use_parallel_residual": True,
            "partial_rotary_factor": 0.25,
        },
    ),
    "FalconForCausalLM": replace(
        _GPT,
        derived=_of_falcon,
        only={"alibi": False},
        bias_key="bias",
        parallel_key="parallel_attn",
        num_norms_key="num_ln_in_parallel_attn",
        has_partial_rotary=False,
        activations={"gelu": "gelu", **GELUS},
        activation_keys=("activation",),
        defaults={"max_position_embeddings": 2048, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
    ),
    "GPTJForCausalLM": replace(
        _GPT,
        keys=_GPT2_KEYS,
        derived=_of_gptj,
        head_bias=True,
        is_parallel=True,
        activation_keys=("activation_function",),
        has_interleaved_rope=True,
        defaults={"mlp_bias": True, "layer_norm_epsilon": 1e-5, "rotary_dim": 64},
    ),
    "GPT2LMHeadModel": replace(
        _GPT,
        keys=_GPT2_KEYS,
        derived=_of_gpt2,
        unlike=_gpt2_layers,
        only={"scale_attn_weights": True, "add_cross_attention": False},
        activation_keys=("activation_function",),
        position_offset=0,
        has_partial_rotary=False,
        defaults={
            "attention_bias": True,
            "mlp_bias": True,
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
        },
    ),
    "BloomForCausalLM": replace(
        _GPT,
        keys={**_GPT2_KEYS, "hidden_size": "n_embed", "max_position_embeddings": "seq_length"},
        derived=_of_bloom,
        only={"slow_but_exact": False},
        activation_keys=(),
        has_alibi=True,
        has_embedding_norm=True,
        residual_from_norm_key="apply_residual_connection_post_layernorm",
        has_partial_rotary=False,
        defaults={
            "attention_bias": True,
            "mlp_bias": True,
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "max_position_embeddings": 2048,
        },
    ),
    "OPTForCausalLM": replace(
        _GPT,
        keys={"intermediate_size": "ffn_dim"},
        derived=_of_opt,
        only={
            "do_layer_norm_before": True,
            "_remove_final_layer_norm": False,
            "layer_norm_elementwise_affine": True,
            "layer_norm_epsilon": 1e-5,
        },
        bias_key="enable_bias",
        activations={"relu": "relu", **GELUS},
        activation_keys=("activation_function",),
        position_offset=2,
        has_partial_rotary=False,
        defaults={"enable_bias": True, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
    ),
}

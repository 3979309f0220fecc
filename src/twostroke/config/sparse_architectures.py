"""The architectures whose layers have experts, each with its traits; no torch.

Defaults of absent keys are those of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from twostroke.config.architecture_traits import ArchitectureTraits
from twostroke.config.experts import ExpertTraits
from twostroke.config.fields import by_layer, is_number, read_count, read_mapping
from twostroke.config.layer_spec import CLAMPED_SWIGLU
from twostroke.config.rope import DEFAULT_ROPE_THETA, rotary_share
from twostroke.errors import CorruptCheckpoint, UnsupportedModel, shown

_MIXTRAL = ExpertTraits(num_experts_key="num_local_experts", size_key="intermediate_size", reads_renormalization=False)
_IN_GROUPS = ExpertTraits(
    num_experts_key="n_routed_experts",
    scores="sigmoid",
    has_correction_bias=True,
    reads_groups=True,
    dense_layers="first",
    shared="number",
)
"""Experts of GLM 4.5 and dots.llm1."""
_LIKE_DEEPSEEK = {"scoring_func": ("sigmoid", "noaux_tc"), "topk_method": "noaux_tc", "moe_layer_freq": 1}
"""DeepSeek-V3's keys for the router that GLM 4.5 and dots.llm1 have. transformers does not read them; dots.llm1 names
the method as the function, too."""


def _of_minimax_m2(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotated share of a head, which published configs give as `rotary_dim`."""
    if given.get("rotary_dim") is None or given.get("partial_rotary_factor") is not None:
        return {}
    head_dim = read_count(given, "head_dim")
    return {"partial_rotary_factor": rotary_share(read_count(given, "rotary_dim", most=head_dim), head_dim)}


def _of_dots1(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the key that enables windows, which the architecture has regardless of `use_sliding_window`."""
    del given
    return {"use_sliding_window": True}


def _of_hunyuan(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return single values for the keys that published configs give per layer; apply `alpha`, which only raises theta.

    Raises:
        UnsupportedModel: layers differ, or experts or heads have other sizes than those of the keys that are read.
        CorruptCheckpoint: a list has not one entry per layer, or `alpha` cannot be applied.
    """
    num_layers = read_count(given, "num_hidden_layers")
    found: dict[str, Any] = {key: by_layer(given, key, num_layers) for key in ("num_experts", "moe_topk")}
    same = {"moe_intermediate_size": "intermediate_size", "attention_head_dim": "head_dim"}
    for name, own in same.items():
        value = given.get(own)
        if value is not None and by_layer(given, name, num_layers) not in (None, value):
            raise UnsupportedModel(
                f"config.json: {name}={shown(given[name])} is not implemented for this architecture; known: {own} "
                f"({shown(value)})."
            )
    if given.get("shared_expert_intermediate_size") is None:
        found["shared_expert_intermediate_size"] = given.get("intermediate_size")
    rope = read_mapping(given, "rope_scaling") or read_mapping(given, "rope_parameters")
    alpha = rope.get("alpha")
    if alpha is None or (rope.get("rope_type") or rope.get("type")) != "dynamic":
        return found
    head_dim = read_count(
        given, "head_dim", read_count(given, "hidden_size") // read_count(given, "num_attention_heads")
    )
    theta = rope.get("rope_theta", given.get("rope_theta", DEFAULT_ROPE_THETA))
    if not is_number(alpha) or not is_number(theta) or not 0 < alpha < 1e9 or head_dim < 4:
        raise CorruptCheckpoint(
            f"config.json: rope type 'dynamic' needs an alpha above 0 and below 1e9, a rope_theta and a head_dim of at "
            f"least 4; found {shown(alpha)}, {shown(theta)} and {head_dim}."
        )
    raised = {"rope_type": "default", "rope_theta": theta * alpha ** (head_dim / (head_dim - 2))}
    return found | {"rope_scaling": None, "rope_parameters": raised}


_YARN_OF_GPT_OSS = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}

SPARSE_TRAITS: dict[str, ArchitectureTraits] = {
    "MixtralForCausalLM": ArchitectureTraits(
        windows="all_layers",
        experts=_MIXTRAL,
        defaults={
            "num_key_value_heads": 8,
            "sliding_window": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
        },
    ),
    "Qwen2MoeForCausalLM": ArchitectureTraits(
        qkv_bias=True,
        experts=ExpertTraits(dense_layers="steps", shared="size", has_shared_gate=True),
        only={"use_sliding_window": False, "qkv_bias": True},
        defaults={
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
    ),
    "Qwen3MoeForCausalLM": ArchitectureTraits(
        reads_attention_bias=True,
        qk_norm="heads",
        experts=ExpertTraits(dense_layers="steps"),
        only={"use_sliding_window": False},
        defaults={
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
    ),
    "OlmoeForCausalLM": ArchitectureTraits(
        reads_attention_bias=True,
        qk_norm="rows",
        experts=ExpertTraits(size_key="intermediate_size"),
        only={"clip_qkv": None},
        defaults={"num_experts": 64, "num_experts_per_tok": 8, "rms_norm_eps": 1e-5},
    ),
    "GraniteMoeForCausalLM": ArchitectureTraits(
        reads_attention_bias=True,
        reads_multipliers=True,
        experts=_MIXTRAL,
        defaults={"num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "GptOssForCausalLM": ArchitectureTraits(
        reads_attention_bias=True,
        has_sinks=True,
        has_float32_norms=True,
        windows="by_type",
        window_every=2,
        activations={"silu": "clamped_swiglu"},
        experts=replace(_MIXTRAL, has_biases=True),
        only=CLAMPED_SWIGLU,
        defaults={
            "head_dim": 64,
            "num_key_value_heads": 8,
            "sliding_window": 128,
            "attention_bias": True,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
            "rope_parameters": _YARN_OF_GPT_OSS,
        },
    ),
    "Glm4MoeForCausalLM": ArchitectureTraits(
        reads_attention_bias=True,
        reads_output_bias=True,
        has_partial_rotary=True,
        qk_norm="heads",
        qk_norm_key="use_qk_norm",
        has_prediction_layers=True,
        experts=_IN_GROUPS,
        only=_LIKE_DEEPSEEK,
        defaults={
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "num_nextn_predict_layers": 1,
        },
    ),
    "MiniMaxM2ForCausalLM": ArchitectureTraits(
        has_partial_rotary=True,
        qk_norm="rows",
        derived=_of_minimax_m2,
        experts=replace(_MIXTRAL, scores="sigmoid", has_correction_bias=True),
        only={
            "attn_type_list": 1,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "shared_intermediate_size": 0,
            "sliding_window": None,
        },
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "rope_theta": 5_000_000.0,
        },
    ),
    "Ernie4_5_MoeForCausalLM": ArchitectureTraits(
        has_interleaved_rope=True,
        has_prediction_layers=True,
        experts=ExpertTraits(
            num_experts_key="moe_num_experts",
            chosen_key="moe_k",
            reads_renormalization=False,
            has_correction_bias=True,
            dense_layers="outside",
            shared="number",
            shared_key="moe_num_shared_experts",
        ),
        only={"use_bias": False, "moe_norm_min": 1e-12, "moe_use_aux_free": True, "moe_gate_act": "softmax"},
        defaults={
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "rope_theta": 500_000.0,
            "moe_num_experts": 64,
            "moe_num_shared_experts": 2,
            "moe_k": 6,
            "moe_intermediate_size": 1536,
            "moe_layer_start_index": 1,
        },
    ),
    "Dots1ForCausalLM": ArchitectureTraits(
        reads_attention_bias=True,
        qk_norm="heads",
        windows="by_layer",
        derived=_of_dots1,
        experts=_IN_GROUPS,
        only=_LIKE_DEEPSEEK,
        defaults={"num_key_value_heads": 32, "max_window_layers": 62, "moe_intermediate_size": 1408},
    ),
    "HunYuanMoEV1ForCausalLM": ArchitectureTraits(
        reads_attention_bias=True,
        qk_norm="rotated_heads",
        derived=_of_hunyuan,
        experts=ExpertTraits(
            size_key="intermediate_size", chosen_key="moe_topk", reads_renormalization=False, shared="size"
        ),
        only={
            "use_qk_norm": True,
            "use_cla": False,
            "use_mla": False,
            "use_mixed_mlp_moe": True,
            "num_shared_expert": 1,
            "moe_layer_num_skipped": 0,
            "norm_type": "rms",
            "position_embedding_xdrope": False,
            "use_rotary_pos_emb": True,
        },
        defaults={"rms_norm_eps": 1e-5, "num_experts": 1, "moe_topk": 1},
    ),
}

"""The architectures whose layers have experts, each with its traits; no torch.

Defaults of absent keys are those of transformers 5.24.
"""

from __future__ import annotations

from twostroke.config.architecture_traits import ArchitectureTraits
from twostroke.config.experts import ExpertTraits

_MIXTRAL = ExpertTraits(num_experts_key="num_local_experts", size_key="intermediate_size", reads_renormalization=False)

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
    "Glm4MoeForCausalLM": ArchitectureTraits(
        reads_attention_bias=True,
        reads_output_bias=True,
        rotates_parts=True,
        qk_norm="heads",
        qk_norm_key="use_qk_norm",
        has_prediction_layers=True,
        experts=ExpertTraits(
            num_experts_key="n_routed_experts",
            scores="sigmoid",
            has_correction=True,
            reads_groups=True,
            dense_layers="first",
            shared="number",
        ),
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
}

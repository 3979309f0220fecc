"""The architectures whose config.json can be read, each with its traits; no torch.

Defaults of absent keys are those of transformers 5.24.
"""

from __future__ import annotations

from dataclasses import replace

from twostroke.config.architecture_traits import GELU_TANH, RELU2, ArchitectureTraits
from twostroke.config.gemma4 import GEMMA_4_EXPERTS, GEMMA_4_ROPES, PER_LAYER_KEYS, gemma4_keys, gemma4_layers
from twostroke.config.gpt_architectures import GPT_TRAITS
from twostroke.config.sparse_architectures import SPARSE_TRAITS

_GEMMA = ArchitectureTraits(
    reads_attention_bias=True,
    activations=GELU_TANH,
    activation_keys=("hidden_activation", "hidden_act"),
    norm_offset=1.0,
    has_float32_norms=True,
    scales_embeddings=True,
    defaults={"num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True},
)
_GEMMA2 = replace(
    _GEMMA,
    norms="around",
    windows="by_type",
    window_every=2,
    reads_query_scalar=True,
    reads_softcap=True,
    reads_attention_softcap=True,
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 256,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
)


_GLM = ArchitectureTraits(
    reads_attention_bias=True,
    reads_output_bias=True,
    has_partial_rotary=True,
    has_interleaved_rope=True,
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "attention_bias": True,
        "rms_norm_eps": 1.5625e-7,
        "partial_rotary_factor": 0.5,
    },
)

_OLMO = ArchitectureTraits(
    reads_attention_bias=True, qk_norm="rows", norms="after", has_float32_norms=True, defaults={"rms_norm_eps": 1e-5}
)
_COHERE = ArchitectureTraits(
    reads_attention_bias=True,
    norm="layer",
    epsilon_key="layer_norm_eps",
    is_parallel=True,
    has_interleaved_rope=True,
    reads_logit_scale=True,
    defaults={"tie_word_embeddings": True, "layer_norm_eps": 1e-5, "logit_scale": 0.0625},
)

ARCHITECTURE_TRAITS: dict[str, ArchitectureTraits] = {
    # "gelu" means the tanh formula in Gemma's first configs
    "GemmaForCausalLM": replace(_GEMMA, activations={**GELU_TANH, "gelu": "gelu_tanh"}),
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": replace(
        _GEMMA2,
        reads_attention_softcap=False,
        qk_norm="heads",
        window_every=6,
        reads_window_pattern=True,
        rope_rule="local_windows",
        defaults={
            "num_key_value_heads": 4,
            "head_dim": 256,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 256,
            "rope_theta": 1_000_000.0,
            # published checkpoints with images leave transformers' defaults out of `text_config`
            "vocab_size": 262_208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "max_position_embeddings": 131_072,
        },
    ),
    "Gemma4ForCausalLM": replace(
        _GEMMA,
        norm_offset=0.0,
        norms="around",
        qk_norm="heads",
        windows="by_type",
        window_every=6,
        reads_softcap=True,
        derived=gemma4_keys,
        unlike=gemma4_layers,
        per_layer_keys=PER_LAYER_KEYS,
        experts=GEMMA_4_EXPERTS,
        defaults={
            "tie_word_embeddings": True,
            "rope_parameters": GEMMA_4_ROPES,
            "sliding_window": 512,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 262_144,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 30,
            "num_attention_heads": 8,
            "max_position_embeddings": 131_072,
        },
    ),
    "LlamaForCausalLM": ArchitectureTraits(reads_attention_bias=True, reads_mlp_bias=True),
    "MinistralForCausalLM": ArchitectureTraits(windows="by_type", defaults={"num_key_value_heads": 8}),
    "SeedOssForCausalLM": ArchitectureTraits(
        reads_attention_bias=True,
        reads_output_bias=True,
        reads_mlp_bias=True,
        defaults={"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
    ),
    "Olmo2ForCausalLM": _OLMO,
    "Olmo3ForCausalLM": replace(
        _OLMO,
        windows="by_type",
        window_every=4,
        rope_rule="plain_windows",
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 500_000.0},
    ),
    "Exaone4ForCausalLM": ArchitectureTraits(
        qk_norm="heads",
        norms="after",
        windows="by_type",
        window_every=4,
        reads_window_pattern=True,
        rope_rule="only_windows",
        defaults={"num_key_value_heads": 32, "rms_norm_eps": 1e-5},
    ),
    "Phi3ForCausalLM": ArchitectureTraits(
        windows="all_layers",
        has_partial_rotary=True,
        longrope_names=("su", "yarn"),
        defaults={"sliding_window": None, "rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    ),
    "Cohere2ForCausalLM": replace(
        _COHERE, windows="by_type", window_every=4, reads_window_pattern=True, rope_rule="windows_alone"
    ),
    "CohereForCausalLM": replace(
        _COHERE,
        qk_norm="own_heads",
        qk_norm_key="use_qk_norm",
        defaults={**_COHERE.defaults, "rope_theta": 500_000.0},
    ),
    "Starcoder2ForCausalLM": ArchitectureTraits(
        reads_attention_bias=True,
        reads_mlp_bias=True,
        bias_key="use_bias",
        norm="layer_bias",
        epsilon_key="norm_epsilon",
        has_gate=False,
        activations=GELU_TANH,
        windows="all_layers",
        defaults={
            "num_key_value_heads": 2,
            "sliding_window": None,
            "norm_epsilon": 1e-5,
            "use_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "Ministral3ForCausalLM": ArchitectureTraits(
        windows="all_layers",
        scales_queries=True,
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "sliding_window": None,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1_000_000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "GlmForCausalLM": _GLM,
    "Glm4ForCausalLM": replace(_GLM, norms="around"),
    "GraniteForCausalLM": ArchitectureTraits(reads_attention_bias=True, reads_mlp_bias=True, reads_multipliers=True),
    "SmolLM3ForCausalLM": ArchitectureTraits(
        reads_attention_bias=True,
        reads_mlp_bias=True,
        windows="unrotated",
        reads_no_rope_layers=True,
        defaults={
            "num_key_value_heads": 4,
            "sliding_window": None,
            "rope_theta": 2_000_000.0,
            "tie_word_embeddings": True,
        },
    ),
    "MistralForCausalLM": ArchitectureTraits(
        windows="all_layers", defaults={"num_key_value_heads": 8, "sliding_window": 4096}
    ),
    "Qwen2ForCausalLM": ArchitectureTraits(qkv_bias=True, windows="by_layer", defaults={"num_key_value_heads": 32}),
    "Qwen3ForCausalLM": ArchitectureTraits(
        reads_attention_bias=True,
        qk_norm="heads",
        windows="by_layer",
        defaults={"num_key_value_heads": 32, "head_dim": 128},
    ),
    "StableLmForCausalLM": ArchitectureTraits(
        keys={"attention_bias": "use_qkv_bias"},
        reads_attention_bias=True,
        reads_output_bias=True,
        qk_norm="own_heads",
        qk_norm_key="qk_layernorm",
        norm="layer_bias",
        epsilon_key="layer_norm_eps",
        parallel_key="use_parallel_residual",
        has_partial_rotary=True,
        defaults={"num_key_value_heads": 32, "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25},
    ),
    "ArceeForCausalLM": ArchitectureTraits(
        reads_attention_bias=True,
        reads_mlp_bias=True,
        has_gate=False,
        activations=RELU2,
        defaults={"rms_norm_eps": 1e-5},
    ),
    "NemotronForCausalLM": ArchitectureTraits(
        reads_attention_bias=True,
        reads_mlp_bias=True,
        norm="layer_bias",
        norm_offset=1.0,
        epsilon_key="norm_eps",
        has_gate=False,
        activations=RELU2,
        has_partial_rotary=True,
        defaults={"norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    ),
    "HeliumForCausalLM": ArchitectureTraits(
        reads_attention_bias=True,
        reads_output_bias=True,
        reads_mlp_bias=True,
        has_float32_norms=True,
        has_interleaved_rope=True,
        defaults={"num_key_value_heads": 20, "head_dim": 128, "rms_norm_eps": 1e-8, "rope_theta": 100_000.0},
    ),
    "ApertusForCausalLM": ArchitectureTraits(
        reads_attention_bias=True,
        qk_norm="heads",
        has_gate=False,
        activations={"xielu": "xielu"},
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_theta": 12_000_000.0,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 12_000_000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
        },
    ),
    **GPT_TRAITS,
    **SPARSE_TRAITS,
}
"""Architectures whose config.json can be read; model/registry.py maps each to its model code."""

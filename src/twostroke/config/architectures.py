"""ArchitectureTraits: how the config.json of each architecture is read, where architectures differ; no torch.

Defaults of absent keys are those of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from twostroke.config.layer_spec import Activation, NormKind, NormPlace, QKNorm

WindowRule = Literal["none", "all_layers", "by_layer", "by_type"]
"""Which layers have `sliding_window`: none, all, those of `layer_types` or from `max_window_layers` on where
`use_sliding_window` is set, or those of `layer_types` whatever that says."""
RopeRule = Literal["same", "only_windows", "windows_alone", "plain_windows", "local_windows"]
"""Of a model with windows in some layers: all layers are rotated alike; full ones are not rotated, if there are windows
or in any case; `rope_scaling` is of the full ones alone; or that, and windows have `rope_local_base_freq`, and
max_position_embeddings counts the stretching already."""


@dataclass(frozen=True, slots=True)
class ArchitectureTraits:
    """How one architecture reads its config.json, where architectures differ."""

    qkv_bias: bool = False
    """Biases on q, k and v whatever the config says."""
    reads_attention_bias: bool = False
    """`attention_bias` adds biases to q, k, v and to the output projection."""
    reads_mlp_bias: bool = False
    activation: Activation = "silu"
    """The one of its MLP."""
    activation_keys: tuple[str, ...] = ("hidden_act",)
    """Keys that name it; the first that a config has counts. A config may leave it out."""
    activation_names: tuple[str, ...] = ("silu",)
    """Values of those keys that mean this activation."""
    norm_offset: float = 0.0
    """Added to the weights of norms; checkpoints of Gemma store them less 1."""
    scales_embeddings: bool = False
    """Embeddings are multiplied by the square root of `hidden_size`."""
    reads_query_scalar: bool = False
    """Scores are divided by the square root of `query_pre_attn_scalar`."""
    reads_softcaps: bool = False
    """`final_logit_softcapping` bounds logits, `attn_logit_softcapping` scores."""
    reads_output_bias: bool = False
    """`attention_out_bias` says alone whether the output projection has biases."""
    qk_norm: QKNorm = "none"
    norms: NormPlace = "before"
    norm: NormKind = "rms"
    epsilon_key: str = "rms_norm_eps"
    bias_key: str | None = None
    """One key for the biases of all products."""
    has_gate: bool = True
    is_parallel: bool = False
    reads_logit_scale: bool = False
    """`logit_scale` is a factor on logits."""
    windows: WindowRule = "none"
    window_every: int | None = None
    """Without `layer_types`, every n-th layer is full and the others have the window."""
    reads_window_pattern: bool = True
    """`sliding_window_pattern` says another n."""
    rope_of_windows: RopeRule = "same"
    rotates_parts: bool = False
    """`partial_rotary_factor` of each head is rotated."""
    interleaves_rotation: bool = False
    """The pairs of the rotation are neighbours."""
    reads_multipliers: bool = False
    """`embedding_multiplier`, `attention_multiplier`, `residual_multiplier` and `logits_scaling`."""
    reads_no_rope_layers: bool = False
    """`no_rope_layers` has a 0 for each layer without rotation; by default these are every 4th."""
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Values of absent keys, where they differ from the common ones."""


_GEMMA = ArchitectureTraits(
    reads_attention_bias=True,
    activation="gelu_tanh",
    activation_keys=("hidden_activation", "hidden_act"),
    activation_names=("gelu_pytorch_tanh",),
    norm_offset=1.0,
    scales_embeddings=True,
    defaults={"num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True},
)
_GEMMA2 = replace(
    _GEMMA,
    norms="around",
    windows="by_type",
    window_every=2,
    reads_window_pattern=False,
    reads_query_scalar=True,
    reads_softcaps=True,
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
    rotates_parts=True,
    interleaves_rotation=True,
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "attention_bias": True,
        "rms_norm_eps": 1.5625e-7,
        "partial_rotary_factor": 0.5,
    },
)

ARCHITECTURE_TRAITS: dict[str, ArchitectureTraits] = {
    # "gelu" means the tanh formula in Gemma's first configs
    "GemmaForCausalLM": replace(_GEMMA, activation_names=("gelu_pytorch_tanh", "gelu")),
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": replace(
        _GEMMA2,
        qk_norm="heads",
        window_every=6,
        reads_window_pattern=True,
        rope_of_windows="local_windows",
        defaults={
            "num_key_value_heads": 4,
            "head_dim": 256,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 256,
            "rope_theta": 1_000_000.0,
            # published checkpoints with images leave out of `text_config` what is transformers' default
            "vocab_size": 262_208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
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
    "Olmo2ForCausalLM": ArchitectureTraits(
        reads_attention_bias=True, qk_norm="rows", norms="after", defaults={"rms_norm_eps": 1e-5}
    ),
    "Olmo3ForCausalLM": ArchitectureTraits(
        reads_attention_bias=True,
        qk_norm="rows",
        norms="after",
        windows="by_type",
        window_every=4,
        rope_of_windows="plain_windows",
        defaults={"rms_norm_eps": 1e-5},
    ),
    "Exaone4ForCausalLM": ArchitectureTraits(
        qk_norm="heads",
        norms="after",
        windows="by_type",
        window_every=4,
        rope_of_windows="only_windows",
        defaults={"num_key_value_heads": 32, "rms_norm_eps": 1e-5},
    ),
    "Phi3ForCausalLM": ArchitectureTraits(
        windows="all_layers",
        rotates_parts=True,
        defaults={"sliding_window": None, "rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    ),
    "Cohere2ForCausalLM": ArchitectureTraits(
        reads_attention_bias=True,
        norm="layer",
        epsilon_key="layer_norm_eps",
        is_parallel=True,
        windows="by_type",
        window_every=4,
        rope_of_windows="windows_alone",
        interleaves_rotation=True,
        reads_logit_scale=True,
        defaults={"tie_word_embeddings": True, "layer_norm_eps": 1e-5, "logit_scale": 0.0625},
    ),
    "Starcoder2ForCausalLM": ArchitectureTraits(
        reads_attention_bias=True,
        reads_mlp_bias=True,
        bias_key="use_bias",
        norm="layer_bias",
        epsilon_key="norm_epsilon",
        has_gate=False,
        activation="gelu_tanh",
        activation_names=("gelu_pytorch_tanh",),
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
        windows="by_layer",
        reads_no_rope_layers=True,
        defaults={"num_key_value_heads": 4, "rope_theta": 2_000_000.0, "tie_word_embeddings": True},
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
}
"""Architectures whose config.json can be read; model/registry.py says where their maths is."""

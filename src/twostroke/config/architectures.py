"""ArchitectureTraits: how the config.json of each architecture is read, where architectures differ; no torch.

Defaults of absent keys are those of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from twostroke.config.fields import count, switch
from twostroke.config.gemma4 import GEMMA_4_ROPES, OWN_OF_LAYERS, gemma4_keys, gemma4_layers
from twostroke.config.layer_spec import LayerSpec, NormKind, NormPlace, PlainActivation, QKNorm
from twostroke.config.rope import rotary_share
from twostroke.errors import UnsupportedModel, shown

WindowRule = Literal["none", "all_layers", "by_layer", "unrotated", "by_type"]
"""Which layers have `sliding_window`:

- none;
- all_layers;
- by_layer: if `use_sliding_window` is set, those of `layer_types`, or else those from `max_window_layers` on;
- unrotated: if that is set, those of `layer_types`, or else those without rotation;
- by_type: those of `layer_types`, whatever that says.
"""
RopeRule = Literal["same", "only_windows", "windows_alone", "plain_windows", "local_windows"]
"""How the layers of a model with windows are rotated:

- same: all alike;
- only_windows: full layers are not rotated if there are layers with a window;
- windows_alone: full layers are never rotated;
- plain_windows: `rope_scaling` is of the full layers alone;
- local_windows: as plain_windows. Windows have `rope_local_base_freq`; max_position_embeddings counts the stretching.
"""


_SILU: Mapping[str, PlainActivation] = {"silu": "silu"}
_GELU_TANH: Mapping[str, PlainActivation] = {"gelu_pytorch_tanh": "gelu_tanh"}
_GELUS: Mapping[str, PlainActivation] = {
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    **_GELU_TANH,
}
_RELU2: Mapping[str, PlainActivation] = {"relu2": "relu2"}


@dataclass(frozen=True, slots=True)
class ArchitectureTraits:
    """How one architecture reads its config.json, where architectures differ."""

    qkv_bias: bool = False
    """Biases on q, k and v whatever the config says."""
    reads_attention_bias: bool = False
    """`attention_bias` adds biases to q, k, v and to the output projection."""
    reads_mlp_bias: bool = False
    keys: Mapping[str, str] = field(default_factory=dict[str, str])
    """Its own names of keys, by the common ones."""
    derived: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    """Returns common keys that follow from several of its own."""
    unlike: Callable[[Mapping[str, Any], Sequence[LayerSpec]], tuple[LayerSpec, ...]] | None = None
    """Returns the layers with what else differs from one to another."""
    own_of_layers: Collection[str] = ()
    """Keys that `per_layer_config` may give a layer for itself; `unlike` reads them."""
    only: Mapping[str, object] = field(default_factory=dict[str, object])
    """Keys of which one value is implemented."""
    activations: Mapping[str, PlainActivation] = field(default_factory=lambda: _SILU)
    """Activations of its MLP, by what its configs call them. One without a name means the first."""
    activation_keys: tuple[str, ...] = ("hidden_act",)
    """Keys that name it; the first that a config has counts. A config may leave it out."""
    norm_offset: float = 0.0
    """Added to the weights of norms; checkpoints of Gemma store them less 1."""
    has_wide_norms: bool = False
    """The weights of RMS norms are float32, and the result is rounded behind them."""
    head_bias: bool = False
    """A bias on logits."""
    scales_embeddings: bool = False
    """Embeddings are multiplied by the square root of `hidden_size`."""
    reads_query_scalar: bool = False
    """Scores are divided by the square root of `query_pre_attn_scalar`."""
    reads_softcap: bool = False
    """`final_logit_softcapping` bounds logits."""
    reads_score_cap: bool = False
    """`attn_logit_softcapping` bounds scores. Gemma 3 has it in configs, where transformers does not read it."""
    reads_output_bias: bool = False
    """`attention_out_bias` says alone whether the output projection has biases."""
    qk_norm: QKNorm = "none"
    qk_norm_key: str | None = None
    """A switch of that norm."""
    norms: NormPlace = "before"
    norm: NormKind = "rms"
    epsilon_key: str = "rms_norm_eps"
    bias_key: str | None = None
    """One key for the biases of all products."""
    has_gate: bool = True
    is_parallel: bool = False
    parallel_key: str | None = None
    """A switch that says it instead."""
    parallel_norms: NormPlace = "shared"
    """Where norms stand in a parallel block."""
    num_norms_key: str | None = None
    """The number of norms in a parallel block; with 2 they stand before attention and MLP."""
    reads_logit_scale: bool = False
    """`logit_scale` is a factor on logits."""
    windows: WindowRule = "none"
    window_every: int | None = None
    """Without `layer_types`, every n-th layer is full and the others have the window; None: all have it."""
    reads_window_pattern: bool = False
    """`sliding_window_pattern` says another n."""
    rope_of_windows: RopeRule = "same"
    has_alibi: bool = False
    """Scores fall with the distance of a key, and nothing is rotated."""
    has_embedding_norm: bool = False
    """A norm behind the embedding."""
    adds_to_normed_key: str | None = None
    """A switch: attention and MLP add to the output of their norm."""
    position_offset: int | None = None
    """Positions are learned, and nothing is rotated: the row of position 0 in their table."""
    rotates_parts: bool = False
    """`partial_rotary_factor` of each head is rotated."""
    longrope_names: Collection[str] = ()
    """Rope types that mean longrope in its first configs."""
    interleaves_rotation: bool = False
    """The pairs of the rotation are neighbours."""
    scales_queries: bool = False
    """`llama_4_scaling_beta` scales queries by their position."""
    reads_multipliers: bool = False
    """`embedding_multiplier`, `attention_multiplier`, `residual_multiplier` and `logits_scaling`."""
    reads_no_rope_layers: bool = False
    """`no_rope_layers` has a 0 for each layer without rotation; by default these are every 4th."""
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Values of absent keys, where they differ from the common ones."""


_GEMMA = ArchitectureTraits(
    reads_attention_bias=True,
    activations=_GELU_TANH,
    activation_keys=("hidden_activation", "hidden_act"),
    norm_offset=1.0,
    has_wide_norms=True,
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
    reads_score_cap=True,
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 256,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
)


_GPT = ArchitectureTraits(
    reads_attention_bias=True,
    reads_mlp_bias=True,
    norm="layer_bias",
    epsilon_key="layer_norm_epsilon",
    has_gate=False,
    activations=_GELUS,
    rotates_parts=True,
)
_GPT2_KEYS = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
}


_EQUAL_HEADS = {"num_key_value_heads": None, "head_dim": None}
"""Transformers reads neither here: heads share hidden_size equally, and each has keys and values of its own."""


def _of_falcon(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what Falcon's first architecture (7B) says otherwise than its second (40B, 180B, 11B)."""
    is_new = switch(given, "new_decoder_architecture")
    num_kv_heads = 1 if switch(given, "multi_query", default=True) else given.get("num_attention_heads")
    return _EQUAL_HEADS | {
        "num_key_value_heads": given.get("num_kv_heads") if is_new else num_kv_heads,
        "intermediate_size": given.get("ffn_hidden_size") or 4 * count(given, "hidden_size"),
        "parallel_attn": is_new or switch(given, "parallel_attn", default=True),
        "num_ln_in_parallel_attn": count(given, "num_ln_in_parallel_attn", 2, most=2) if is_new else 1,
    }


def _gpt2_layers(given: Mapping[str, Any], layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    """Return layers whose scores are divided by their number where the config says so."""
    if not switch(given, "scale_attn_by_inverse_layer_idx"):
        return tuple(layers)
    return tuple(replace(layer, score_scale=layer.softmax_scale / i) for i, layer in enumerate(layers, start=1))


def _of_neox(given: Mapping[str, Any]) -> Mapping[str, Any]:
    del given
    return _EQUAL_HEADS


def _of_gpt2(given: Mapping[str, Any]) -> dict[str, Any]:
    return _EQUAL_HEADS | {"intermediate_size": given.get("n_inner") or 4 * count(given, "hidden_size")}


def _of_bloom(given: Mapping[str, Any]) -> dict[str, Any]:
    return _EQUAL_HEADS | {"intermediate_size": 4 * count(given, "hidden_size")}


def _of_opt(given: Mapping[str, Any]) -> Mapping[str, Any]:
    width, hidden_size = given.get("word_embed_proj_dim"), given.get("hidden_size")
    if width not in (None, hidden_size):
        known = f"hidden_size ({hidden_size})"
        raise UnsupportedModel(f"word_embed_proj_dim={shown(width)} is not implemented; known: {known}.")
    return _EQUAL_HEADS


def _of_gptj(given: Mapping[str, Any]) -> dict[str, Any]:
    head_dim = count(given, "hidden_size") // count(given, "num_attention_heads")
    share = rotary_share(count(given, "rotary_dim", most=head_dim), head_dim)
    rotation = {"rope_theta": None, "rope_scaling": None, "rope_parameters": None, "partial_rotary_factor": share}
    return _of_gpt2(given) | rotation  # transformers reads no other key of it


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
    "GemmaForCausalLM": replace(_GEMMA, activations={**_GELU_TANH, "gelu": "gelu_tanh"}),
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": replace(
        _GEMMA2,
        reads_score_cap=False,
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
        own_of_layers=OWN_OF_LAYERS,
        only={"enable_moe_block": False},
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
    "Olmo2ForCausalLM": ArchitectureTraits(
        reads_attention_bias=True,
        qk_norm="rows",
        norms="after",
        has_wide_norms=True,
        defaults={"rms_norm_eps": 1e-5},
    ),
    "Olmo3ForCausalLM": ArchitectureTraits(
        reads_attention_bias=True,
        qk_norm="rows",
        norms="after",
        has_wide_norms=True,
        windows="by_type",
        window_every=4,
        rope_of_windows="plain_windows",
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 500_000.0},
    ),
    "Exaone4ForCausalLM": ArchitectureTraits(
        qk_norm="heads",
        norms="after",
        windows="by_type",
        window_every=4,
        reads_window_pattern=True,
        rope_of_windows="only_windows",
        defaults={"num_key_value_heads": 32, "rms_norm_eps": 1e-5},
    ),
    "Phi3ForCausalLM": ArchitectureTraits(
        windows="all_layers",
        rotates_parts=True,
        longrope_names=("su", "yarn"),
        defaults={"sliding_window": None, "rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    ),
    "Cohere2ForCausalLM": ArchitectureTraits(
        reads_attention_bias=True,
        norm="layer",
        epsilon_key="layer_norm_eps",
        is_parallel=True,
        windows="by_type",
        window_every=4,
        reads_window_pattern=True,
        rope_of_windows="windows_alone",
        interleaves_rotation=True,
        reads_logit_scale=True,
        defaults={"tie_word_embeddings": True, "layer_norm_eps": 1e-5, "logit_scale": 0.0625},
    ),
    "CohereForCausalLM": ArchitectureTraits(
        reads_attention_bias=True,
        qk_norm="own_heads",
        qk_norm_key="use_qk_norm",
        norm="layer",
        epsilon_key="layer_norm_eps",
        is_parallel=True,
        interleaves_rotation=True,
        reads_logit_scale=True,
        defaults={
            "tie_word_embeddings": True,
            "layer_norm_eps": 1e-5,
            "logit_scale": 0.0625,
            "rope_theta": 500_000.0,
        },
    ),
    "Starcoder2ForCausalLM": ArchitectureTraits(
        reads_attention_bias=True,
        reads_mlp_bias=True,
        bias_key="use_bias",
        norm="layer_bias",
        epsilon_key="norm_epsilon",
        has_gate=False,
        activations=_GELU_TANH,
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
        activations={"gelu": "gelu", **_GELUS},
        defaults={
            "attention_bias": True,
            "mlp_bias": True,
            "layer_norm_eps": 1e-5,
            "use_parallel_residual": True,
            "partial_rotary_factor": 0.25,
        },
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
        rotates_parts=True,
        defaults={"num_key_value_heads": 32, "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25},
    ),
    "ArceeForCausalLM": ArchitectureTraits(
        reads_attention_bias=True,
        reads_mlp_bias=True,
        has_gate=False,
        activations=_RELU2,
        defaults={"rms_norm_eps": 1e-5},
    ),
    "NemotronForCausalLM": ArchitectureTraits(
        reads_attention_bias=True,
        reads_mlp_bias=True,
        norm="layer_bias",
        norm_offset=1.0,
        epsilon_key="norm_eps",
        has_gate=False,
        activations=_RELU2,
        rotates_parts=True,
        defaults={"norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    ),
    "HeliumForCausalLM": ArchitectureTraits(
        reads_attention_bias=True,
        reads_output_bias=True,
        reads_mlp_bias=True,
        has_wide_norms=True,
        interleaves_rotation=True,
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
    "FalconForCausalLM": replace(
        _GPT,
        derived=_of_falcon,
        only={"alibi": False},
        bias_key="bias",
        parallel_key="parallel_attn",
        num_norms_key="num_ln_in_parallel_attn",
        rotates_parts=False,
        activations={"gelu": "gelu", **_GELUS},
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
        interleaves_rotation=True,
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
        rotates_parts=False,
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
        adds_to_normed_key="apply_residual_connection_post_layernorm",
        rotates_parts=False,
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
        },
        bias_key="enable_bias",
        activations={"relu": "relu", **_GELUS},
        activation_keys=("activation_function",),
        position_offset=2,
        rotates_parts=False,
        defaults={"enable_bias": True, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
    ),
}
"""Architectures whose config.json can be read; model/registry.py says where their maths is."""

"""ArchitectureTraits: how the config.json of one architecture is read, where architectures differ; no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from twostroke.config.experts import ExpertTraits
from twostroke.config.layer_spec import LayerSpec, MLPActivation, NormKind, NormPlace, PlainActivation, QKNorm

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

SILU: Mapping[str, PlainActivation] = {"silu": "silu"}
GELU_TANH: Mapping[str, PlainActivation] = {"gelu_pytorch_tanh": "gelu_tanh"}
GELUS: Mapping[str, PlainActivation] = {
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    **GELU_TANH,
}
RELU2: Mapping[str, PlainActivation] = {"relu2": "relu2"}


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
    has_prediction_layers: bool = False
    """`num_nextn_predict_layers` are stored behind the others."""
    experts: ExpertTraits | None = None
    """None: no layer has experts."""
    only: Mapping[str, object] = field(default_factory=dict[str, object])
    """Keys of which one value is implemented."""
    activations: Mapping[str, MLPActivation] = field(default_factory=lambda: SILU)
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
    has_sinks: bool = False
    """Each head has a learned score for a key without a value."""
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

"""ArchitectureTraits: how to read the config.json of one architecture, where architectures differ; no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from twostroke.config.experts import ExpertTraits
from twostroke.config.layer_spec import LayerSpec, MLPActivation, NormKind, NormPlace, PlainActivation, QKNorm

WindowRule = Literal["none", "all_layers", "by_layer", "unrotated", "by_type"]
"""Rule that selects the layers with `sliding_window`:

- none: no layer;
- all_layers: every layer;
- by_layer: if `use_sliding_window` is set, those of `layer_types`, or else those from `max_window_layers` on;
- unrotated: if `use_sliding_window` is set, those of `layer_types`, or else the layers without rotation;
- by_type: those of `layer_types`, regardless of `use_sliding_window`.
"""
RopeRule = Literal["same", "only_windows", "windows_alone", "plain_windows", "local_windows"]
"""Rule for the rotation of layers in a model with sliding windows:

- same: all layers alike;
- only_windows: full layers are not rotated if there are layers with a window;
- windows_alone: full layers are never rotated;
- plain_windows: `rope_scaling` applies to full layers only;
- local_windows: as plain_windows. Layers with a window use `rope_local_base_freq`, and max_position_embeddings
  includes the scaling.
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
    """Rules for reading one architecture's config.json, where architectures differ."""

    qkv_bias: bool = False
    """Biases on q, k and v, regardless of the config."""
    reads_attention_bias: bool = False
    """`attention_bias` adds biases to q, k, v and to the output projection."""
    reads_mlp_bias: bool = False
    keys: Mapping[str, str] = field(default_factory=dict[str, str])
    """The architecture's own names of keys, by the common names."""
    derived: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    """Function that returns the common keys that follow from several of the architecture's own keys."""
    unlike: Callable[[Mapping[str, Any], Sequence[LayerSpec]], tuple[LayerSpec, ...]] | None = None
    """Function that returns the layers with every other difference between them applied."""
    per_layer_keys: Collection[str] = ()
    """Keys that `per_layer_config` may set for a single layer; `unlike` reads them."""
    has_prediction_layers: bool = False
    """Whether the checkpoint stores `num_nextn_predict_layers` more layers after the others."""
    experts: ExpertTraits | None = None
    """None: no layer has experts."""
    only: Mapping[str, object] = field(default_factory=dict[str, object])
    """Keys for which only one value is implemented, or those of a tuple; a config may list it for each layer."""
    activations: Mapping[str, MLPActivation] = field(default_factory=lambda: SILU)
    """Activations of the MLP, by their names in configs. A config without a name means the first."""
    activation_keys: tuple[str, ...] = ("hidden_act",)
    """Keys that name the activation; the first one in the config counts. A config may leave it out."""
    norm_offset: float = 0.0
    """Number added to the weights of norms; Gemma checkpoints store weights less 1."""
    has_float32_norms: bool = False
    """Whether the weights of RMS norms are float32, so that the result is rounded after the multiplication."""
    head_bias: bool = False
    """A bias on logits."""
    scales_embeddings: bool = False
    """Embeddings are multiplied by the square root of `hidden_size`."""
    reads_query_scalar: bool = False
    """Scores are divided by the square root of `query_pre_attn_scalar`."""
    reads_softcap: bool = False
    """`final_logit_softcapping` bounds logits."""
    reads_attention_softcap: bool = False
    """`attn_logit_softcapping` bounds scores. Gemma 3 has it in configs, where transformers does not read it."""
    reads_output_bias: bool = False
    """`attention_out_bias` alone decides whether the output projection has a bias."""
    qk_norm: QKNorm = "none"
    qk_norm_key: str | None = None
    """Key that switches this norm on."""
    norms: NormPlace = "before"
    norm: NormKind = "rms"
    epsilon_key: str = "rms_norm_eps"
    bias_key: str | None = None
    """One key for the biases of all linear layers."""
    has_gate: bool = True
    is_parallel: bool = False
    parallel_key: str | None = None
    """Key that decides `is_parallel` instead."""
    parallel_norms: NormPlace = "shared"
    """Position of the norms in a parallel block."""
    num_norms_key: str | None = None
    """Key for the number of norms in a parallel block. With 2, there is one before attention and one before the MLP."""
    reads_logit_scale: bool = False
    """`logit_scale` is a factor on logits."""
    windows: WindowRule = "none"
    window_every: int | None = None
    """Without `layer_types`, every n-th layer is full and the others have the window; None: all have it."""
    reads_window_pattern: bool = False
    """`sliding_window_pattern` replaces `window_every`."""
    rope_rule: RopeRule = "same"
    has_sinks: bool = False
    """Each head has a learned score for an additional key without a value."""
    has_alibi: bool = False
    """ALiBi: scores decrease with the distance of a key, and nothing is rotated."""
    has_embedding_norm: bool = False
    """A norm after the embedding."""
    residual_from_norm_key: str | None = None
    """Key of a switch: attention and MLP add to the output of their norm."""
    position_offset: int | None = None
    """Row of position 0 in the table of learned positions, which replace the rotation; None: no such table."""
    has_partial_rotary: bool = False
    """Only `partial_rotary_factor` of each head is rotated."""
    longrope_names: Collection[str] = ()
    """Rope types that mean longrope in the architecture's early configs."""
    has_interleaved_rope: bool = False
    """Each rotated pair is two neighbouring numbers."""
    scales_queries: bool = False
    """`llama_4_scaling_beta` scales queries by their position."""
    reads_multipliers: bool = False
    """`embedding_multiplier`, `attention_multiplier`, `residual_multiplier` and `logits_scaling`."""
    reads_no_rope_layers: bool = False
    """`no_rope_layers` has a 0 for each layer without rotation; by default every 4th layer has none."""
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Values of absent keys, where they differ from the common defaults."""

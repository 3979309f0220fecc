"""ModelConfig: a checkpoint's config.json, read once and checked; no torch. Its layers are LayerSpecs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from twostroke.config.architecture_traits import ArchitectureTraits
from twostroke.config.architectures import ARCHITECTURE_TRAITS
from twostroke.config.experts import ExpertTraits
from twostroke.config.fields import (
    by_layer,
    is_number,
    one_value,
    read_bool,
    read_count,
    read_count_or_0,
    read_list,
    read_mapping,
    with_defaults,
)
from twostroke.config.layer_kinds import is_original_given, layer_overrides, layer_windows, layers_with_rope, ropes_of
from twostroke.config.layer_spec import KVSpec, LayerSpec, MLPActivation, NormKind, NormPlace
from twostroke.config.nearest import generates_no_text, nearest_known
from twostroke.config.quantization import StoredQuantization, read_quantization
from twostroke.config.rope import RopeConfig
from twostroke.config.text_config import TEXT_MODELS, text_config, unread_text_config
from twostroke.errors import CorruptCheckpoint, UnsupportedModel, shorten, show_name, shown

DTYPE_NAMES = ("float32", "float16", "bfloat16")
MAX_LAYERS = 4096
_SIZES = ("hidden_size", "num_attention_heads", "num_hidden_layers", "max_position_embeddings")
"""Common names that architectures with own names (`n_embd`, `n_head` ...) read, too."""
_MAX_NAMED = 4
"""Most unknown names of a config that a message lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of one model."""

    architecture: str
    layers: tuple[LayerSpec, ...]
    """Decoder layers, in their order."""
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    max_context: int
    """Longest request: max_position_embeddings, or the context after rope scaling."""
    norm_eps: float
    """Epsilon of norms, added to the mean of squares."""
    norm: NormKind = "rms"
    tie_word_embeddings: bool = False
    embedding_scale: float = 1.0
    """Factor on embeddings."""
    rounds_embedding_scale: bool = False
    """Whether embedding_scale is first rounded to the model's type, as in Gemma's training."""
    logits_divisor: float = 1.0
    """Divisor of logits."""
    logits_softcap: float | None = None
    """Soft cap: logits become cap * tanh(logits / cap); None: no cap."""
    norm_offset: float = 0.0
    """Added to the weights of norms."""
    has_float32_norms: bool = False
    """Whether the weights of RMS norms are float32, so that the result is rounded after the multiplication."""
    head_bias: bool = False
    """Whether logits have a bias."""
    has_embedding_norm: bool = False
    """Whether a norm follows the embedding."""
    position_offset: int | None = None
    """Row of position 0 in the table of learned positions, which is added to token embeddings; None: no such table."""
    dtype: str = "float32"
    """Type of the checkpoint's floats according to config.json."""
    quantization: StoredQuantization | None = None
    """Storage format of quantized weights; None: all weights are floats."""
    num_prediction_layers: int = 0
    """Layers after the last one that only predict further tokens. They are stored, but not read."""
    early_exit_layers: tuple[int, ...] = ()
    """Layer counts after which the model was trained to exit directly into its norm and head."""

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """Tokens that a query attends to in each layer, itself included; None: all."""
        return tuple(layer.kv.window for layer in self.layers)

    @property
    def kv_specs(self) -> tuple[KVSpec, ...]:
        """KV specs of the layers that have their own KV cache: all layers, or the first ones."""
        return tuple(layer.kv for layer in self.layers if layer.kv_source is None)

    @property
    def kinds(self) -> tuple[LayerSpec, ...]:
        """Distinct layer specs, in order of appearance."""
        return tuple(dict.fromkeys(self.layers))

    @property
    def ropes(self) -> tuple[tuple[RopeConfig, int], ...]:
        """Distinct position embeddings, each with its head_dim."""
        return tuple(dict.fromkeys((layer.rope, layer.kv.head_dim) for layer in self.layers if layer.rope))

    def with_ropes(self, changed: Callable[[RopeConfig], RopeConfig]) -> ModelConfig:
        """Return the model with each layer's position embedding changed."""
        layers = (layer if layer.rope is None else replace(layer, rope=changed(layer.rope)) for layer in self.layers)
        return replace(self, layers=tuple(layers))

    def fixed_for(self, max_model_len: int | None) -> ModelConfig:
        """Return the model with dynamic rope scaling fixed for the requested length, or for the whole context.

        A length that was shortened to fit into memory is never used: the same request gives the same tokens on a
        machine with less memory.
        """
        longest_request = max_model_len or self.max_context
        return self.with_ropes(lambda rope: replace(rope, longest_request=longest_request))

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read a Hugging Face config.json, except its token ids (see `tokenizer.settings.read_eos_token_ids`).

        Args:
            config: the parsed config.json.

        Raises:
            UnsupportedModel: an architecture, rope type, activation or weight format is not implemented.
            CorruptCheckpoint: a number is absent, is no number, or contradicts another.
        """
        config = text_config(config)
        architecture = _architecture(config)
        traits = ARCHITECTURE_TRAITS[architecture]
        unread = unread_text_config(config, architecture)
        if unread and config.get(traits.keys.get("num_hidden_layers", "num_hidden_layers")) is None:
            raise UnsupportedModel(f"config.json: {unread}. Name the architecture of the whole model.")
        given = _given(config, traits)
        num_layers = read_count(
            given, "num_hidden_layers", most=MAX_LAYERS
        )  # checked before lists of this length are made
        if traits.derived is not None:
            given |= traits.derived(given)
        if traits.bias_key is not None:
            given["attention_bias"] = given["mlp_bias"] = read_bool(given, traits.bias_key)
        _refuse_others(given, traits, num_layers)
        _refuse_bidirectional(given)
        num_heads = read_count(given, "num_attention_heads")
        num_kv_heads = read_count(given, "num_key_value_heads", num_heads)
        hidden_size = read_count(given, "hidden_size")
        head_dim = read_count(given, "head_dim", hidden_size // num_heads)
        max_positions = read_count(given, "max_position_embeddings")
        full_rope, window_rope = ropes_of(given, traits, head_dim)
        _check_heads(given, hidden_size, num_heads, num_kv_heads, head_dim)
        has_attention_bias = traits.reads_attention_bias and read_bool(given, "attention_bias")
        is_parallel = traits.is_parallel if traits.parallel_key is None else read_bool(given, traits.parallel_key)
        has_qk_norm = traits.qk_norm_key is None or read_bool(given, traits.qk_norm_key)
        layer = LayerSpec(
            num_heads=num_heads,
            kv=KVSpec(num_kv_heads=num_kv_heads, head_dim=head_dim),
            rope=full_rope,
            intermediate_size=read_count(given, "intermediate_size"),
            has_gate=traits.has_gate,
            is_parallel=is_parallel,
            qkv_bias=traits.qkv_bias or has_attention_bias,
            output_bias=read_bool(given, "attention_out_bias") if traits.reads_output_bias else has_attention_bias,
            mlp_bias=traits.reads_mlp_bias and read_bool(given, "mlp_bias"),
            qk_norm=traits.qk_norm if has_qk_norm else "none",
            norms=_norm_place(given, traits, is_parallel=is_parallel),
            activation=_activation(given, traits),
            score_scale=_score_scale(given, traits),
            attention_softcap=_soft_cap(given, "attn_logit_softcapping") if traits.reads_attention_softcap else None,
            has_sinks=traits.has_sinks,
            has_alibi=traits.has_alibi,
            residual_scale=_number(given, "residual_multiplier") if traits.reads_multipliers else 1.0,
            residual_from_norm=traits.residual_from_norm_key is not None
            and read_bool(given, traits.residual_from_norm_key),
        )
        windows = layer_windows(given, traits, num_layers)
        has_rope = layers_with_rope(given, traits, windows)
        layers = tuple(
            replace(
                layer,
                kv=replace(layer.kv, window=window),
                rope=None if not is_rotated else full_rope if window is None else window_rope,
            )
            for window, is_rotated in zip(windows, has_rope, strict=True)
        )
        layer_overrides(given, num_layers, traits.per_layer_keys)  # refuses keys that no `unlike` reads
        if traits.experts is not None:
            layers = _with_experts(given, traits.experts, layers)
        read = cls(
            architecture=architecture,
            layers=layers if traits.unlike is None else traits.unlike(given, layers),
            hidden_size=hidden_size,
            vocab_size=read_count(given, "vocab_size"),
            max_position_embeddings=max_positions,
            max_context=max_positions
            if traits.rope_rule == "local_windows"
            else full_rope.context(max_positions, is_original_given=is_original_given(given, traits)),
            norm_eps=_epsilon(given, traits.epsilon_key),
            norm=traits.norm,
            tie_word_embeddings=read_bool(given, "tie_word_embeddings"),
            embedding_scale=_embedding_scale(given, traits),
            rounds_embedding_scale=traits.scales_embeddings,
            logits_divisor=_logits_divisor(given, traits),
            logits_softcap=_soft_cap(given, "final_logit_softcapping") if traits.reads_softcap else None,
            norm_offset=traits.norm_offset,
            has_float32_norms=traits.has_float32_norms,
            head_bias=traits.head_bias,
            has_embedding_norm=traits.has_embedding_norm,
            position_offset=traits.position_offset,
            dtype=_dtype(given),
            quantization=read_quantization(
                read_mapping(given, "quantization_config") or read_mapping(given, "compression_config")
            ),
            num_prediction_layers=read_count_or_0(given, "num_nextn_predict_layers")
            if traits.has_prediction_layers
            else 0,
            early_exit_layers=_early_exit_layers(given, num_layers),
        )
        if any(rope.rope_type == "dynamic" and (rope.rotary_dim or head_dim) < 4 for rope in (full_rope, window_rope)):
            raise CorruptCheckpoint(f"config.json: dynamic rope scaling needs a head_dim of 4, found {head_dim}.")
        if read.head_bias and read.tie_word_embeddings:
            raise UnsupportedModel("tie_word_embeddings=true is not implemented beside a bias on logits; known: false.")
        if read.max_context < 2:
            raise CorruptCheckpoint(
                f"config.json: max_position_embeddings {max_positions} and rope factor {full_rope.factor:g} leave a "
                f"context of {read.max_context} tokens."
            )
        return read


def _given(config: Mapping[str, Any], traits: ArchitectureTraits) -> dict[str, Any]:
    """Return the config with defaults for absent keys, and each value under its common name.

    Raises:
        CorruptCheckpoint: two names of a value have different values.
    """
    own = {} if traits.experts is None else traits.experts.counts(config)
    own |= {theirs: one_value(config, theirs, (ours,)) for ours, theirs in traits.keys.items() if ours in _SIZES}
    written = {**config, **{key: value for key, value in own.items() if value is not None}}
    given = with_defaults(traits.defaults, written, ("rope_parameters", traits.epsilon_key))
    return given | {ours: given[theirs] for ours, theirs in traits.keys.items() if theirs in given}


def _with_experts(given: Mapping[str, Any], traits: ExpertTraits, layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    are_sparse = traits.sparse_layers(given, len(layers))
    if not any(are_sparse):
        return tuple(layers)
    experts = traits.read(given)
    return tuple(
        replace(
            layer, experts=experts, intermediate_size=layer.intermediate_size if traits.has_mlp_beside_experts else 0
        )
        if is_sparse
        else layer
        for layer, is_sparse in zip(layers, are_sparse, strict=True)
    )


def _architecture(config: Mapping[str, Any]) -> str:
    names = read_list(config, "architectures")
    for name in names:
        if isinstance(name, str) and name in ARCHITECTURE_TRAITS:
            return name
    known = sorted([*ARCHITECTURE_TRAITS, *TEXT_MODELS])
    kind = config.get("model_type")
    what = f"the architecture {shorten(names, _MAX_NAMED)}" if names else "no architecture"
    if not names and kind is not None:
        what += f" beside model_type {shown(kind)}"
    name = show_name(names[0]) if names else "".join(part.capitalize() for part in show_name(kind or "").split("_"))
    sparse = {other for other, traits in ARCHITECTURE_TRAITS.items() if traits.experts is not None}
    sparse |= {whole for whole, texts in TEXT_MODELS.items() if not sparse.isdisjoint(texts.values())}
    near = nearest_known(name, config, known, reads_images=TEXT_MODELS, has_experts=sparse)
    is_bare = bool(names) and generates_no_text(name) and "without" not in near
    told = "models of this name generate no text; " if is_bare else ""
    raise UnsupportedModel(f"config.json names {what}; {told}{near}known: {', '.join(known)}.")


def _check_heads(given: Mapping[str, Any], hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    if given.get("head_dim") is None and hidden_size % num_heads:
        raise CorruptCheckpoint(
            f"config.json: hidden_size {hidden_size} is no multiple of num_attention_heads {num_heads}, and head_dim "
            "is not given."
        )
    if num_heads % num_kv_heads:
        raise CorruptCheckpoint(
            f"config.json: num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}."
        )
    if head_dim % 2:
        raise CorruptCheckpoint(f"config.json: head_dim {head_dim} is odd; rotary embedding needs pairs.")


def _activation(given: Mapping[str, Any], traits: ArchitectureTraits) -> MLPActivation:
    named = ((key, given[key]) for key in traits.activation_keys if given.get(key) is not None)
    key, name = next(named, ("", next(iter(traits.activations))))
    if not isinstance(name, str) or name not in traits.activations:
        raise UnsupportedModel(f"{key}={shown(name)} is not implemented; known: {', '.join(traits.activations)}.")
    return traits.activations[name]


def _norm_place(given: Mapping[str, Any], traits: ArchitectureTraits, *, is_parallel: bool) -> NormPlace:
    if not is_parallel:
        return traits.norms
    has_two = traits.num_norms_key is not None and given.get(traits.num_norms_key) == 2
    return "before" if has_two else traits.parallel_norms


def _refuse_others(given: Mapping[str, Any], traits: ArchitectureTraits, num_layers: int) -> None:
    for key, known in traits.only.items():
        values: tuple[object, ...] = known if isinstance(known, tuple) else (known,)
        if by_layer(given, key, num_layers) not in (None, *values):
            raise UnsupportedModel(
                f"{key}={shown(given[key])} is not implemented for this architecture; known: "
                f"{', '.join(map(shown, values))}. If the model was trained with a known value, correct config.json."
            )


def _refuse_bidirectional(given: Mapping[str, Any]) -> None:
    # "vision" only concerns image positions, which no request here has
    if given.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise UnsupportedModel(
            "use_bidirectional_attention is not implemented; known: false. Such a model computes embeddings and "
            "generates no text."
        )
    if not read_bool(given, "is_causal", default=True):
        raise UnsupportedModel(
            "is_causal=false is not implemented; known: true. Such a model attends to later tokens and generates no "
            "text."
        )


def _score_scale(given: Mapping[str, Any], traits: ArchitectureTraits) -> float | None:
    if traits.reads_query_scalar:
        return _number(given, "query_pre_attn_scalar") ** -0.5
    return _number(given, "attention_multiplier") if traits.reads_multipliers else None


def _early_exit_layers(given: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    layers = read_list(given, "early_exit_layers")
    for layer in layers:
        if isinstance(layer, bool) or not isinstance(layer, int) or not 0 < layer < num_layers:
            raise CorruptCheckpoint(
                f"config.json: early_exit_layers has {shown(layer)}; a layer from 1 to {num_layers - 1}."
            )
    return tuple(layers)


_CAPS = (1.0, 1e4)
"""Smallest and largest soft cap. With a much larger one, float32 would round small scores to 0."""
_SMALLEST_EPSILON = 1e-30
"""Smallest epsilon: still a normal float32. An epsilon of 0 would turn padding rows, which are zeros, into NaN."""


def _epsilon(given: Mapping[str, Any], key: str) -> float:
    value = given.get(key, 1e-6)
    if not is_number(value) or not _SMALLEST_EPSILON <= value < 1:
        raise CorruptCheckpoint(
            f"config.json: {key} must be a number above 0 (at least {_SMALLEST_EPSILON:g}) and below 1, found "
            f"{shown(value)}."
        )
    return float(value)


def _number(given: Mapping[str, Any], name: str) -> float:
    value = given.get(name, 1.0)
    if not is_number(value) or not _SMALLEST_EPSILON <= value <= 1 / _SMALLEST_EPSILON:
        raise CorruptCheckpoint(f"config.json: {name} must be a number above 0, found {shown(value)}.")
    return float(value)


def _embedding_scale(given: Mapping[str, Any], traits: ArchitectureTraits) -> float:
    if traits.scales_embeddings:
        return read_count(given, "hidden_size") ** 0.5
    return _number(given, "embedding_multiplier") if traits.reads_multipliers else 1.0


def _logits_divisor(given: Mapping[str, Any], traits: ArchitectureTraits) -> float:
    if traits.reads_logit_scale:
        return 1 / _number(given, "logit_scale")
    return _number(given, "logits_scaling") if traits.reads_multipliers else 1.0


def _soft_cap(given: Mapping[str, Any], name: str) -> float | None:
    """Return a soft cap; None: there is none."""
    cap = given.get(name)
    if cap is not None and not (is_number(cap) and _CAPS[0] <= cap <= _CAPS[1]):
        raise CorruptCheckpoint(
            f"config.json: {name} must be null or a number from {_CAPS[0]:g} to {_CAPS[1]:g}, found {shown(cap)}."
        )
    return None if cap is None else float(cap)


def _dtype(given: Mapping[str, Any]) -> str:
    name = str(given.get("dtype") or given.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPE_NAMES:
        raise UnsupportedModel(f"weights of type {shown(name)} are not implemented; known: {', '.join(DTYPE_NAMES)}.")
    return name

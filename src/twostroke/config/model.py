"""ModelConfig: what a checkpoint's config.json says, read once and checked; no torch.

Both spellings of rotary embeddings are understood: transformers 4 (`rope_theta` beside `rope_scaling`) and
transformers 5 (`rope_parameters`). Defaults of absent keys are those of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from twostroke.config.fields import count, is_number, list_of, mapping, switch
from twostroke.config.quantization import QuantizationConfig
from twostroke.errors import CorruptCheckpoint, UnsupportedModel

RopeType = Literal["default", "linear", "dynamic", "yarn", "llama3"]
WindowRule = Literal["none", "all_layers", "by_layer"]

ROPE_TYPES: tuple[RopeType, ...] = ("default", "linear", "dynamic", "yarn", "llama3")
DTYPE_NAMES = ("float32", "float16", "bfloat16")
DEFAULT_ROPE_THETA = 10_000.0
MAX_LAYERS = 4096


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding and how it is stretched; layers/rotary.py computes the frequencies.

    Fields that a rope type does not use are None.
    """

    theta: float
    rope_type: RopeType = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    """Context of the pre-training, for yarn and llama3; for dynamic the model's max_position_embeddings."""
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    longest_request: int | None = None
    """Tokens that dynamic scaling is fixed for; None is the original context, where it changes nothing."""
    frequency_divisors: tuple[float, ...] | None = None
    """What each pair's frequency is divided by, [head_dim / 2], where a file stores that and not the rule (GGUF)."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> RopeConfig:
        """Reads either spelling out of a config.json.

        Raises:
            UnsupportedModel: a rope type that is not implemented, or one per kind of layer.
            CorruptCheckpoint: a parameter that the rope type needs is absent or no number.
        """
        given = {**(mapping(config, "rope_scaling") or mapping(config, "rope_parameters"))}
        if any(isinstance(value, Mapping) for value in given.values()):
            raise UnsupportedModel("rope parameters per kind of layer are not implemented; known: one set for all.")
        rope_type = given.get("rope_type") or given.get("type") or "default"
        if rope_type not in ROPE_TYPES:
            raise UnsupportedModel(f"rope type {rope_type!r} is not implemented; known: {', '.join(ROPE_TYPES)}.")
        partial = given.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        if partial is not None and partial != 1:
            raise UnsupportedModel(f"partial_rotary_factor={partial}: only whole heads can be rotated (1.0).")
        theta = given.get("rope_theta", config.get("rope_theta"))
        max_positions = count(config, "max_position_embeddings")
        original: int | None = None
        if rope_type in ("yarn", "llama3"):
            # a value beside the rope parameters wins over one among them: transformers' rule
            name = "original_max_position_embeddings"
            original = count({name: config.get(name) or given.get(name)}, name, max_positions)
        elif rope_type == "dynamic":
            original = max_positions
        factor = given.get("factor")
        if factor is None and rope_type == "yarn" and original:
            factor = max_positions / original
        numbers: dict[str, Any] = {"theta": DEFAULT_ROPE_THETA if theta is None else theta, "factor": factor}
        if rope_type == "default":
            numbers["factor"] = 1.0
        numbers |= {name: given.get(name) for name in _OPTIONAL_ROPE_NUMBERS}
        _check_rope_numbers(rope_type, numbers)
        return cls(
            rope_type=rope_type,
            original_max_position_embeddings=original,
            truncate=switch(given, "truncate", default=True),
            longest_request=None,
            frequency_divisors=None,
            **{name: float(value) for name, value in numbers.items() if value is not None},
        )

    def context(self, max_position_embeddings: int, *, is_original_given: bool) -> int:
        """Tokens that the stretched embedding reaches, by vLLM's rule.

        linear, dynamic   max_position_embeddings x factor: it is the context before the stretching
        yarn              original_max_position_embeddings x factor, where that was given
        llama3, default   max_position_embeddings: it is the context after it
        """
        if self.rope_type in ("linear", "dynamic"):
            return int(max_position_embeddings * self.factor)
        if self.rope_type == "yarn" and is_original_given:
            assert self.original_max_position_embeddings is not None
            return int(self.original_max_position_embeddings * self.factor)
        return max_position_embeddings


_OPTIONAL_ROPE_NUMBERS = (
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)
_ROPE_NUMBERS = (1e-12, 1e12)
"""Far beyond what models have; smaller ones would make frequencies infinite in float32, and every logit NaN."""


def _check_rope_numbers(rope_type: str, numbers: Mapping[str, Any]) -> None:
    needed = ["theta", "factor"]
    if rope_type == "llama3":
        needed += ["low_freq_factor", "high_freq_factor"]
    low, high = _ROPE_NUMBERS
    for name, value in numbers.items():
        is_absent = value is None and name not in needed
        if not is_absent and not (is_number(value) and low <= value <= high):
            key = "rope_theta" if name == "theta" else name
            raise CorruptCheckpoint(
                f"config.json: rope type {rope_type!r} needs a number above 0 (from {low:g} to {high:g}) for {key}, "
                f"found {value!r}."
            )
    if rope_type == "yarn" and numbers["theta"] <= 1:
        raise CorruptCheckpoint(f"config.json: rope type 'yarn' needs a rope_theta above 1, found {numbers['theta']}.")
    if rope_type == "llama3" and numbers["low_freq_factor"] == numbers["high_freq_factor"]:
        raise CorruptCheckpoint(f"config.json: low_freq_factor equals high_freq_factor ({numbers['low_freq_factor']}).")


@dataclass(frozen=True, slots=True)
class ArchitectureTraits:
    """How one architecture reads its config.json, where architectures differ."""

    qkv_bias: bool = False
    """Biases on q, k and v whatever the config says."""
    reads_attention_bias: bool = False
    """`attention_bias` adds biases to q, k, v and to the output projection."""
    reads_mlp_bias: bool = False
    qk_norm: bool = False
    windows: WindowRule = "none"
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Values of absent keys, where they differ from the common ones."""


ARCHITECTURE_TRAITS: dict[str, ArchitectureTraits] = {
    "LlamaForCausalLM": ArchitectureTraits(reads_attention_bias=True, reads_mlp_bias=True),
    "MistralForCausalLM": ArchitectureTraits(
        windows="all_layers", defaults={"num_key_value_heads": 8, "sliding_window": 4096}
    ),
    "Qwen2ForCausalLM": ArchitectureTraits(qkv_bias=True, windows="by_layer", defaults={"num_key_value_heads": 32}),
    "Qwen3ForCausalLM": ArchitectureTraits(
        reads_attention_bias=True,
        qk_norm=True,
        windows="by_layer",
        defaults={"num_key_value_heads": 32, "head_dim": 128},
    ),
}
"""Architectures whose config.json can be read; model/registry.py says where their maths is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of one model."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    max_context: int
    """The longest request: max_position_embeddings, or what the rotary embedding is stretched to."""
    rms_norm_eps: float
    rope: RopeConfig
    layer_windows: tuple[int | None, ...]
    """Per layer: tokens a query sees, itself included; None sees all."""
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """Biases on the q, k and v projections."""
    output_bias: bool = False
    """A bias on the attention's output projection."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMS norm over each head of q and k, before the rotation."""
    dtype: str = "float32"
    """Type of the checkpoint's floats as config.json states it."""
    quantization: QuantizationConfig | None = None
    """How the weights are stored that are no floats."""
    early_exit_layers: tuple[int, ...] = ()
    """After so many layers the model was trained to go on with its norm and head right away."""

    def fixed_for(self, max_model_len: int | None) -> ModelConfig:
        """The model with dynamic rope scaling fixed for what the user asked for, or for all of its context.

        Never for a length that was shortened to fit into memory: the same request gives the same tokens on a machine
        with less of it.
        """
        return replace(self, rope=replace(self.rope, longest_request=max_model_len or self.max_context))

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Reads a Hugging Face config.json, but for its token ids (see `tokenizer.settings.read_eos_token_ids`).

        Args:
            config: the parsed config.json.

        Raises:
            UnsupportedModel: an architecture, rope type, activation or weight format that is not implemented.
            CorruptCheckpoint: a number that is absent, no number, or contradicts another.
        """
        architecture = _architecture(config)
        traits = ARCHITECTURE_TRAITS[architecture]
        given = {**traits.defaults, **config}
        _refuse_unsupported(given)
        num_heads = count(given, "num_attention_heads")
        hidden_size = count(given, "hidden_size")
        num_layers = count(given, "num_hidden_layers", most=MAX_LAYERS)
        max_positions = count(given, "max_position_embeddings")
        rope = RopeConfig.from_hf(given)
        has_attention_bias = traits.reads_attention_bias and switch(given, "attention_bias")
        read = cls(
            architecture=architecture,
            num_layers=num_layers,
            hidden_size=hidden_size,
            intermediate_size=count(given, "intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=count(given, "num_key_value_heads", num_heads),
            head_dim=count(given, "head_dim", hidden_size // num_heads),
            vocab_size=count(given, "vocab_size"),
            max_position_embeddings=max_positions,
            max_context=rope.context(max_positions, is_original_given=_is_original_given(given)),
            rms_norm_eps=_epsilon(given),
            rope=rope,
            layer_windows=_layer_windows(given, traits.windows, num_layers),
            tie_word_embeddings=switch(given, "tie_word_embeddings"),
            attention_bias=traits.qkv_bias or has_attention_bias,
            output_bias=has_attention_bias,
            mlp_bias=traits.reads_mlp_bias and switch(given, "mlp_bias"),
            qk_norm=traits.qk_norm,
            dtype=_dtype(given),
            quantization=QuantizationConfig.from_hf(mapping(given, "quantization_config")),
            early_exit_layers=_early_exit_layers(given, num_layers),
        )
        read._check(given)
        return read

    def _check(self, given: Mapping[str, Any]) -> None:
        if given.get("head_dim") is None and self.hidden_size % self.num_heads:
            raise CorruptCheckpoint(
                f"config.json: hidden_size {self.hidden_size} is no multiple of num_attention_heads {self.num_heads}, "
                "and head_dim is not given."
            )
        if self.num_heads % self.num_kv_heads:
            raise CorruptCheckpoint(
                f"config.json: num_attention_heads {self.num_heads} is no multiple of num_key_value_heads "
                f"{self.num_kv_heads}."
            )
        if self.head_dim % 2:
            raise CorruptCheckpoint(f"config.json: head_dim {self.head_dim} is odd; rotary embedding needs pairs.")
        if self.rope.rope_type == "dynamic" and self.head_dim < 4:
            raise CorruptCheckpoint(f"config.json: dynamic rope scaling needs a head_dim of 4, found {self.head_dim}.")
        if self.max_context < 2:
            raise CorruptCheckpoint(
                f"config.json: max_position_embeddings {self.max_position_embeddings} and rope factor "
                f"{self.rope.factor:g} leave a context of {self.max_context} tokens."
            )


def _architecture(config: Mapping[str, Any]) -> str:
    names = list_of(config, "architectures")
    for name in names:
        if isinstance(name, str) and name in ARCHITECTURE_TRAITS:
            return name
    known = ", ".join(sorted(ARCHITECTURE_TRAITS))
    kind = config.get("model_type")
    beside = "" if kind is None else f" beside model_type {kind!r}"
    what = f"the architecture {', '.join(map(str, names))}" if names else f"no architecture{beside}"
    raise UnsupportedModel(f"config.json names {what}; known: {known}.")


def _refuse_unsupported(given: Mapping[str, Any]) -> None:
    activation = given.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModel(f"hidden_act={activation!r} is not implemented; known: silu.")


def _early_exit_layers(given: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    layers = list_of(given, "early_exit_layers")
    for layer in layers:
        if isinstance(layer, bool) or not isinstance(layer, int) or not 0 < layer < num_layers:
            raise CorruptCheckpoint(
                f"config.json: early_exit_layers has {layer!r}; a layer from 1 to {num_layers - 1}."
            )
    return tuple(layers)


_SMALLEST_EPSILON = 1e-30
"""A normal number in float32 still: as 0 it would make NaN out of a row of zeros, which padding rows are."""


def _epsilon(given: Mapping[str, Any]) -> float:
    value = given.get("rms_norm_eps")
    if value is None:
        return 1e-6
    if not is_number(value) or not _SMALLEST_EPSILON <= value < 1:
        raise CorruptCheckpoint(
            f"config.json: rms_norm_eps must be a number above 0 (at least {_SMALLEST_EPSILON:g}) and below 1, found "
            f"{value!r}."
        )
    return float(value)


def _is_original_given(given: Mapping[str, Any]) -> bool:
    rope = mapping(given, "rope_scaling") or mapping(given, "rope_parameters")
    name = "original_max_position_embeddings"
    return bool(given.get(name) or rope.get(name))


def _layer_windows(given: Mapping[str, Any], rule: WindowRule, num_layers: int) -> tuple[int | None, ...]:
    if rule == "none":
        return (None,) * num_layers
    window = given.get("sliding_window", 4096)
    if rule == "by_layer" and not switch(given, "use_sliding_window"):
        window = None
    if window is not None:
        window = count({"sliding_window": window}, "sliding_window")
    if rule == "all_layers":
        return (window,) * num_layers
    if given.get("layer_types") is None:
        first_windowed = given.get("max_window_layers", 28)
        if isinstance(first_windowed, bool) or not isinstance(first_windowed, int) or first_windowed < 0:
            raise CorruptCheckpoint(
                f"config.json: max_window_layers must be an integer of at least 0, found {first_windowed!r}."
            )
        return tuple(window if layer_id >= first_windowed else None for layer_id in range(num_layers))
    kinds = [str(kind) for kind in list_of(given, "layer_types")]
    if len(kinds) != num_layers:
        raise CorruptCheckpoint(f"config.json: layer_types has {len(kinds)} entries for {num_layers} layers.")
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnsupportedModel(f"layer types {unknown} are not implemented; known: full_attention, sliding_attention.")
    if window is None and "sliding_attention" in kinds:
        raise CorruptCheckpoint("config.json: layer_types has sliding_attention, but no sliding_window is in use.")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _dtype(given: Mapping[str, Any]) -> str:
    name = str(given.get("dtype") or given.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPE_NAMES:
        raise UnsupportedModel(f"weights of type {name!r} are not implemented; known: {', '.join(DTYPE_NAMES)}.")
    return name

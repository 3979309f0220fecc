"""ModelConfig: what a checkpoint's config.json says, read once and checked; no torch.

Both spellings of rotary embeddings are understood: transformers 4 (`rope_theta` beside `rope_scaling`) and
transformers 5 (`rope_parameters`). Defaults of absent keys are those of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from twostroke.errors import CorruptCheckpoint, UnsupportedModel

RopeType = Literal["default", "linear", "dynamic", "yarn", "llama3"]
WindowRule = Literal["none", "all_layers", "by_layer"]

ROPE_TYPES: tuple[RopeType, ...] = ("default", "linear", "dynamic", "yarn", "llama3")
DTYPE_NAMES = ("float32", "float16", "bfloat16")
DEFAULT_ROPE_THETA = 10_000.0


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

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> RopeConfig:
        """Reads either spelling out of a config.json.

        Raises:
            UnsupportedModel: a rope type that is not implemented, or one per kind of layer.
            CorruptCheckpoint: a parameter that the rope type needs is absent or no number.
        """
        given = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
        if any(isinstance(value, Mapping) for value in given.values()):
            raise UnsupportedModel("rope parameters per kind of layer are not implemented; known: one set for all.")
        rope_type = given.get("rope_type") or given.get("type") or "default"
        if rope_type not in ROPE_TYPES:
            raise UnsupportedModel(f"rope type {rope_type!r} is not implemented; known: {', '.join(ROPE_TYPES)}.")
        partial = given.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        if partial not in (None, 1, 1.0):
            raise UnsupportedModel(f"partial_rotary_factor={partial}: only whole heads can be rotated (1.0).")
        theta = given.get("rope_theta") or config.get("rope_theta") or DEFAULT_ROPE_THETA
        max_positions = config.get("max_position_embeddings")
        original: Any = None
        if rope_type in ("yarn", "llama3"):
            # a value beside the rope parameters wins over one among them: transformers' rule
            inner = given.get("original_max_position_embeddings")
            original = config.get("original_max_position_embeddings") or inner or max_positions
        elif rope_type == "dynamic":
            original = max_positions
        factor = given.get("factor")
        if factor is None and rope_type == "yarn" and original:
            factor = cast(Any, max_positions) / original
        rope = cls(
            theta=theta,
            rope_type=rope_type,
            factor=1.0 if rope_type == "default" else cast(float, factor),
            original_max_position_embeddings=original,
            truncate=bool(given.get("truncate", True)),
            **{name: given.get(name) for name in _OPTIONAL_ROPE_NUMBERS},
        )
        rope._check()
        return rope

    def _check(self) -> None:
        needed = ["theta", "factor"]
        if self.rope_type in ("yarn", "llama3", "dynamic"):
            needed.append("original_max_position_embeddings")
        if self.rope_type == "llama3":
            needed += ["low_freq_factor", "high_freq_factor"]
        for name in (*needed, *_OPTIONAL_ROPE_NUMBERS):
            value: Any = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            is_fine = (is_number and value > 0) if name in needed else (is_number or value is None)
            if not is_fine:
                raise CorruptCheckpoint(
                    f"config.json: rope type {self.rope_type!r} needs a number above 0 for {name}, found {value!r}."
                )
        if self.rope_type == "llama3" and self.low_freq_factor == self.high_freq_factor:
            raise CorruptCheckpoint(f"config.json: low_freq_factor equals high_freq_factor ({self.low_freq_factor}).")


_OPTIONAL_ROPE_NUMBERS = (
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)


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
    hidden_act: str = "silu"
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str = "float32"
    """Type of the checkpoint's weights as config.json states it."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelConfig:
        """Reads a Hugging Face config.json, and the end-of-text ids of a generation_config.json.

        Args:
            config: the parsed config.json.
            generation_config: the parsed generation_config.json, if there is one.

        Raises:
            UnsupportedModel: an architecture, rope type, activation or weight format that is not implemented.
            CorruptCheckpoint: a number that is absent, no number, or contradicts another.
        """
        architecture = _architecture(config)
        traits = ARCHITECTURE_TRAITS[architecture]
        given = {**traits.defaults, **config}
        _refuse_unsupported(given)
        num_heads = _count(given, "num_attention_heads")
        hidden_size = _count(given, "hidden_size")
        num_layers = _count(given, "num_hidden_layers")
        has_attention_bias = traits.reads_attention_bias and bool(given.get("attention_bias"))
        read = cls(
            architecture=architecture,
            num_layers=num_layers,
            hidden_size=hidden_size,
            intermediate_size=_count(given, "intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=_count(given, "num_key_value_heads", num_heads),
            head_dim=_count(given, "head_dim", hidden_size // num_heads),
            vocab_size=_count(given, "vocab_size"),
            max_position_embeddings=_count(given, "max_position_embeddings"),
            rms_norm_eps=float(given.get("rms_norm_eps", 1e-6)),
            rope=RopeConfig.from_hf(given),
            layer_windows=_layer_windows(given, traits.windows, num_layers),
            tie_word_embeddings=bool(given.get("tie_word_embeddings", False)),
            attention_bias=traits.qkv_bias or has_attention_bias,
            output_bias=has_attention_bias,
            mlp_bias=traits.reads_mlp_bias and bool(given.get("mlp_bias")),
            qk_norm=traits.qk_norm,
            eos_token_ids=_eos_token_ids(given, generation_config or {}),
            bos_token_id=given.get("bos_token_id"),
            dtype=_dtype(given),
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
        for token_id in (*self.eos_token_ids, *(() if self.bos_token_id is None else (self.bos_token_id,))):
            if not 0 <= token_id < self.vocab_size:
                raise CorruptCheckpoint(f"config.json: token id {token_id} is outside vocab_size {self.vocab_size}.")


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or []
    for name in names:
        if name in ARCHITECTURE_TRAITS:
            return name
    known = ", ".join(sorted(ARCHITECTURE_TRAITS))
    shown = ", ".join(map(str, names)) if names else f"none (model_type {config.get('model_type')!r})"
    raise UnsupportedModel(f"config.json names the architecture {shown}; known: {known}.")


def _refuse_unsupported(given: Mapping[str, Any]) -> None:
    activation = given.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModel(f"hidden_act={activation!r} is not implemented; known: silu.")
    if given.get("quantization_config"):
        method = given["quantization_config"].get("quant_method")
        raise UnsupportedModel(f"quantized weights ({method}) are not implemented; known: {', '.join(DTYPE_NAMES)}.")


def _count(given: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = given.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CorruptCheckpoint(f"config.json: {name} must be an integer above 0, found {value!r}.")
    return value


def _layer_windows(given: Mapping[str, Any], rule: WindowRule, num_layers: int) -> tuple[int | None, ...]:
    if rule == "none":
        return (None,) * num_layers
    window = given.get("sliding_window", 4096)
    if rule == "by_layer" and not given.get("use_sliding_window", False):
        window = None
    if window is not None:
        window = _count({"sliding_window": window}, "sliding_window")
    if rule == "all_layers":
        return (window,) * num_layers
    kinds = given.get("layer_types")
    if kinds is None:
        first_windowed = given.get("max_window_layers", 28)
        return tuple(window if layer_id >= first_windowed else None for layer_id in range(num_layers))
    if len(kinds) != num_layers:
        raise CorruptCheckpoint(f"config.json: layer_types has {len(kinds)} entries for {num_layers} layers.")
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnsupportedModel(f"layer types {unknown} are not implemented; known: full_attention, sliding_attention.")
    if window is None and "sliding_attention" in kinds:
        raise CorruptCheckpoint("config.json: layer_types has sliding_attention, but no sliding_window is in use.")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _eos_token_ids(given: Mapping[str, Any], generation_config: Mapping[str, Any]) -> tuple[int, ...]:
    """Of both files, generation_config's first: chat models end a turn with an id that only that file lists."""
    found: list[int] = []
    for source in (generation_config.get("eos_token_id"), given.get("eos_token_id")):
        found += source if isinstance(source, list) else [] if source is None else [source]
    return tuple(dict.fromkeys(found))


def _dtype(given: Mapping[str, Any]) -> str:
    name = str(given.get("dtype") or given.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPE_NAMES:
        raise UnsupportedModel(f"weights of type {name!r} are not implemented; known: {', '.join(DTYPE_NAMES)}.")
    return name

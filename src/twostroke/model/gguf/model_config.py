"""Conversion of a GGUF file's metadata to a ModelConfig.

The keys are those of ggml's docs/gguf.md and llama.cpp's conversion scripts. They are translated to fields of a
config.json, whose reader checks them further. Defaults of absent keys are llama.cpp's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from twostroke.config.architectures import ARCHITECTURE_TRAITS
from twostroke.config.experts import MAX_EXPERTS, ExpertTraits
from twostroke.config.layer_spec import NormKind
from twostroke.config.model import MAX_LAYERS, ModelConfig
from twostroke.config.rope import rotary_share
from twostroke.errors import CorruptCheckpoint, UnsupportedModel, shown
from twostroke.gguf.container import GGUFFile, StoredTensor
from twostroke.gguf.metadata import Metadata
from twostroke.model.gguf.architectures import GGUF_ARCHITECTURES, GGUFArchitecture, gguf_architecture
from twostroke.model.gguf.own_keys import in_own_keys

ROPE_FREQS = "rope_freqs.weight"
"""Divisors of each pair's rotary frequency: Llama 3's context extension, computed when the file was made."""
ROPE_FACTORS = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
"""LongRoPE's divisors up to the original context and beyond it, by their names in config.json."""


_ATTENTION_FACTOR = "rope.scaling.attn_factor"
"""Key of LongRoPE's attention factor."""
_PREDICTION_LAYERS = "nextn_predict_layers"
_YARN_FACTORS = ("rope.scaling.yarn_log_multiplier", "attention.temperature_scale")

_NEUTRAL: dict[str, int | float | bool] = {
    "expert_count": 0,
    "attention.causal": True,
    "attention.scale": 0.0,
    "attention.max_alibi_bias": 0.0,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "logit_scale": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "attention.temperature_scale": 0.0,
    _PREDICTION_LAYERS: 0,
    _ATTENTION_FACTOR: 1.0,
}
"""Keys of features that are not implemented, and the value at which the feature has no effect."""


def read_gguf_config(file: GGUFFile) -> ModelConfig:
    """Return the config of a file's model.

    Raises:
        UnsupportedModel: an architecture, or one of its settings, that is not implemented.
        CorruptCheckpoint: a key that is absent, of the wrong kind, or contradicts another.
    """
    metadata, architecture = file.metadata, gguf_architecture(file.metadata)
    prefix, traits = metadata.text("general.architecture"), ARCHITECTURE_TRAITS[architecture.name]
    has_factors = any(name in file.tensors for name in ROPE_FACTORS.values())
    _refuse_unsupported(metadata, prefix, architecture, (_ATTENTION_FACTOR,) if has_factors else ())
    num_layers = metadata.count(f"{prefix}.block_count", most=MAX_LAYERS)  # checked before lists are built
    num_predicting = metadata.count(f"{prefix}.{_PREDICTION_LAYERS}", 0, least=0, most=num_layers - 1)
    num_layers -= num_predicting
    num_heads = metadata.count(f"{prefix}.attention.head_count")
    hidden_size = metadata.count(f"{prefix}.embedding_length")
    head_dim, rotated = _head_sizes(
        metadata, prefix, hidden_size // num_heads, has_partial_rotary=traits.has_partial_rotary
    )
    has_biases = "blk.0.ffn_down.bias" in file.tensors
    given: dict[str, Any] = {
        "architectures": [architecture.name],
        "num_hidden_layers": num_layers,
        "hidden_size": hidden_size,
        "intermediate_size": _common_number(metadata, f"{prefix}.feed_forward_length"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _common_number(metadata, f"{prefix}.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "vocab_size": _tensor(file, "token_embd.weight").shape[0],
        "max_position_embeddings": metadata.count(f"{prefix}.context_length"),
        traits.epsilon_key: metadata.number(f"{prefix}.attention.{_EPSILONS[traits.norm]}"),
        "rope_parameters": _rope(file, prefix, architecture),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": any(f"blk.0.attn_{part}.bias" in file.tensors for part in ("q", "qkv")),
        "attention_out_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": has_biases,
        "dtype": _dtype(file),
        "num_nextn_predict_layers": num_predicting,
    }
    if traits.bias_key is not None:
        given[traits.bias_key] = has_biases
    if traits.qk_norm_key is not None:
        given[traits.qk_norm_key] = "blk.0.attn_q_norm.weight" in file.tensors
    if traits.has_partial_rotary:
        given["partial_rotary_factor"] = rotary_share(rotated, head_dim)
    original = given["rope_parameters"].get("original_max_position_embeddings")
    if original is not None:
        given["original_max_position_embeddings"] = original
    given |= {
        name: _factor(metadata, f"{prefix}.{key}", architecture, key, head_dim)
        for key, name in architecture.numbers.items()
    }
    if architecture.has_lists and given["rope_parameters"]["rope_type"] != "default":
        kind = given["rope_parameters"]["rope_type"]
        raise UnsupportedModel(
            f"{metadata.file_name}: rope scaling ({kind}) is not implemented for {prefix!r}; known: none."
        )
    if architecture.derived is not None:
        given |= architecture.derived(file, prefix)
    given |= _window(metadata, prefix, architecture, given) | _gemma_fields(metadata, prefix, given)
    given |= _experts(metadata, prefix, architecture)
    try:
        config = ModelConfig.from_hf(given)
    except (CorruptCheckpoint, UnsupportedModel) as error:
        told = in_own_keys(str(error), prefix, ARCHITECTURE_TRAITS[given["architectures"][0]], architecture.numbers)
        remedy = " Convert the model again." if isinstance(error, CorruptCheckpoint) else ""
        raise type(error)(f"{file.path}: {told}{remedy}") from error
    if architecture.sections_rotate_halves and _has_sections(metadata, f"{prefix}.rope.dimension_sections"):
        config = config.with_ropes(lambda rope: replace(rope, is_interleaved=False))
    if architecture.rotation_key and not metadata.flag(f"{prefix}.{architecture.rotation_key}", default=True):
        return replace(config, layers=tuple(replace(layer, rope=None) for layer in config.layers))
    return config if architecture.has_lists else _with_stored_frequencies(config, file)


def _sparse(architecture: GGUFArchitecture) -> str | None:
    """Return the architecture of a file with experts; None: it is not implemented."""
    own = architecture.name if ARCHITECTURE_TRAITS[architecture.name].experts is not None else None
    return architecture.sparse or own


def _experts(metadata: Metadata, prefix: str, architecture: GGUFArchitecture) -> dict[str, Any]:
    """Return a file's settings of experts as fields of its architecture's config.json; empty if there are none."""
    key, name = f"{prefix}.expert_count", _sparse(architecture)
    num_experts = metadata.count(key, 0, least=0, most=MAX_EXPERTS)
    if name is None:
        return {}
    traits = ARCHITECTURE_TRAITS[name].experts
    assert traits is not None, name
    if not num_experts:
        if name == architecture.name and traits.switch_key is None:
            raise CorruptCheckpoint(
                f"{metadata.file_name}: {key} is {'0' if key in metadata else 'missing'}; models of this architecture "
                f"have experts, 1 to {MAX_EXPERTS} in a layer. Convert the model again."
            )
        return {}
    inner = _common_number(metadata, f"{prefix}.feed_forward_length", 0, least=0)
    size = metadata.count(f"{prefix}.expert_feed_forward_length", inner)
    gating = metadata.count(f"{prefix}.expert_gating_func", 0, least=0)
    known = (_GATINGS[traits.scores], *architecture.gatings)
    if gating not in (0, *known):
        raise UnsupportedModel(
            f"{metadata.file_name}: {prefix}.expert_gating_func={gating} is not implemented for {prefix!r}; known: "
            f"{', '.join(map(str, known))}."
        )
    _refuse_unread(metadata, prefix, traits)
    num_dense = metadata.count(f"{prefix}.leading_dense_block_count", 0, least=0)
    return {
        "architectures": [name],
        traits.num_experts_key: num_experts,
        **({} if traits.switch_key is None else {traits.switch_key: True}),
        traits.chosen_key: metadata.count(f"{prefix}.expert_used_count"),
        "intermediate_size": inner or size,
        traits.size_key: size,
        "shared_expert_intermediate_size": metadata.count(f"{prefix}.expert_shared_feed_forward_length", inner or size),
        traits.shared_key: metadata.count(f"{prefix}.expert_shared_count", 0, least=0),
        "routed_scaling_factor": metadata.number(f"{prefix}.expert_weights_scale", 0.0) or 1.0,
        "norm_topk_prob": metadata.flag(f"{prefix}.expert_weights_norm", default=architecture.renormalizes),
        "n_group": metadata.count(f"{prefix}.expert_group_count", 1),
        "topk_group": metadata.count(f"{prefix}.expert_group_used_count", 1),
        "first_k_dense_replace": num_dense,
        "moe_layer_start_index": num_dense,
        "moe_layer_interval": metadata.count(f"{prefix}.interleave_moe_layer_step", 1),
    }


def _refuse_unread(metadata: Metadata, prefix: str, traits: ExpertTraits) -> None:
    """Raise UnsupportedModel if a file sets groups, factors or raw scores, which its architecture does not have."""
    usual: dict[str, tuple[float | bool, ...]] = {}
    if not traits.reads_groups:
        usual = {"expert_group_count": (0, 1), "expert_group_used_count": (0, 1), "expert_weights_scale": (0, 1)}
    if not traits.reads_renormalization:
        usual["expert_weights_norm"] = (True,)
    for name, known in usual.items():
        key = f"{prefix}.{name}"
        if key in metadata and metadata.number_or_flag(key) not in known:
            raise UnsupportedModel(
                f"{metadata.file_name}: {key}={shown(metadata.number_or_flag(key))} is not implemented for "
                f"{prefix!r}; known: {' and '.join(map(shown, known))}."
            )


_GATINGS = {"softmax": 1, "sigmoid": 2}
"""llama.cpp's numbers of gating functions; 0 means the architecture's own.

3 is a softmax over the chosen experts, which equals a softmax over all whose weights are divided by their sum.
"""


def _has_sections(metadata: Metadata, key: str) -> bool:
    """Return whether positions have sections (time, height, width); those of text are the same in all."""
    return key in metadata and all(size > 0 for size in metadata.whole_numbers(key)[:2])


def _common_number(metadata: Metadata, key: str, default: int | None = None, *, least: int = 1) -> int:
    """Return a number common to all layers; of a list the first, if the architecture reads the rest separately."""
    if key not in metadata or not metadata.is_list(key):
        return metadata.count(key, default, least=least)
    found = metadata.whole_numbers(key)
    if not found or (len(set(found)) > 1 and not gguf_architecture(metadata).has_lists):
        raise metadata.refuse(key, "one number for all layers")
    return found[0]


_EPSILONS: Mapping[NormKind, str] = {
    "rms": "layer_norm_rms_epsilon",
    "layer": "layer_norm_epsilon",
    "layer_bias": "layer_norm_epsilon",
}
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27B model, whose scores are scaled by hidden_size / heads, not by head size; no key says so."""


def _gemma_fields(metadata: Metadata, prefix: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return Gemma's settings that llama.cpp knows without a key, and its score caps."""
    if not prefix.startswith("gemma"):
        return {}
    is_27b = given["num_hidden_layers"] == _LAYERS_OF_27B.get(prefix)
    theta_of_windows = metadata.number(f"{prefix}.rope.freq_base_swa", 10_000.0)
    found: dict[str, Any] = {
        "query_pre_attn_scalar": given["hidden_size"] // given["num_attention_heads"] if is_27b else given["head_dim"],
        "rope_local_base_freq": theta_of_windows,
    }
    for name, default in _CAPS_OF_GEMMA2.items():
        found[name] = metadata.number(f"{prefix}.{name}", default if prefix == "gemma2" else 0.0) or None
    return found


_CAPS_OF_GEMMA2 = {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0}


def _factor(metadata: Metadata, key: str, architecture: GGUFArchitecture, name: str, head_dim: int) -> float:
    """Return a factor, or its usual value if the file has 0 or no key."""
    usual = head_dim**-0.5 if name == "attention.scale" else 1.0
    return metadata.number(key, None if name in architecture.needed else 0.0) or usual


def _refuse_unsupported(
    metadata: Metadata, prefix: str, architecture: GGUFArchitecture, also_read: tuple[str, ...]
) -> None:
    read = {*architecture.numbers, *also_read, *(_YARN_FACTORS if architecture.reads_yarn_factors else ())}
    read |= {"expert_count"} if _sparse(architecture) else set()
    read |= {_PREDICTION_LAYERS} if architecture.has_prediction_layers else set()
    for name, neutral in (_NEUTRAL | architecture.other).items():
        if name in read:
            continue
        key = f"{prefix}.{name}"
        if key in metadata and metadata.number_or_flag(key) != neutral:
            value = metadata.number_or_flag(key)
            value = float(f"{value:g}") if isinstance(value, float) else value  # without float32's digits
            raise UnsupportedModel(
                f"{metadata.file_name}: {key}={shown(value)} is not implemented; known: {shown(neutral)}."
            )


def _head_sizes(metadata: Metadata, prefix: str, default: int, *, has_partial_rotary: bool) -> tuple[int, int]:
    """Return the size of a head, and how many of its numbers are rotated."""
    head_dim = metadata.count(f"{prefix}.attention.key_length", default)
    of_values = metadata.count(f"{prefix}.attention.value_length", head_dim)
    rotated = metadata.count(f"{prefix}.rope.dimension_count", head_dim)
    if of_values != head_dim:
        key, value = "attention.value_length", of_values
    elif rotated != head_dim and not (has_partial_rotary and rotated < head_dim):
        key, value = "rope.dimension_count", rotated
    else:
        _check_heads_of_windows(metadata, prefix, head_dim, rotated)
        return head_dim, rotated
    raise UnsupportedModel(
        f"{metadata.file_name}: {prefix}.{key}={value} is not implemented; known: the size of a head ({head_dim})."
    )


def _check_heads_of_windows(metadata: Metadata, prefix: str, head_dim: int, rotated: int) -> None:
    """Raise if heads of window layers differ from the others; Gemma 4's have their own size and rotate fully."""
    if prefix == "gemma4":
        head_dim = rotated = metadata.count(f"{prefix}.attention.key_length_swa")
    known = {"attention.key_length": head_dim, "attention.value_length": head_dim, "rope.dimension_count": rotated}
    for name, size in known.items():
        key = f"{prefix}.{name}_swa"
        value = metadata.count(key, size)
        if value != size:
            raise UnsupportedModel(f"{metadata.file_name}: {key}={value} is not implemented; known: {size}.")


def _rope(file: GGUFFile, prefix: str, architecture: GGUFArchitecture) -> dict[str, Any]:
    """Return the rope parameters; llama.cpp's default type is 'linear' with a factor of 1, which is no scaling."""
    metadata = file.metadata
    theta = metadata.number(f"{prefix}.rope.freq_base", 10_000.0)
    kind = metadata.text(f"{prefix}.rope.scaling.type", "linear")
    factor = metadata.number(f"{prefix}.rope.scaling.factor", metadata.number(f"{prefix}.rope.scale_linear", 1.0))
    has_factors = any(name in file.tensors for name in ROPE_FACTORS.values())
    if has_factors:
        if kind == "yarn" or (kind == "linear" and factor not in (0.0, 1.0)):
            raise UnsupportedModel(
                f"{metadata.file_name}: {prefix}.rope.scaling.type {shown(kind)} with a factor of {factor:g} is not "
                f"implemented beside the tensors {' and '.join(ROPE_FACTORS.values())}; known: longrope."
            )
        kind = "longrope"
    elif kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return {"rope_type": "default", "rope_theta": theta}
    known = ("linear", "yarn", "longrope") if has_factors else ("linear", "yarn")
    if kind not in known:
        raise UnsupportedModel(
            f"{metadata.file_name}: {prefix}.rope.scaling.type {shown(kind)} is not implemented; known: none, linear, "
            f"yarn, and longrope with the tensors {' and '.join(ROPE_FACTORS.values())}."
        )
    found: dict[str, Any] = {"rope_type": kind, "rope_theta": theta}
    if kind == "linear":
        return found | {"factor": factor}
    found["original_max_position_embeddings"] = metadata.count(
        f"{prefix}.rope.scaling.original_context_length", metadata.count(f"{prefix}.context_length")
    )
    if kind == "longrope":
        found["attention_factor"] = metadata.number(f"{prefix}.{_ATTENTION_FACTOR}", 1.0)
        return found | {name: _numbers(file, stored).tolist() for name, stored in ROPE_FACTORS.items()}
    return found | {"factor": factor} | _yarn(metadata, prefix, architecture)


def _yarn(metadata: Metadata, prefix: str, architecture: GGUFArchitecture) -> dict[str, Any]:
    """Return YaRN's parameters other than the factor."""
    scaling = f"{prefix}.rope.scaling.yarn"
    names = {"beta_fast": f"{scaling}_beta_fast", "beta_slow": f"{scaling}_beta_slow"}
    found = {name: metadata.number(key) for name, key in names.items() if key in metadata}
    # llama.cpp's default is 1
    attention = metadata.number(f"{scaling}_attn_factor", 1.0)
    if attention != 1.0:
        found["attention_factor"] = attention
    if not architecture.truncates_yarn:
        found["truncate"] = False
    if architecture.reads_yarn_factors:
        found["mscale"] = 1.0
        found["mscale_all_dim"] = metadata.number(f"{scaling}_log_multiplier", 0.0)
        found["llama_4_scaling_beta"] = metadata.number(f"{prefix}.attention.temperature_scale", 0.0)
    return found


def _window(
    metadata: Metadata, prefix: str, architecture: GGUFArchitecture, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the sliding window and the layers that have it: all, or those given by the architecture or the file."""
    key = f"{prefix}.attention.sliding_window"
    window = metadata.count(key, architecture.window_of.get(given["num_hidden_layers"], architecture.window), least=0)
    if window == 0:
        return {"sliding_window": None, "layer_types": ["full_attention"] * given["num_hidden_layers"]}
    every = None if architecture.windowed is None else ARCHITECTURE_TRAITS[architecture.windowed].window_every
    if architecture.windowed is None or (every is None and f"{key}_pattern" in metadata):
        one = ", ".join(name for name, kind in GGUF_ARCHITECTURES.items() if kind.windowed and not _every(kind))
        some = ", ".join(name for name, kind in GGUF_ARCHITECTURES.items() if _every(kind))
        raise UnsupportedModel(
            f"{metadata.file_name}: {key}={shown(window)} is not implemented for {shown(prefix)}; known: 0, one window "
            f"for all layers of {one}, and windows in some layers of {some}."
        )
    found: dict[str, Any] = {"architectures": [architecture.windowed], "sliding_window": window}
    if every is not None:
        has_window = _layers_with_window(metadata, f"{key}_pattern", every, given["num_hidden_layers"])
        found["layer_types"] = ["sliding_attention" if has else "full_attention" for has in has_window]
    return found


def _every(architecture: GGUFArchitecture) -> int | None:
    return None if architecture.windowed is None else ARCHITECTURE_TRAITS[architecture.windowed].window_every


def _layers_with_window(metadata: Metadata, key: str, every: int, num_layers: int) -> list[bool]:
    """Return for each layer whether it has a window.

    The pattern is a flag for each layer, or the distance between two layers without a window.

    Raises:
        CorruptCheckpoint: the list has another length.
    """
    if not metadata.is_list(key):
        every = metadata.count(key, every)
        return [(layer_id + 1) % every != 0 for layer_id in range(num_layers)]
    pattern = metadata.flags(key)
    if len(pattern) != num_layers:
        raise metadata.refuse(key, f"a boolean for each of the {num_layers} layers")
    return pattern


def _dtype(file: GGUFFile) -> str:
    """Return the type of activations that suits the matrices: their own if they are floats, otherwise bfloat16."""
    sizes: dict[str, int] = {}
    for tensor in file.tensors.values():
        if len(tensor.shape) > 1:
            kind = "quantized" if tensor.type.is_quantized else tensor.type.name
            sizes[kind] = sizes.get(kind, 0) + tensor.nbytes
    of_type = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "quantized": "bfloat16"}
    return of_type["quantized" if "quantized" in sizes else max(sizes, default="F32", key=lambda kind: sizes[kind])]


def _with_stored_frequencies(config: ModelConfig, file: GGUFFile) -> ModelConfig:
    if ROPE_FREQS not in file.tensors or not config.ropes:
        return config
    divisors = _numbers(file, ROPE_FREQS)
    rope, head_dim = config.ropes[0]
    num_pairs = (rope.rotary_dim or head_dim) // 2
    if divisors.shape != (num_pairs,):
        raise CorruptCheckpoint(
            f"{file.path}: {ROPE_FREQS} is F32 {list(divisors.shape)}; it must be F32 [{num_pairs}], one number per "
            "pair of a head."
        )
    return config.with_ropes(lambda rope: replace(rope, frequency_divisors=tuple(divisors.tolist())))


def _numbers(file: GGUFFile, name: str) -> npt.NDArray[np.float32]:
    """Return the divisors of rotary frequencies in a tensor."""
    tensor = _tensor(file, name)
    if tensor.type.name != "F32" or len(tensor.shape) != 1:
        raise CorruptCheckpoint(f"{file.path}: {name} is {tensor.type.name} {list(tensor.shape)}; it must be F32 [n].")
    divisors = tensor.data.view(np.float32)
    if not (np.isfinite(divisors) & (divisors > 0)).all():
        raise CorruptCheckpoint(f"{file.path}: {name} must hold numbers above 0. Download it again.")
    return divisors


def _tensor(file: GGUFFile, name: str) -> StoredTensor:
    if name not in file.tensors:
        raise CorruptCheckpoint(f"{file.path}: tensor {name} is missing. Download it again.")
    return file.tensors[name]

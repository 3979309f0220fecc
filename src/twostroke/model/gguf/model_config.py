"""A GGUF file's metadata as a ModelConfig.

The keys are those of ggml's docs/gguf.md and llama.cpp's conversion scripts. They are brought into the words of a
config.json, whose reader checks them further; where llama.cpp has a default for an absent key it is the same here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from twostroke.config.model import ARCHITECTURE_TRAITS, ModelConfig
from twostroke.errors import CorruptCheckpoint, UnsupportedModel
from twostroke.gguf.container import GGUFFile, StoredTensor
from twostroke.gguf.metadata import Metadata

ROPE_FREQS = "rope_freqs.weight"
"""What each pair's rotary frequency is divided by: Llama 3's stretching, worked out when the file was made."""


@dataclass(frozen=True, slots=True)
class GGUFArchitecture:
    """What llama.cpp calls an architecture, in ours."""

    name: str
    """As config.json lists it under `architectures`."""
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    """Of modules that are called otherwise than elsewhere; see `weight_map.gguf_name`."""
    has_permuted_heads: bool = False
    """q and k come with the two halves of each head's rows interleaved, for llama.cpp's rotation of neighbours."""
    has_whole_norms: bool = False
    """Weights of norms are stored with the 1 that checkpoints of Gemma leave out."""


_NORMS_BEHIND = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}

_NORMS_AROUND = {**_NORMS_BEHIND, "pre_feedforward_layernorm": "ffn_norm"}

GGUF_ARCHITECTURES = {
    "llama": GGUFArchitecture("LlamaForCausalLM", has_permuted_heads=True),
    "olmo2": GGUFArchitecture("Olmo2ForCausalLM", _NORMS_BEHIND),
    "exaone4": GGUFArchitecture("Exaone4ForCausalLM", _NORMS_BEHIND),
    "gemma": GGUFArchitecture("GemmaForCausalLM", has_whole_norms=True),
    "gemma2": GGUFArchitecture("Gemma2ForCausalLM", _NORMS_AROUND, has_whole_norms=True),
    "gemma3": GGUFArchitecture("Gemma3ForCausalLM", _NORMS_AROUND, has_whole_norms=True),
    "granite": GGUFArchitecture("GraniteForCausalLM", has_permuted_heads=True),
    "smollm3": GGUFArchitecture("SmolLM3ForCausalLM", has_permuted_heads=True),
    "qwen2": GGUFArchitecture("Qwen2ForCausalLM"),
    "qwen3": GGUFArchitecture("Qwen3ForCausalLM"),
}
"""By `general.architecture`; Mistral's models are 'llama' there."""

_NEUTRAL: dict[str, int | float | bool] = {
    "expert_count": 0,
    "attention.causal": True,
    "attention.scale": 0.0,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "logit_scale": 1.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
}
"""Keys that change what is computed in a way that is not implemented, and the value at which they do not."""


def gguf_architecture(metadata: Metadata) -> GGUFArchitecture:
    """The architecture of a file.

    Raises:
        UnsupportedModel: one that is not implemented.
        CorruptCheckpoint: none is named.
    """
    name = metadata.text("general.architecture")
    if name not in GGUF_ARCHITECTURES:
        known = ", ".join(GGUF_ARCHITECTURES)
        raise UnsupportedModel(
            f"{metadata.file_name}: general.architecture {name!r} is not implemented; known: {known}."
        )
    return GGUF_ARCHITECTURES[name]


def read_gguf_config(file: GGUFFile) -> ModelConfig:
    """The shape of a file's model.

    Raises:
        UnsupportedModel: an architecture, or a setting of it, that is not implemented.
        CorruptCheckpoint: a key that is absent, of the wrong kind, or contradicts another.
    """
    metadata, architecture = file.metadata, gguf_architecture(file.metadata)
    prefix = metadata.text("general.architecture")
    _refuse_unsupported(metadata, prefix)
    num_heads = metadata.count(f"{prefix}.attention.head_count")
    hidden_size = metadata.count(f"{prefix}.embedding_length")
    head_dim = _head_dim(metadata, prefix, hidden_size // num_heads)
    given: dict[str, Any] = {
        "architectures": [architecture.name],
        "num_hidden_layers": metadata.count(f"{prefix}.block_count"),
        "hidden_size": hidden_size,
        "intermediate_size": metadata.count(f"{prefix}.feed_forward_length"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.count(f"{prefix}.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "vocab_size": _tensor(file, "token_embd.weight").shape[0],
        "max_position_embeddings": metadata.count(f"{prefix}.context_length"),
        "rms_norm_eps": metadata.number(f"{prefix}.attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.number(f"{prefix}.rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(metadata, prefix),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "attention_out_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
        "dtype": _dtype(file),
    }
    given |= _window(metadata, prefix, given) | _multipliers(metadata, prefix) | _of_gemma(metadata, prefix, given)
    try:
        config = ModelConfig.from_hf(given)
    except CorruptCheckpoint as error:
        raise CorruptCheckpoint(f"{file.path}, its metadata in the words of a config.json: {error}") from error
    return _with_stored_frequencies(config, file)


_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
"""Of the model whose scores are scaled by hidden_size / heads instead of a head's size; no key says so."""


def _of_gemma(metadata: Metadata, prefix: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """What llama.cpp knows of Gemma without a key, and its caps."""
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

_MULTIPLIERS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
"""Granite's keys, in the words of its config.json."""


def _multipliers(metadata: Metadata, prefix: str) -> dict[str, Any]:
    if prefix != "granite":
        return {}
    return {name: metadata.number(f"{prefix}.{key}", 1.0) for key, name in _MULTIPLIERS.items()}


def _refuse_unsupported(metadata: Metadata, prefix: str) -> None:
    read = _MULTIPLIERS if prefix == "granite" else {}
    for name, neutral in _NEUTRAL.items():
        if name in read:
            continue
        key = f"{prefix}.{name}"
        if key in metadata and metadata.number_or_flag(key) != neutral:
            value = metadata.number_or_flag(key)
            raise UnsupportedModel(f"{metadata.file_name}: {key}={value} is not implemented; known: {neutral}.")


def _head_dim(metadata: Metadata, prefix: str, default: int) -> int:
    head_dim = metadata.count(f"{prefix}.attention.key_length", default)
    for key in ("attention.value_length", "rope.dimension_count"):
        found = metadata.count(f"{prefix}.{key}", head_dim)
        if found != head_dim:
            raise UnsupportedModel(
                f"{metadata.file_name}: {prefix}.{key}={found} is not implemented; known: the size of a head "
                f"({head_dim})."
            )
    return head_dim


def _rope_scaling(metadata: Metadata, prefix: str) -> dict[str, Any] | None:
    """llama.cpp's default type is 'linear' with a factor of 1, which is no scaling."""
    kind = metadata.text(f"{prefix}.rope.scaling.type", "linear")
    factor = metadata.number(f"{prefix}.rope.scaling.factor", metadata.number(f"{prefix}.rope.scale_linear", 1.0))
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return None
    if kind not in ("linear", "yarn"):
        raise UnsupportedModel(
            f"{metadata.file_name}: {prefix}.rope.scaling.type {kind!r} is not implemented; known: none, linear, yarn."
        )
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        original = f"{prefix}.rope.scaling.original_context_length"
        scaling["original_max_position_embeddings"] = metadata.count(original)
        for name in ("beta_fast", "beta_slow"):
            if f"{prefix}.rope.scaling.yarn_{name}" in metadata:
                scaling[name] = metadata.number(f"{prefix}.rope.scaling.yarn_{name}")
    return scaling


_WITH_WINDOWS = {
    "llama": "MistralForCausalLM",
    "olmo2": "Olmo3ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
"""By `general.architecture`: the model of a file with a sliding window."""
_WINDOW_OF_GEMMA2 = 4096


def _window(metadata: Metadata, prefix: str, given: dict[str, Any]) -> dict[str, Any]:
    """A sliding window: in every layer of 'llama'; in the others every n-th layer has none."""
    key = f"{prefix}.attention.sliding_window"
    window = metadata.count(key, _WINDOW_OF_GEMMA2 if prefix == "gemma2" else 0, least=0)
    if window == 0:
        return {"sliding_window": None}
    every = ARCHITECTURE_TRAITS[_WITH_WINDOWS[prefix]].window_every if prefix in _WITH_WINDOWS else None
    if prefix not in _WITH_WINDOWS or (every is None and f"{key}_pattern" in metadata):
        others = ", ".join(name for name in _WITH_WINDOWS if name != "llama")
        raise UnsupportedModel(
            f"{metadata.file_name}: {key}={window} is not implemented for {prefix!r}; known: 0, for 'llama' one window "
            f"for all layers, and windows in some layers for {others}."
        )
    if every is not None and f"{key}_pattern" in metadata:
        _check_pattern(metadata, f"{key}_pattern", every, given["num_hidden_layers"])
    return {
        "architectures": [_WITH_WINDOWS[prefix]],
        "sliding_window": window,
        "num_key_value_heads": given["num_key_value_heads"],
    }


def _check_pattern(metadata: Metadata, key: str, every: int, num_layers: int) -> None:
    """A pattern is a number, or says of each layer whether it has a window."""
    if metadata.is_list(key):
        pattern: object = metadata.flags(key)
        is_known = pattern == [(layer_id + 1) % every != 0 for layer_id in range(num_layers)]
    else:
        pattern = metadata.count(key)
        is_known = pattern == every
    if not is_known:
        raise UnsupportedModel(
            f"{metadata.file_name}: {key}={pattern} is not implemented; known: every {every}th layer has no window."
        )


def _dtype(file: GGUFFile) -> str:
    """Type of the activations that suits the matrices: their own where they are floats, else bfloat16."""
    sizes: dict[str, int] = {}
    for tensor in file.tensors.values():
        if len(tensor.shape) > 1:
            kind = "quantized" if tensor.type.is_quantized else tensor.type.name
            sizes[kind] = sizes.get(kind, 0) + tensor.data.nbytes
    of_type = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "quantized": "bfloat16"}
    return of_type["quantized" if "quantized" in sizes else max(sizes, default="F32", key=lambda kind: sizes[kind])]


def _with_stored_frequencies(config: ModelConfig, file: GGUFFile) -> ModelConfig:
    if ROPE_FREQS not in file.tensors:
        return config
    tensor = _tensor(file, ROPE_FREQS)
    num_pairs = config.layers[0].kv.head_dim // 2
    if tensor.type.name != "F32" or tensor.shape != (num_pairs,):
        raise CorruptCheckpoint(
            f"{file.path}: {ROPE_FREQS} is {tensor.type.name} {list(tensor.shape)}; it must be F32 "
            f"[{num_pairs}], one for each pair of a head."
        )
    divisors = tensor.data.view(np.float32)
    if not (np.isfinite(divisors) & (divisors > 0)).all():
        raise CorruptCheckpoint(f"{file.path}: {ROPE_FREQS} must hold numbers above 0. Download it again.")
    return config.with_ropes(lambda rope: replace(rope, frequency_divisors=tuple(divisors.tolist())))


def _tensor(file: GGUFFile, name: str) -> StoredTensor:
    if name not in file.tensors:
        raise CorruptCheckpoint(f"{file.path}: tensor {name} is missing. Download it again.")
    return file.tensors[name]

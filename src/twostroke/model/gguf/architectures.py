"""GGUF_ARCHITECTURES: our architectures by llama.cpp's names, and the changes that its conversion makes.

The conversion is llama.cpp's convert_hf_to_gguf.py, the keys are those of ggml's docs/gguf.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from twostroke.config.architectures import ARCHITECTURE_TRAITS
from twostroke.config.nearest import nearest_known
from twostroke.errors import CorruptCheckpoint, UnsupportedModel, shown
from twostroke.gguf.container import GGUFFile
from twostroke.gguf.metadata import Metadata
from twostroke.model.gguf.names import ModuleNames


@dataclass(frozen=True, slots=True)
class GGUFArchitecture:
    """Our architecture for one of llama.cpp's, and the differences of its files from checkpoints."""

    name: str
    """Name in config.json under `architectures`."""
    names: ModuleNames = field(default_factory=dict[str, str])
    """Modules of a layer with names that deviate from the common table (`names.gguf_names`)."""
    windowed: str | None = None
    """Architecture of a file with a sliding window; None: windows are not supported."""
    sparse: str | None = None
    """Architecture of a file with experts, if it is another one."""
    renormalizes: bool = True
    """Whether weights of experts are divided by their sum if the file does not say so."""
    has_prediction_layers: bool = False
    """Whether the number of layers includes those for multi-token prediction."""
    window: int | None = 0
    """Window of a file that gives none; 0: no window, None: the file must give it."""
    window_of: Mapping[int, int] = field(default_factory=dict[int, int])
    """Window by number of layers, if the architecture's window depends on it; overrides `window`."""
    rotation_key: str | None = None
    """Key (without the prefix) that is false in files of models without rotary embedding."""
    has_permuted_heads: bool = False
    """Whether q and k have the two halves of each head's rows interleaved, for llama.cpp's rotation of neighbours."""
    has_grouped_qkv: bool = False
    """Whether checkpoints group q, k and v by KV head in one tensor, while files have all of q, then k, then v."""
    sections_rotate_halves: bool = False
    """Whether files with sections of positions (GLM 4.1V) store q and k for rotation of a head's halves."""
    norms_include_one: bool = False
    """Whether weights of norms are stored including the 1 that checkpoints leave out."""
    numbers: Mapping[str, str] = field(default_factory=dict[str, str])
    """Own keys (without the prefix) to fields of config.json; an absent factor, or 0, means the usual value."""
    other: dict[str, int | float | bool] = field(default_factory=dict[str, int | float | bool])
    """Keys (without the prefix) whose implemented value differs from that of other architectures."""
    needed: frozenset[str] = frozenset()
    """Keys of `numbers` that a file must have."""
    lists: Mapping[str, str] = field(default_factory=dict[str, str])
    """Single-number tensors by their names in a layer: the key (with the prefix) that lists them for all layers."""
    reads_yarn_factors: bool = False
    """Whether `yarn_log_multiplier` scales the attention, and `attention.temperature_scale` the queries by position."""
    truncates_yarn: bool = True
    """Whether YaRN rounds its correction range to whole pairs; no key says so."""
    gatings: tuple[int, ...] = ()
    """Accepted values of `expert_gating_func` beside that of the architecture's scores."""
    has_lists: bool = False
    """Whether some numbers, and the divisors of rotary frequencies, are lists by layer, which `derived` reads."""
    derived: Callable[[GGUFFile, str], dict[str, Any]] | None = None
    """Function of the file and the prefix of its keys that returns further fields of config.json."""


def _stablelm_fields(file: GGUFFile, prefix: str) -> dict[str, Any]:
    """Return the field for parallel attention and MLP, which share one norm."""
    del prefix
    return {"use_parallel_residual": "blk.0.ffn_norm.weight" not in file.tensors}


def _gpt_neox_fields(file: GGUFFile, prefix: str) -> dict[str, Any]:
    return {"use_parallel_residual": file.metadata.flag(f"{prefix}.use_parallel_residual", default=True)}


def _of_falcon(file: GGUFFile, prefix: str) -> dict[str, Any]:
    """Return fields of the newer Falcon architecture; the older one is the same with one norm and one KV head."""
    return {
        "new_decoder_architecture": True,
        "num_kv_heads": file.metadata.count(f"{prefix}.attention.head_count_kv", 1),
        "ffn_hidden_size": file.metadata.count(f"{prefix}.feed_forward_length"),
        "num_ln_in_parallel_attn": 2 if "blk.0.attn_norm_2.weight" in file.tensors else 1,
    }


def _of_gpt2(file: GGUFFile, prefix: str) -> dict[str, Any]:
    return {"n_inner": file.metadata.count(f"{prefix}.feed_forward_length")}


_DIVISORS = "rope_freqs.weight"
_NO_ROTATION_DIVISOR = 1e20
"""Minimum divisor of the rotary frequency of a pair that does not rotate."""


def _gemma4_fields(file: GGUFFile, prefix: str) -> dict[str, Any]:
    """Return Gemma 4's settings for its two kinds of layers.

    Files have lists by layer, or numbers of full layers beside those of window layers.
    """
    metadata, num_layers = file.metadata, file.metadata.count(f"{prefix}.block_count")
    pattern = metadata.flags(f"{prefix}.attention.sliding_window_pattern")
    full = [layer_id for layer_id, has_window in enumerate(pattern[:num_layers]) if not has_window]
    if len(pattern) != num_layers or not full or len(full) == num_layers:
        raise metadata.refuse(
            f"{prefix}.attention.sliding_window_pattern", f"layers of both kinds, {num_layers} in all"
        )
    kv_heads = _by_layer(metadata, f"{prefix}.attention.head_count_kv", num_layers)
    inner = _by_layer(metadata, f"{prefix}.feed_forward_length", num_layers)
    head_dim = metadata.count(f"{prefix}.attention.key_length")
    return {
        "head_dim": metadata.count(f"{prefix}.attention.key_length_swa"),
        "global_head_dim": head_dim,
        "num_key_value_heads": kv_heads[pattern.index(True)],
        "num_global_key_value_heads": kv_heads[full[0]],
        "attention_k_eq_v": f"blk.{full[0]}.attn_v.weight" not in file.tensors,
        "intermediate_size": inner[0],
        "use_double_wide_mlp": inner[-1] == 2 * inner[0],
        "num_kv_shared_layers": metadata.count(f"{prefix}.attention.shared_kv_layers", 0, least=0),
        "hidden_size_per_layer_input": metadata.count(f"{prefix}.embedding_length_per_layer_input", 0, least=0),
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": metadata.number(f"{prefix}.rope.freq_base"),
                "partial_rotary_factor": _rotated_fraction(file, head_dim // 2),
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": metadata.number(f"{prefix}.rope.freq_base_swa", 10_000.0),
            },
        },
    }


def _rotated_fraction(file: GGUFFile, num_pairs: int) -> float:
    """Return the fraction of a full layer's pairs that rotate: the first ones, whose frequencies are divided by 1.

    Raises:
        CorruptCheckpoint: the tensor is missing or has other divisors.
    """
    name = file.metadata.file_name
    stored = file.tensors.get(_DIVISORS)
    if stored is None:
        raise CorruptCheckpoint(f"{name}: tensor {_DIVISORS} is missing. Download it again.")
    divisors = stored.data.view(np.float32) if stored.type.name == "F32" else np.empty(0, np.float32)
    num_rotated = int((divisors == 1.0).sum())
    is_split = (divisors[:num_rotated] == 1.0).all() and (divisors[num_rotated:] >= _NO_ROTATION_DIVISOR).all()
    if len(divisors) != num_pairs or not is_split:
        raise CorruptCheckpoint(
            f"{name}: tensor {_DIVISORS} has to be F32 for {num_pairs} pairs: 1 for the first pairs and "
            f"{_NO_ROTATION_DIVISOR:g} or more for the others. Download it again."
        )
    return math.nextafter(num_rotated / num_pairs, 1.0)  # so that rounding down does not lose a pair


def _by_layer(metadata: Metadata, key: str, num_layers: int) -> Sequence[int]:
    """Return a number for each layer; a file may have one number for all."""
    if not metadata.is_list(key):
        return [metadata.count(key)] * num_layers
    found = metadata.whole_numbers(key)
    if len(found) != num_layers or min(found) < 1:
        raise metadata.refuse(key, f"a number above 0 for each of {num_layers} layers")
    return found


_BETA_OF_XIELU = 0.5


def _apertus_fields(file: GGUFFile, prefix: str) -> dict[str, Any]:
    """Check the factor of the linear term of every xIELU; a file may leave it out."""
    del prefix
    metadata, key = file.metadata, "xielu.beta"
    if key in metadata and set(metadata.numbers(key)) != {_BETA_OF_XIELU}:
        found = sorted(set(metadata.numbers(key)))
        raise UnsupportedModel(f"{metadata.file_name}: {key}={found} is not implemented; known: {_BETA_OF_XIELU}.")
    return {}


_POST_NORMS = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}

_PRE_AND_POST_NORMS = {**_POST_NORMS, "pre_feedforward_layernorm": "ffn_norm"}

_OF_GLM4 = {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"}

_OF_FALCON: ModuleNames = {
    "input_layernorm": ("attn_norm_2", "attn_norm"),
    "post_attention_layernorm": "attn_norm",
}
"""Falcon's norms: the MLP's is stored under the first name, because it existed before attention had its own."""

_OF_GRANITE = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}

_OF_COHERE = {"logit_scale": "logit_scale"}

_OF_BLOOM: dict[str, int | float | bool] = {"attention.max_alibi_bias": 8.0}

_OF_APERTUS = {"mlp.act_fn.alpha_p": "xielu.alpha_p", "mlp.act_fn.alpha_n": "xielu.alpha_n"}

GGUF_ARCHITECTURES = {
    "llama": GGUFArchitecture(
        "LlamaForCausalLM", windowed="MistralForCausalLM", sparse="MixtralForCausalLM", has_permuted_heads=True
    ),
    "mistral3": GGUFArchitecture("Ministral3ForCausalLM", has_permuted_heads=True, reads_yarn_factors=True),
    "olmo2": GGUFArchitecture("Olmo2ForCausalLM", _POST_NORMS, windowed="Olmo3ForCausalLM"),
    "exaone4": GGUFArchitecture("Exaone4ForCausalLM", _POST_NORMS, windowed="Exaone4ForCausalLM", window_of={64: 4096}),
    "gemma": GGUFArchitecture("GemmaForCausalLM", norms_include_one=True),
    "gemma2": GGUFArchitecture(
        "Gemma2ForCausalLM", _PRE_AND_POST_NORMS, windowed="Gemma2ForCausalLM", window=4096, norms_include_one=True
    ),
    "gemma3": GGUFArchitecture(
        "Gemma3ForCausalLM", _PRE_AND_POST_NORMS, windowed="Gemma3ForCausalLM", norms_include_one=True
    ),
    "gemma4": GGUFArchitecture(
        "Gemma4ForCausalLM",
        _PRE_AND_POST_NORMS,
        windowed="Gemma4ForCausalLM",
        window=None,
        has_lists=True,
        derived=_gemma4_fields,
    ),
    "granite": GGUFArchitecture(
        "GraniteForCausalLM", rotation_key="rope.scaling.finetuned", has_permuted_heads=True, numbers=_OF_GRANITE
    ),
    "smollm3": GGUFArchitecture("SmolLM3ForCausalLM", has_permuted_heads=True),
    "seed_oss": GGUFArchitecture("SeedOssForCausalLM", {"post_attention_layernorm": "post_attention_norm"}),
    "qwen2": GGUFArchitecture("Qwen2ForCausalLM"),
    "qwen2vl": GGUFArchitecture("Qwen2ForCausalLM"),
    "qwen3": GGUFArchitecture("Qwen3ForCausalLM"),
    "qwen3vl": GGUFArchitecture("Qwen3ForCausalLM"),
    "phi2": GGUFArchitecture("PhiForCausalLM"),
    "phi3": GGUFArchitecture("Phi3ForCausalLM", windowed="Phi3ForCausalLM"),
    "chatglm": GGUFArchitecture("GlmForCausalLM"),
    "glm4": GGUFArchitecture("Glm4ForCausalLM", _OF_GLM4, sections_rotate_halves=True),
    "command-r": GGUFArchitecture("CohereForCausalLM", numbers=_OF_COHERE, needed=frozenset(_OF_COHERE)),
    "cohere2": GGUFArchitecture(
        "Cohere2ForCausalLM",
        windowed="Cohere2ForCausalLM",
        window=None,
        numbers=_OF_COHERE,
        needed=frozenset(_OF_COHERE),
    ),
    "starcoder2": GGUFArchitecture("Starcoder2ForCausalLM"),
    "stablelm": GGUFArchitecture("StableLmForCausalLM", derived=_stablelm_fields),
    "arcee": GGUFArchitecture("ArceeForCausalLM", has_permuted_heads=True),
    "nemotron": GGUFArchitecture("NemotronForCausalLM", norms_include_one=True),
    "apertus": GGUFArchitecture("ApertusForCausalLM", lists=_OF_APERTUS, derived=_apertus_fields),
    "gptneox": GGUFArchitecture("GPTNeoXForCausalLM", has_grouped_qkv=True, derived=_gpt_neox_fields),
    "falcon": GGUFArchitecture("FalconForCausalLM", _OF_FALCON, has_grouped_qkv=True, derived=_of_falcon),
    "bloom": GGUFArchitecture("BloomForCausalLM", has_grouped_qkv=True, other=_OF_BLOOM),
    "gpt2": GGUFArchitecture("GPT2LMHeadModel", derived=_of_gpt2),
    "qwen2moe": GGUFArchitecture("Qwen2MoeForCausalLM", renormalizes=False),
    "qwen3moe": GGUFArchitecture("Qwen3MoeForCausalLM"),
    "qwen3vlmoe": GGUFArchitecture("Qwen3MoeForCausalLM"),
    "olmoe": GGUFArchitecture("OlmoeForCausalLM", renormalizes=False),
    "granitemoe": GGUFArchitecture("GraniteMoeForCausalLM", has_permuted_heads=True, numbers=_OF_GRANITE),
    "gpt-oss": GGUFArchitecture(
        "GptOssForCausalLM",
        {"post_attention_layernorm": "post_attention_norm"},
        windowed="GptOssForCausalLM",
        window=None,
        truncates_yarn=False,
        gatings=(3,),
    ),
    "glm4moe": GGUFArchitecture(
        "Glm4MoeForCausalLM",
        {"post_attention_layernorm": "post_attention_norm"},
        renormalizes=False,
        has_prediction_layers=True,
    ),
    "minimax-m2": GGUFArchitecture("MiniMaxM2ForCausalLM"),
    "ernie4_5-moe": GGUFArchitecture("Ernie4_5_MoeForCausalLM"),
    "dots1": GGUFArchitecture("Dots1ForCausalLM", renormalizes=False),
    "hunyuan-moe": GGUFArchitecture("HunYuanMoEV1ForCausalLM"),
}
"""Architectures by `general.architecture`; Mistral's models are 'llama', Mistral 3's and Ministral 3's 'mistral3'."""


_NOT_TEXT_MODELS = {
    "clip": "such a file (mmproj) only encodes images for a model; give the model's own file; ",
    **dict.fromkeys(
        ("bert", "modern-bert", "nomic-bert", "jina-bert-v2", "t5encoder"), "such a model makes embeddings, not text; "
    ),
}
"""Explanations for files that hold no text model, by `general.architecture`."""


def gguf_architecture(metadata: Metadata) -> GGUFArchitecture:
    """Return the architecture of a file.

    Raises:
        UnsupportedModel: the architecture is not implemented.
        CorruptCheckpoint: the file names none.
    """
    name = metadata.text("general.architecture")
    if name not in GGUF_ARCHITECTURES:
        known = ", ".join(GGUF_ARCHITECTURES)
        sparse = [kind for kind, one in GGUF_ARCHITECTURES.items() if ARCHITECTURE_TRAITS[one.name].experts is not None]
        plain = metadata.plain(f"{name}.")
        told = _NOT_TEXT_MODELS.get(name) or nearest_known(name, plain, GGUF_ARCHITECTURES, has_experts=sparse)
        raise UnsupportedModel(
            f"{metadata.file_name}: general.architecture {shown(name)} is not implemented; {told}known: {known}."
        )
    return GGUF_ARCHITECTURES[name]


def listed_number(metadata: Metadata, key: str, layer_id: int) -> float:
    """Return one layer's number of a list.

    Raises:
        CorruptCheckpoint: the list is absent, not of numbers, or too short.
    """
    numbers = metadata.numbers(key)
    if layer_id >= len(numbers):
        raise CorruptCheckpoint(f"{metadata.file_name}: {key} has {len(numbers)} numbers; layer {layer_id} has none.")
    return numbers[layer_id]

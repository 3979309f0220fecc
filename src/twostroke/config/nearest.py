"""Help for an unknown architecture: the nearest known one, and the parts in which they differ."""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Iterable, Mapping
from difflib import SequenceMatcher
from typing import Any, cast

from twostroke.config.fields import is_number, read_list
from twostroke.errors import shorten, shown

_ENDINGS = re.compile(r"(For(CausalLM|ConditionalGeneration|TextGeneration)|LMHeadModel)$")
_MIN_SIMILARITY = 0.8
"""Least similarity of names: Mixtral and Mistral have 0.86, OLMoE and OLMo 2 0.8, GPT-2 and GPT-J 0.75."""
_MIN_COMMON = 5
"""Least number of common characters: XGLM and GLM have a similarity of 0.86, but are unrelated."""
_MAX_CHARACTERS = 80
_MOE = re.compile(r"[-_]?(?:Moe|MoE|moe)(?![a-z])")
"""Marks of expert models in names; two names are compared without it if both models have experts."""
_PARTS: Mapping[str, tuple[str, ...]] = {
    "experts": (
        "num_experts",
        "num_local_experts",
        "n_routed_experts",
        "moe_num_experts",
        "num_moe_experts",
        "expert_count",
    ),
    "latent attention": ("kv_lora_rank", "attention.kv_lora_rank"),
    "recurrent layers": (
        "linear_num_value_heads",
        "mamba_d_state",
        "mamba_d_ssm",
        "mamba_n_heads",
        "mamba_num_heads",
        "ssm_state_size",
        "state_size",
        "conv_L_cache",
        "lru_width",
        "ssm.state_size",
        "ssm.conv_kernel",
        "shortconv.l_cache",
        "wkv.head_size",
    ),
    "several residual streams": ("altup_num_inputs", "altup.num_inputs"),
    "residuals of low rank": ("laurel_rank",),
    "an encoder": ("is_encoder_decoder",),
    "cross-attention": ("cross_attention_layers",),
    "block-sparse attention": ("blocksparse_block_size",),
    "layers of unlike shapes": ("block_configs",),
    "images": ("vision_config", "img_processor", "thinker_config", "vision_lora"),
    "sound": ("audio_config",),
}
"""Parts that no known architecture has, by the keys of config.json or, without their prefix, of a GGUF file. A model
has one if one of its keys is neither null nor 0."""
_BY_NAME = {
    "moe": "experts",
    "mamba": "recurrent layers",
    "rwkv": "recurrent layers",
}
"""Parts indicated by a model's name, used if no key confirms or denies them."""
_WRITES_NOTHING = re.compile(r"For(MaskedLM|PreTraining|QuestionAnswering|MultipleChoice|\w*Classification)$")
_BARE = re.compile(r"[a-z0-9]Model$")
_LISTS_OF_LAYERS = ("layer_types", "layers_block_type")
_MAX_KINDS = 4
"""Most unknown layer types that a message lists."""
_LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known architecture whose name is nearest; None if none is near.

    That is one of the same family with the nearest number, or else one with a very similar spelling.

    >>> nearest("Qwen2MoeForCausalLM", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
    'Qwen2ForCausalLM'
    >>> nearest("MixtralForCausalLM", ["MistralForCausalLM"]), nearest("XGLMForCausalLM", ["GlmForCausalLM"])
    ('MistralForCausalLM', None)
    """
    alike = {other: _similarity(_stem(name), _stem(other)) for other in known}
    ending = name.removeprefix(_stem(name))
    best = max(alike, key=lambda other: (alike[other], other.endswith(ending), other), default=None)
    return best if best is not None and any(alike[best]) else None


def nearest_known(
    name: str,
    config: Mapping[str, Any],
    known: Iterable[str],
    *,
    reads_images: Container[str] = (),
    has_experts: Container[str] = (),
) -> str:
    """Return the nearest known architecture and the parts it lacks, for a message; "" if there is nothing to say.

    Args:
        name: of the architecture.
        config: the parsed config.json, or the metadata of a GGUF file without the prefix of their keys.
        known: the names of all known architectures.
        reads_images: known architectures for which images are no difference.
        has_experts: known architectures that have experts.

    >>> nearest_known("qwen3moe", {"expert_count": 128}, ["qwen2", "qwen3"])
    'the nearest is qwen3, without experts (expert_count=128); '
    >>> nearest_known("qwen3next", {"expert_count": 512}, ["qwen3", "qwen3moe"], has_experts=["qwen3moe"])
    'the nearest is qwen3moe; '
    """
    known = [*known]
    wants_experts = any(part.startswith("experts") for part in unknown_parts(name, config))
    sparse = {_MOE.sub("", other): other for other in known if wants_experts and other in has_experts}
    near = sparse.get(nearest(_MOE.sub("", name), sparse) or "") or nearest(name, known)
    parts_of = {"images": reads_images, "experts": has_experts}
    known_parts = {part for part, names in parts_of.items() if (names if near is None else near in names)}
    lacking = unknown_parts(name, config, known_parts)
    parts = " or ".join(lacking)
    if near is None:
        return f"none that is known has {parts}; " if parts else ""
    of_others = "other architectures have experts; " if has_experts and "experts" in parts else ""
    return f"the nearest is {near}, without {parts}; {of_others}" if parts else f"the nearest is {near}; "


def unknown_parts(name: str, config: Mapping[str, Any], known_parts: Collection[str] = ()) -> list[str]:
    """Return the parts of a config that no known architecture has, each with its key.

    Args:
        name: of the architecture.
        config: the parsed config.json.
        known_parts: parts that are no difference.

    >>> unknown_parts("Qwen2MoeForCausalLM", {"num_experts": 60, "kv_lora_rank": None})
    ['experts (num_experts=60)']
    """
    text = config.get("text_config")
    config = {**config, **cast(Mapping[str, Any], text)} if isinstance(text, Mapping) else config
    kinds = {str(kind) for key in _LISTS_OF_LAYERS for kind in read_list(config, key)}
    absent = set(known_parts)
    if kinds and kinds <= _LAYER_TYPES:
        absent.add("recurrent layers")  # a config may still have their sizes
    found: list[str] = []
    for part, keys in _PARTS.items():
        if part in absent:
            continue
        key = next((key for key in keys if config.get(key)), None)
        if key is not None:
            value = config[key]
            found.append(f"{part} ({key}={shown(value)})" if is_number(value) else f"{part} ({key})")
        elif _is_named(part, name) and not any(config.get(key) == 0 for key in keys):
            found.append(part)
    other = sorted(kinds - _LAYER_TYPES)
    return [*found, f"layers of type {shorten(other, _MAX_KINDS)}"] if other else found


def architecture_by_model_type(name: str, kind: object, known: Iterable[str]) -> str | None:
    """Return the known architecture that a `model_type` means, if the config names a different one.

    >>> architecture_by_model_type("LlamaForCausalLM", "qwen2", ["LlamaForCausalLM", "Qwen2ForCausalLM"])
    'Qwen2ForCausalLM'
    """
    if not isinstance(kind, str) or _joined(kind) == _joined(_stem(name)):
        return None
    return next((other for other in known if _joined(_stem(other)) == _joined(kind)), None)


def _joined(text: str) -> str:
    return text.replace("_", "").lower()


def _is_named(part: str, name: str) -> bool:
    return any(known == part and text in name.lower() for text, known in _BY_NAME.items())


def generates_no_text(name: str) -> bool:
    """Return whether a name implies a model without logits: one that classifies, or computes embeddings.

    >>> generates_no_text("LlamaForSequenceClassification"), generates_no_text("GPT2LMHeadModel")
    (True, False)
    """
    return bool(_WRITES_NOTHING.search(name) or (_BARE.search(name) and not _ENDINGS.search(name)))


def _stem(name: str) -> str:
    """Return a name without the common endings, cut after _MAX_CHARACTERS."""
    return _ENDINGS.sub("", name)[:_MAX_CHARACTERS]


def _similarity(stem: str, other: str) -> tuple[int, int, float]:
    """Return how near two stems are, zeros if they are not near.

    The first number is the length of the common family name. The second is the negated distance of the models' numbers.
    The third is the share of characters in common.
    """
    matcher = SequenceMatcher(None, stem.lower(), other.lower(), autojunk=False)
    share, num_common = matcher.ratio(), sum(block.size for block in matcher.get_matching_blocks())
    family = other.rstrip("0123456789")
    rest = stem[len(family) :]
    if stem.startswith(family) and not rest[:1].islower():
        return len(family), -abs(_number(rest) - _number(other[len(family) :])), share
    is_alike = share >= _MIN_SIMILARITY and num_common >= _MIN_COMMON
    return (0, 0, share) if is_alike else (0, 0, 0.0)


def _number(text: str) -> int:
    """Return the number at the start of a string; without one it is the first of its family, 1."""
    digits = re.match(r"\d+", text)
    return int(digits[0]) if digits else 1

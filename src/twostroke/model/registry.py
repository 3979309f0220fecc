"""Table of architectures, by name: model class and tensor names. A model's module is imported on first use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

from twostroke.config.architecture_traits import ArchitectureTraits
from twostroke.config.architectures import ARCHITECTURE_TRAITS
from twostroke.config.model import ModelConfig
from twostroke.errors import UnsupportedModel
from twostroke.model.weight_map import (
    APERTUS,
    ARCEE,
    BLOOM,
    ERNIE4_5_MOE,
    FALCON,
    GEMMA2,
    GEMMA4,
    GLM,
    GLM4,
    GLM4_MOE,
    GPT2,
    GPT_NEOX,
    GPT_OSS,
    GPTJ,
    GRANITE_MOE,
    HUNYUAN_MOE,
    LLAMA,
    MINIMAX_M2,
    MIXTRAL,
    OLMO2,
    OPT,
    PHI,
    PHI3,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    STABLELM,
    STARCODER2,
    NameTable,
    checkpoint_names,
)

if TYPE_CHECKING:
    from twostroke.model.decoder import DecoderModel, Parameter

_MAX_CACHED = 2
"""Models whose parameter tables are cached: the served one and its drafter. Those with experts have up to 100,000."""
ExpertStacks = Literal["rows", "interleaved_columns"]
"""Layout of an expert's matrix in a stack that holds gate and up.

rows: [outputs, inputs], first the rows of gate, then those of up. interleaved_columns: [inputs, outputs] with
alternating columns of both (gpt-oss).
"""


@dataclass(frozen=True, slots=True, eq=False)
class Architecture:
    """Model class, tensor names and checkpoint layout of an architecture."""

    path: str
    """Model class as `module:Class`, a DecoderModel."""
    names: NameTable
    can_split: bool = False
    """Whether its layers support having only some of the heads (Placement.split)."""
    has_transposed_matrices: bool = False
    """Whether float checkpoints store the matrices of layers as [inputs, outputs]."""
    has_norms_by_head: bool = False
    """Whether checkpoints store the weights of q's and k's norms as one tensor per head."""
    expert_stacks: ExpertStacks = "rows"
    """Layout of each expert in float checkpoints that store a layer's experts in one tensor."""
    has_qkv_by_kv_head: bool = False
    """Whether checkpoints store q, k and v as one tensor in which the rows of a KV head are adjacent."""


ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture("twostroke.model.llama:Llama", LLAMA, can_split=True),
    "MistralForCausalLM": Architecture("twostroke.model.llama:Llama", LLAMA, can_split=True),
    "Qwen2ForCausalLM": Architecture("twostroke.model.llama:Llama", LLAMA, can_split=True),
    "MinistralForCausalLM": Architecture("twostroke.model.llama:Llama", LLAMA, can_split=True),
    "SeedOssForCausalLM": Architecture("twostroke.model.llama:Llama", LLAMA, can_split=True),
    "Olmo2ForCausalLM": Architecture("twostroke.model.llama:Llama", OLMO2, can_split=True),
    "Olmo3ForCausalLM": Architecture("twostroke.model.llama:Llama", OLMO2, can_split=True),
    "Exaone4ForCausalLM": Architecture("twostroke.model.llama:Llama", OLMO2, can_split=True),
    "GraniteForCausalLM": Architecture("twostroke.model.llama:Llama", LLAMA, can_split=True),
    "SmolLM3ForCausalLM": Architecture("twostroke.model.llama:Llama", LLAMA, can_split=True),
    "Phi3ForCausalLM": Architecture("twostroke.model.llama:Llama", PHI3, can_split=True),
    "CohereForCausalLM": Architecture("twostroke.model.llama:Llama", QWEN3, can_split=True),
    "Cohere2ForCausalLM": Architecture("twostroke.model.llama:Llama", LLAMA, can_split=True),
    "Starcoder2ForCausalLM": Architecture("twostroke.model.llama:Llama", STARCODER2, can_split=True),
    "Ministral3ForCausalLM": Architecture("twostroke.model.llama:Llama", LLAMA, can_split=True),
    "GlmForCausalLM": Architecture("twostroke.model.llama:Llama", GLM, can_split=True),
    "Glm4ForCausalLM": Architecture("twostroke.model.llama:Llama", GLM4, can_split=True),
    "GemmaForCausalLM": Architecture("twostroke.model.llama:Llama", LLAMA, can_split=True),
    "Gemma2ForCausalLM": Architecture("twostroke.model.llama:Llama", GEMMA2, can_split=True),
    "Gemma3ForCausalLM": Architecture("twostroke.model.llama:Llama", GEMMA2, can_split=True),
    "Gemma4ForCausalLM": Architecture("twostroke.model.gemma4:Gemma4", GEMMA4, can_split=True),
    "Qwen3ForCausalLM": Architecture("twostroke.model.llama:Llama", QWEN3, can_split=True),
    "PhiForCausalLM": Architecture("twostroke.model.llama:Llama", PHI, can_split=True),
    "GPTNeoXForCausalLM": Architecture(
        "twostroke.model.llama:Llama", GPT_NEOX, can_split=True, has_qkv_by_kv_head=True
    ),
    "StableLmForCausalLM": Architecture(
        "twostroke.model.llama:Llama", STABLELM, can_split=True, has_norms_by_head=True
    ),
    "ArceeForCausalLM": Architecture("twostroke.model.llama:Llama", ARCEE, can_split=True),
    "NemotronForCausalLM": Architecture("twostroke.model.llama:Llama", ARCEE, can_split=True),
    "HeliumForCausalLM": Architecture("twostroke.model.llama:Llama", LLAMA, can_split=True),
    "ApertusForCausalLM": Architecture("twostroke.model.apertus:Apertus", APERTUS, can_split=True),
    "FalconForCausalLM": Architecture("twostroke.model.llama:Llama", FALCON, can_split=True, has_qkv_by_kv_head=True),
    "BloomForCausalLM": Architecture("twostroke.model.llama:Llama", BLOOM, can_split=True, has_qkv_by_kv_head=True),
    "GPTJForCausalLM": Architecture("twostroke.model.llama:Llama", GPTJ, can_split=True),
    "OPTForCausalLM": Architecture("twostroke.model.llama:Llama", OPT, can_split=True),
    "GPT2LMHeadModel": Architecture("twostroke.model.llama:Llama", GPT2, can_split=True, has_transposed_matrices=True),
    "MixtralForCausalLM": Architecture("twostroke.model.sparse:Sparse", MIXTRAL, can_split=True),
    "Qwen2MoeForCausalLM": Architecture("twostroke.model.sparse:Sparse", QWEN2_MOE, can_split=True),
    "Qwen3MoeForCausalLM": Architecture("twostroke.model.sparse:Sparse", QWEN3_MOE, can_split=True),
    "OlmoeForCausalLM": Architecture("twostroke.model.sparse:Sparse", QWEN3_MOE, can_split=True),
    "GraniteMoeForCausalLM": Architecture("twostroke.model.sparse:Sparse", GRANITE_MOE, can_split=True),
    "GptOssForCausalLM": Architecture(
        "twostroke.model.sparse:Sparse", GPT_OSS, can_split=True, expert_stacks="interleaved_columns"
    ),
    "Glm4MoeForCausalLM": Architecture("twostroke.model.sparse:Sparse", GLM4_MOE, can_split=True),
    "MiniMaxM2ForCausalLM": Architecture("twostroke.model.sparse:Sparse", MINIMAX_M2, can_split=True),
    "Ernie4_5_MoeForCausalLM": Architecture("twostroke.model.sparse:Sparse", ERNIE4_5_MOE, can_split=True),
    "Dots1ForCausalLM": Architecture("twostroke.model.sparse:Sparse", GLM4_MOE, can_split=True),
    "HunYuanMoEV1ForCausalLM": Architecture("twostroke.model.hunyuan:HunYuan", HUNYUAN_MOE, can_split=True),
}


def register(name: str, architecture: Architecture, traits: ArchitectureTraits) -> None:
    """Add an architecture from outside the package.

    Args:
        name: name in config.json under `architectures`.
        architecture: its model class and tensor names.
        traits: rules for reading its config.json.
    """
    ARCHITECTURES[name] = architecture
    ARCHITECTURE_TRAITS[name] = traits


def architecture(name: str) -> Architecture:
    """Return the architecture of a name.

    Raises:
        UnsupportedModel: the name is unknown; the known ones are listed.
    """
    if name not in ARCHITECTURES:
        raise UnsupportedModel(f"no architecture {name!r}; known: {', '.join(sorted(ARCHITECTURES))}.")
    return ARCHITECTURES[name]


def model_class(name: str) -> type[DecoderModel]:
    """Import and return the model class of an architecture.

    Raises:
        UnsupportedModel: the name is unknown; the known ones are listed.
    """
    module, _, class_name = architecture(name).path.partition(":")
    return getattr(import_module(module), class_name)


def parameters_of(config: ModelConfig) -> Mapping[str, Parameter]:
    """Return every tensor that a model is built from, by our name."""
    return _tables(config, architecture(config.architecture)).parameters


def parts_of(config: ModelConfig) -> Mapping[str, tuple[str, ...]]:
    """Return the names of the checkpoint's tensors that make up each of `parameters_of`."""
    return _tables(config, architecture(config.architecture)).parts


def parameter_multiplicities(config: ModelConfig) -> Mapping[str, int]:
    """Return how many experts a parameter counts for, by name: those of a layer's first expert count for all.

    Parameters of other experts are left out: a model of 128 experts has 60 times as many parameters as distinct
    ones. Other parameters count once.
    """
    return _tables(config, architecture(config.architecture)).counted


class _Tables(NamedTuple):
    parameters: Mapping[str, Parameter]
    parts: Mapping[str, tuple[str, ...]]
    counted: Mapping[str, int]


@lru_cache(maxsize=_MAX_CACHED)
def _tables(config: ModelConfig, entry: Architecture) -> _Tables:
    """Build the parameter tables of a model; cached, because experts are many and plans ask often."""
    parameters = model_class(config.architecture).parameters(config)
    parts = {name: checkpoint_names(entry.names, name) for name in parameters}
    counted = {name: times for name in parameters if (times := _multiplicity(config, name))}
    return _Tables(MappingProxyType(parameters), MappingProxyType(parts), MappingProxyType(counted))


def _multiplicity(config: ModelConfig, name: str) -> int:
    """Return how many parameters one counts for; 0 for an expert other than its layer's first."""
    if not is_of_expert(name):
        return 1
    layer, is_first, _ = name.partition(".experts.0.")
    experts = config.layers[int(layer.removeprefix("layers."))].experts if is_first else None
    return 0 if experts is None else experts.num_experts


def num_parameters(config: ModelConfig) -> int:
    """Return the number of weights in a model without opening a file; a tied head is not counted again."""
    parameters = parameters_of(config)
    return sum(times * parameters[name].size for name, times in parameter_multiplicities(config).items())


def is_of_expert(name: str) -> bool:
    """Return whether a parameter belongs to a routed expert: `layers.3.experts.17.down.weight`."""
    return ".experts." in name


def num_active_parameters(config: ModelConfig) -> int:
    """Return the number of weights that are read for one token.

    These are all except the experts not chosen for it, and the other rows of tables. A tied embedding table is read as
    the LM head.
    """
    num_idle = 0
    for name, times in parameter_multiplicities(config).items():
        parameter = parameters_of(config)[name]
        if is_of_expert(name):
            experts = config.layers[int(name.split(".")[1])].experts
            assert experts is not None, name
            num_idle += (times - experts.num_chosen) * parameter.size
        elif parameter.is_table or (name == "embedding.weight" and not config.tie_word_embeddings):
            num_idle += parameter.size - (parameter.columns or 1)
    return num_parameters(config) - num_idle

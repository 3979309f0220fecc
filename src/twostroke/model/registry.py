"""Architecture name to its maths and its names; lookup, nothing else. A model's file is imported on first use."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from twostroke.config.architectures import ARCHITECTURE_TRAITS, ArchitectureTraits
from twostroke.config.model import ModelConfig
from twostroke.errors import UnsupportedModel
from twostroke.model.weight_map import GEMMA2, GLM, GLM4, LLAMA, OLMO2, PHI3, QWEN3, STARCODER2, NameTable

if TYPE_CHECKING:
    from twostroke.model.decoder import DecoderModel


@dataclass(frozen=True, slots=True)
class Architecture:
    """Where an architecture is."""

    path: str
    """`module:Class`, a DecoderModel."""
    names: NameTable
    can_split: bool = False
    """Whether its layers know that they may have some of the heads only (Placement.split)."""


ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture("twostroke.model.llama:Llama", LLAMA, can_split=True),
    "MistralForCausalLM": Architecture("twostroke.model.llama:Llama", LLAMA, can_split=True),
    "Qwen2ForCausalLM": Architecture("twostroke.model.llama:Llama", LLAMA, can_split=True),
    "MinistralForCausalLM": Architecture("twostroke.model.llama:Llama", LLAMA, can_split=True),
    "SeedOssForCausalLM": Architecture("twostroke.model.llama:Llama", LLAMA, can_split=True),
    "Olmo2ForCausalLM": Architecture("twostroke.model.llama:Llama", OLMO2),
    "Olmo3ForCausalLM": Architecture("twostroke.model.llama:Llama", OLMO2),
    "Exaone4ForCausalLM": Architecture("twostroke.model.llama:Llama", OLMO2, can_split=True),
    "GraniteForCausalLM": Architecture("twostroke.model.llama:Llama", LLAMA, can_split=True),
    "SmolLM3ForCausalLM": Architecture("twostroke.model.llama:Llama", LLAMA, can_split=True),
    "Phi3ForCausalLM": Architecture("twostroke.model.llama:Llama", PHI3, can_split=True),
    "Cohere2ForCausalLM": Architecture("twostroke.model.llama:Llama", LLAMA, can_split=True),
    "Starcoder2ForCausalLM": Architecture("twostroke.model.llama:Llama", STARCODER2, can_split=True),
    "Ministral3ForCausalLM": Architecture("twostroke.model.llama:Llama", LLAMA, can_split=True),
    "GlmForCausalLM": Architecture("twostroke.model.llama:Llama", GLM, can_split=True),
    "Glm4ForCausalLM": Architecture("twostroke.model.llama:Llama", GLM4, can_split=True),
    "GemmaForCausalLM": Architecture("twostroke.model.llama:Llama", LLAMA, can_split=True),
    "Gemma2ForCausalLM": Architecture("twostroke.model.llama:Llama", GEMMA2, can_split=True),
    "Gemma3ForCausalLM": Architecture("twostroke.model.llama:Llama", GEMMA2, can_split=True),
    "Qwen3ForCausalLM": Architecture("twostroke.model.llama:Llama", QWEN3, can_split=True),
}


def register(name: str, architecture: Architecture, traits: ArchitectureTraits) -> None:
    """Adds an architecture from outside the package.

    Args:
        name: as config.json lists it under `architectures`.
        architecture: its maths and its names.
        traits: how its config.json is read.
    """
    ARCHITECTURES[name] = architecture
    ARCHITECTURE_TRAITS[name] = traits


def architecture(name: str) -> Architecture:
    """Looks an architecture up.

    Raises:
        UnsupportedModel: there is none of that name; the known ones are listed.
    """
    if name not in ARCHITECTURES:
        raise UnsupportedModel(f"no architecture {name!r}; known: {', '.join(sorted(ARCHITECTURES))}.")
    return ARCHITECTURES[name]


def model_class(name: str) -> type[DecoderModel]:
    """Imports the maths of an architecture.

    Raises:
        UnsupportedModel: there is none of that name; the known ones are listed.
    """
    module, _, class_name = architecture(name).path.partition(":")
    return getattr(import_module(module), class_name)


def num_parameters(config: ModelConfig) -> int:
    """Numbers in a model's weights, known before a file is opened; a tied head is not counted again."""
    return sum(parameter.size for parameter in model_class(config.architecture).parameters(config).values())

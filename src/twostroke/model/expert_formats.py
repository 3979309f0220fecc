"""Checks that the stored experts of a layer are consistent."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from twostroke.config.model import ModelConfig
from twostroke.errors import CorruptCheckpoint, UnsupportedModel, show_name
from twostroke.model.weight_source import StoredWeight, WeightSource

_EXPERT = re.compile(r".*\.layers\.(?P<layer>\d+)\..*\.experts\.\d+\.(?P<part>\w+)\.(?P<kind>\w+)")
_LAYER = re.compile(r"(?<=\.layers\.)\d+")


def check_stacks(source: WeightSource, config: ModelConfig) -> None:
    """Raise if a stack has more or fewer experts than the config.

    Raises:
        CorruptCheckpoint: such a stack, under its stored name.
    """
    num_experts = max((layer.experts.num_experts for layer in config.layers if layer.experts is not None), default=0)
    for stack in {weight.stack for weight in source.weights.values() if weight.stack is not None}:
        if stack.shape[0] != num_experts:
            raise CorruptCheckpoint(
                f"{source.path}: {show_name(stack.name)} is {list(stack.shape)}, {stack.shape[0]} experts; "
                f"config.json says {num_experts}. Download the model again, or correct config.json."
            )


def stored_names(source: WeightSource, names: Iterable[str]) -> list[str]:
    """Return the stored names of missing weights; for experts in stacks, the name of the stack.

    Names of stacks are taken from other layers; a bias is named after its matrix.
    """
    stacks: dict[tuple[str, str], str] = {}
    for name, weight in source.weights.items():
        if weight.stack is not None and (found := _EXPERT.fullmatch(name)) is not None:
            stacks.setdefault((found["part"], found["kind"]), weight.stack.name)
    for (part, kind), stack in [*stacks.items()]:
        if kind == "weight":
            stem = stack.removesuffix("_blocks").removesuffix(".weight")
            stacks.setdefault((part, "bias"), f"{stem}_bias")

    def stored(name: str) -> str:
        expert = _EXPERT.fullmatch(name)
        stack = None if expert is None else stacks.get((expert["part"], expert["kind"]))
        return name if expert is None or stack is None else _LAYER.sub(expert["layer"], stack, count=1)

    return [stored(name) for name in names]


def check_formats(source: WeightSource, parts_of: Mapping[str, tuple[str, ...]]) -> None:
    """Raise if an expert of a layer is stored in another format than the first one.

    Gate and up may differ if they do so in all experts, as in GGUF files.

    Args:
        source: source of the weights, which has all parts.
        parts_of: names of stored weights, by the names of the model's parameters.

    Raises:
        UnsupportedModel: two experts differ; both are named as they are stored.
    """
    first_of: dict[tuple[str, str], tuple[str, ...]] = {}
    for name, parts in parts_of.items():
        layer, is_expert, rest = name.partition(".experts.")
        if not is_expert:
            continue
        first = first_of.setdefault((layer, rest.partition(".")[2]), parts)
        for part, other in zip(parts, first, strict=True):
            found, expected = source.weights[part], source.weights[other]
            if (found.format, found.float_type) != (expected.format, expected.float_type):
                raise UnsupportedModel(
                    f"{source.path}: experts of one layer must have one format; {found.stored_name or part} has "
                    f"{_words(found)}, {expected.stored_name or other} {_words(expected)}. "
                    "Store or quantize them alike."
                )


def _words(weight: StoredWeight) -> str:
    weight_format = weight.format
    if weight_format is None:
        return weight.float_type or "floats"
    bits = f"{weight_format.bits} bits in groups of {weight_format.group_size}"
    has_own = weight_format.has_mins or weight_format.order_digest or weight_format.is_fp8 or weight_format.table
    return f"{bits} ({weight_format})" if has_own else bits

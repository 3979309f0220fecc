"""Checks that what is stored of a layer's experts fits together."""

from __future__ import annotations

from collections.abc import Mapping

from twostroke.errors import UnsupportedModel
from twostroke.kernels.quantized_weight import QuantizedFormat
from twostroke.model.weight_source import WeightSource


def check_formats(source: WeightSource, parts_of: Mapping[str, tuple[str, ...]]) -> None:
    """Refuse experts of one layer of which one is stored in another format than the first.

    Gate and up may differ where they do so in all experts, as in GGUF files.

    Args:
        source: has all of the parts.
        parts_of: names of what is stored, by the names of the model's parameters.

    Raises:
        UnsupportedModel: there is such a one; both are named as they are stored.
    """
    first_of: dict[tuple[str, str], tuple[str, ...]] = {}
    for name, parts in parts_of.items():
        layer, is_expert, rest = name.partition(".experts.")
        if not is_expert:
            continue
        first = first_of.setdefault((layer, rest.partition(".")[2]), parts)
        for part, other in zip(parts, first, strict=True):
            found, expected = source.weights[part], source.weights[other]
            if found.format != expected.format:
                raise UnsupportedModel(
                    f"{source.path}: experts of one layer must have one format; {found.stored_name or part} is of "
                    f"{_words(found.format)}, {expected.stored_name or other} of {_words(expected.format)}."
                )


def _words(weight_format: QuantizedFormat | None) -> str:
    if weight_format is None:
        return "floats"
    bits = f"{weight_format.bits} bits in groups of {weight_format.group_size}"
    has_own = weight_format.has_mins or weight_format.order_digest or weight_format.is_fp8 or weight_format.table
    return f"{bits} ({weight_format})" if has_own else bits

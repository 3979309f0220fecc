"""Fp8Config: `quantization_config` of a checkpoint whose matrices are floats of 8 bits (e4m3) with scales; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twostroke.config.fields import list_of, mapping
from twostroke.errors import UnsupportedModel, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Config:
    """How the scales of a checkpoint's fp8 matrices lie."""

    block_size: tuple[int, int] | None = None
    """Rows and columns that share a scale; None: the shape of the scales tells whole rows from the whole matrix."""

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> Fp8Config:
        """Read what quant_method fp8 has (transformers, vLLM, AutoFP8), or compressed-tensors' float-quantized.

        How activations would be rounded is not read: here they stay as they are.

        Raises:
            UnsupportedModel: a value that is not implemented.
            CorruptCheckpoint: a value of another kind than it must have.
        """
        if given.get("quant_method") == "compressed-tensors":
            return cls(block_size=_block_of_group(given))
        if given.get("fmt", "e4m3") not in (None, "e4m3", "float8_e4m3fn"):
            raise _unsupported("fmt", given["fmt"], "e4m3")
        return cls(block_size=_block_size("weight_block_size", list_of(given, "weight_block_size")))


def is_fp8(given: Mapping[str, Any]) -> bool:
    """Whether a `quantization_config` is of fp8 weights."""
    method, form = given.get("quant_method"), given.get("format")
    return method == "fp8" or (method == "compressed-tensors" and form == "float-quantized")


def _block_of_group(given: Mapping[str, Any]) -> tuple[int, int] | None:
    """compressed-tensors: one group of maps, whose weights have a scale for a block, a channel or all."""
    for name in ("kv_cache_scheme", "transform_config"):
        if given.get(name):
            raise _unsupported(name, given[name], "none")
    groups = mapping(given, "config_groups")
    if len(groups) != 1:
        raise _unsupported("config_groups", list(groups), "one group: every map is stored alike")
    group = mapping(groups, next(iter(groups)))
    if list_of(group, "targets") != ["Linear"]:
        raise _unsupported("targets", group.get("targets"), "['Linear']")
    weights = mapping(group, "weights")
    for name, known in (("type", "float"), ("num_bits", 8), ("dynamic", False)):
        if weights.get(name, known) != known:
            raise _unsupported(f"weights.{name}", weights[name], shown(known))
    strategy = weights.get("strategy")
    if strategy not in ("tensor", "channel", "block"):
        raise _unsupported("weights.strategy", strategy, "tensor, channel, block")
    if strategy != "block":
        return None
    size = _block_size("weights.block_structure", list_of(weights, "block_structure"))
    if size is None:
        raise _unsupported("weights.block_structure", None, "[rows, columns], such as [128, 128]")
    return size


def _block_size(name: str, given: list[Any]) -> tuple[int, int] | None:
    if not given:
        return None
    match given:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
        case _:
            raise _unsupported(name, given, "[rows, columns], such as [128, 128]")


def _unsupported(name: str, value: object, known: str) -> UnsupportedModel:
    given = f"{name}={shown(value)}"
    return UnsupportedModel(f"config.json: quantization_config: {given} is not implemented; known: {known}.")

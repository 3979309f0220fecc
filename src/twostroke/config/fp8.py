"""Fp8Config: `quantization_config` of a checkpoint whose matrices are floats of 8 bits (e4m3) with scales; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twostroke.config.fields import mapping
from twostroke.config.quantization import only_group, refuse_if_set, unsupported
from twostroke.errors import shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Config:
    """How the scales of a checkpoint's fp8 matrices lie."""

    block_size: tuple[int, int] | None = None
    """Rows and columns that share a scale; None: the shape of the scales tells whole rows from the whole matrix."""

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> Fp8Config:
        """Read what quant_method fp8 has (transformers, vLLM, AutoFP8), or compressed-tensors' float-quantized.

        How activations and the KV cache would be rounded is not read: activations stay as they are, and
        `--kv-cache-dtype` says what the cache holds.

        Raises:
            UnsupportedModel: a value that is not implemented.
            CorruptCheckpoint: a value of another kind than it must have.
        """
        if given.get("quant_method") == "compressed-tensors":
            return cls(block_size=_block_of_group(given))
        if given.get("fmt", "e4m3") not in (None, "e4m3", "float8_e4m3fn"):
            raise unsupported("fmt", given["fmt"], "e4m3")
        return cls(block_size=_block_size("weight_block_size", given.get("weight_block_size")))


def is_fp8(given: Mapping[str, Any]) -> bool:
    """Whether a `quantization_config` is of fp8 weights."""
    method, form = given.get("quant_method"), given.get("format")
    return method == "fp8" or (method == "compressed-tensors" and form == "float-quantized")


def _block_of_group(given: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the block of compressed-tensors' weights; None: a scale for each channel or for all."""
    refuse_if_set(given, "transform_config")
    weights = mapping(only_group(given), "weights")
    for name, known in (("type", "float"), ("num_bits", 8), ("dynamic", False)):
        if weights.get(name, known) != known:
            raise unsupported(f"weights.{name}", weights[name], shown(known))
    strategy = weights.get("strategy")
    if strategy not in ("tensor", "channel", "block"):
        raise unsupported("weights.strategy", strategy, "tensor, channel, block")
    if strategy != "block":
        return None
    size = _block_size("weights.block_structure", weights.get("block_structure"))
    if size is None:
        raise unsupported("weights.block_structure", None, _BLOCKS)
    return size


_BLOCKS = "[rows, columns], such as [128, 128]"


def _block_size(name: str, given: object) -> tuple[int, int] | None:
    """Return rows and columns; None: there are no blocks."""
    match given:
        case None | []:
            return None
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
        case _:
            raise unsupported(name, given, _BLOCKS)

"""QuantizationConfig: `quantization_config` of a config.json, read once and checked; no torch.

Every field that affects how numbers are stored is read or refused. The tensors themselves show which linear layers are
quantized; one that is not must be listed in the config (`modules_to_not_convert`, `ignore`, ...). Fp8Config is the
counterpart for checkpoints with matrices of 8-bit floats (e4m3) and scales. Mxfp4Config is for experts of 4-bit floats
(e2m1) with a power of two per 32 of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from twostroke.config.fields import read_bool, read_count, read_list, read_mapping
from twostroke.errors import UnsupportedModel, shown

QuantMethod = Literal["awq", "gptq", "compressed-tensors"]
PackedLayoutName = Literal["awq-gemm", "gptq", "gptq_v2", "pack-quantized", "int-quantized"]

GROUP_SIZES = (16, 32, 64, 128)
"""Group sizes that the kernels support; multiples of the last are served as several groups of it."""

FLOAT_LAYERS_KEY: Mapping[QuantMethod, str] = {
    "awq": "modules_to_not_convert",
    "gptq": "rules of dynamic that begin with -:",
    "compressed-tensors": "ignore",
}
"""Fields in which a checkpoint names the linear layers that stay floats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationConfig:
    """Storage format of a checkpoint's quantized weights."""

    method: QuantMethod
    layout: PackedLayoutName
    bits: int
    group_size: int | None
    """Weights of a row that share a scale; None: the whole row."""
    symmetric: bool
    """Whether zero is the middle of the codes everywhere, so that no zero points are stored."""
    has_act_order: bool = False
    """Whether each linear layer stores which of its inputs are in which group, since groups are not contiguous
    (act-order)."""
    scale_per_tensor: bool = False
    """Whether all rows share one scale."""
    float_patterns: tuple[re.Pattern[str], ...] = ()
    """Patterns searched in the names of linear layers; those that match stay floats."""

    def stays_float(self, module: str) -> bool:
        """Return whether a linear layer (`model.layers.0.mlp.down_proj`) is declared to stay floats."""
        return any(pattern.search(module) for pattern in self.float_patterns)

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> QuantizationConfig | None:
        """Read `quantization_config`; return None if it is empty.

        Raises:
            UnsupportedModel: a method, layout or number is not implemented.
            CorruptCheckpoint: a value has the wrong type.
        """
        if not given:
            return None
        method = given.get("quant_method")
        if method not in get_args(QuantMethod):
            raise unsupported("quant_method", method, ", ".join((*get_args(QuantMethod), "fp8", "mxfp4")))
        return _READERS[cast(QuantMethod, method)](given)


def _read_awq(given: Mapping[str, Any]) -> QuantizationConfig:
    """Read AutoAWQ's fields (Lin et al. 2023, arXiv:2306.00978)."""
    version = str(given.get("version") or given.get("format") or "gemm").lower()
    if version != "gemm":
        raise unsupported("version", version, "gemm")
    return QuantizationConfig(
        method="awq",
        layout="awq-gemm",
        bits=_bits(given, "bits", (4,)),
        group_size=_group_size(given),
        symmetric=False,  # the layout has zero points in every case
        float_patterns=_patterns("modules_to_not_convert", map(_literally, read_list(given, "modules_to_not_convert"))),
    )


def _read_gptq(given: Mapping[str, Any]) -> QuantizationConfig:
    """Read AutoGPTQ's and GPTQModel's fields (Frantar et al. 2022, arXiv:2210.17323)."""
    layout = given.get("checkpoint_format") or given.get("format") or "gptq"
    if layout not in ("gptq", "gptq_v2"):
        raise unsupported("checkpoint_format", layout, "gptq, gptq_v2")
    refuse_if_set(given, "is_marlin_format", "rotation", "adapter")
    if str(given.get("pack_dtype") or "int32") != "int32":
        raise unsupported("pack_dtype", given["pack_dtype"], "int32")
    rules = list(read_mapping(given, "dynamic"))
    overrides = [rule for rule in rules if not rule.startswith("-:")]
    if overrides:
        raise unsupported("dynamic", overrides, "one precision for all layers, and rules that leave layers out (-:)")
    return QuantizationConfig(
        method="gptq",
        layout=cast(PackedLayoutName, layout),
        bits=_bits(given, "bits", (4, 8)),
        group_size=_group_size(given),
        symmetric=read_bool(given, "sym"),
        has_act_order=read_bool(given, "desc_act"),
        float_patterns=_patterns("dynamic", (_at_the_start(rule.removeprefix("-:")) for rule in rules))
        + _patterns("modules_to_not_convert", map(_literally, read_list(given, "modules_to_not_convert")))
        + _all_except(read_list(given, "modules_in_block_to_quantize")),
    )


def _read_compressed_tensors(given: Mapping[str, Any]) -> QuantizationConfig:
    """Read the fields of the compressed-tensors package, with one group of linear layers."""
    refuse_if_set(given, "kv_cache_scheme", "transform_config")
    sparsity = read_mapping(given, "sparsity_config").get("format", "dense")
    if sparsity != "dense":
        raise unsupported("sparsity_config.format", sparsity, "dense")
    group = only_group(given)
    layout = group.get("format") or given.get("format")
    if layout not in ("pack-quantized", "int-quantized"):
        raise unsupported("format", layout, "pack-quantized, int-quantized, float-quantized")
    refuse_if_set(group, "output_activations")
    _check_activations(read_mapping(group, "input_activations"))
    weights = read_mapping(group, "weights")
    for name, value, known in (("type", "int", "int"), ("dynamic", False, "false")):
        if weights.get(name, value) != value:
            raise unsupported(f"weights.{name}", weights[name], known)
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "channel")
    if strategy not in ("group", "channel", "tensor"):
        raise unsupported("weights.strategy", strategy, "group, channel, tensor")
    return QuantizationConfig(
        method="compressed-tensors",
        layout=cast(PackedLayoutName, layout),
        bits=_bits(weights, "num_bits", (4, 8)),
        group_size=_group_size(weights) if strategy == "group" else None,
        symmetric=read_bool(weights, "symmetric", default=True),
        has_act_order=_has_act_order(weights),
        scale_per_tensor=strategy == "tensor",
        float_patterns=_patterns("ignore", map(_name_or_pattern, read_list(given, "ignore"))),
    )


_READERS = {"awq": _read_awq, "gptq": _read_gptq, "compressed-tensors": _read_compressed_tensors}


def only_group(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the single group of linear layers that a compressed-tensors checkpoint may have.

    Raises:
        UnsupportedModel: there are several groups, or the group has other layers.
    """
    groups = read_mapping(given, "config_groups")
    if len(groups) != 1:
        raise unsupported("config_groups", list(groups), "one group: all layers stored in the same way")
    group = read_mapping(groups, next(iter(groups)))
    if read_list(group, "targets") != ["Linear"]:
        raise unsupported("targets", group.get("targets"), "['Linear']")
    return group


def _check_activations(given: Mapping[str, Any]) -> None:
    """Refuse quantized activations other than 8 bits per token, which our kernels use in any case."""
    if not given:
        return
    found = {"num_bits": 8, "type": "int", "dynamic": False, "symmetric": True, "strategy": "token", **given}
    for name, value in {"num_bits": 8, "type": "int", "dynamic": True, "symmetric": True, "strategy": "token"}.items():
        if found[name] != value:
            raise unsupported(f"input_activations.{name}", found[name], f"{shown(value)}, or no input_activations")


def _has_act_order(weights: Mapping[str, Any]) -> bool:
    """Return whether compressed-tensors stores the order of inputs ("group"); "weight" has already undone it."""
    order = weights.get("actorder")
    if order in (None, False, "weight", "static"):
        return False
    if order in (True, "group", "dynamic"):
        return True
    raise unsupported("weights.actorder", order, "group, weight, null")


def _bits(given: Mapping[str, Any], name: str, known: tuple[int, ...]) -> int:
    bits = read_count(given, name)
    if bits not in known:
        raise unsupported(name, bits, ", ".join(map(str, known)))
    return bits


def _group_size(given: Mapping[str, Any]) -> int | None:
    if given.get("group_size") == -1:
        return None
    size = read_count(given, "group_size")
    if size not in GROUP_SIZES and size % GROUP_SIZES[-1]:
        shown = ", ".join(map(str, GROUP_SIZES))
        raise unsupported("group_size", size, f"{shown}, multiples of {GROUP_SIZES[-1]}, and -1 for whole rows")
    return size


def _literally(part_of_name: object) -> str:
    return re.escape(str(part_of_name))


def _at_the_start(pattern: str) -> str:
    return rf"\A(?:{pattern})"


def _name_or_pattern(given: object) -> str:
    """Return a pattern for an entry of compressed-tensors: `lm_head`, or `re:.*lm_head`."""
    name = str(given)
    return _at_the_start(name.removeprefix("re:")) if name.startswith("re:") else rf"\A{re.escape(name)}\Z"


def _all_except(quantized: list[Any]) -> tuple[re.Pattern[str], ...]:
    """Return a pattern for all linear layers but the given ones.

    GPTQ can list the linear layers of a block that are quantized, in lists of those that it quantizes together.
    """
    names = [name for at_once in quantized for name in (at_once if isinstance(at_once, list) else [at_once])]
    if not names:
        return ()
    ends = "|".join(map(_literally, names))
    return (re.compile(rf"\A(?!.*\.(?:{ends})\Z)"),)


def _patterns(name: str, given: Iterable[str]) -> tuple[re.Pattern[str], ...]:
    found: list[re.Pattern[str]] = []
    for pattern in given:
        if not _is_fast_pattern(pattern):
            known = f"regular expressions with at most {_MAX_REPEATS} repeats, and no repeat of a group"
            raise unsupported(name, pattern, known)
        try:
            found.append(re.compile(pattern))
        except re.error as error:
            raise unsupported(name, pattern, f"regular expressions that Python reads ({error})") from error
    return tuple(found)


_MAX_REPEATS = 4
"""Most repeats in a pattern. Names have about 50 characters, so the slowest search takes a few milliseconds."""
_MAX_OPTIONS = 8
_NO_OPERATOR = re.compile(r"\\.|\[\^?\]?[^\]]*\]|\(\?[:=!<]*", re.DOTALL)
"""Parts of a pattern without operators: escaped characters, sets of characters, and the openings of groups."""


def _is_fast_pattern(pattern: str) -> bool:
    """Return whether a pattern is fast on every text: the checkpoint is untrusted, and a search has no timeout."""
    operators = _NO_OPERATOR.sub("(", pattern)
    num_repeats = len(re.findall(r"[*+{]", operators))
    repeats_group = re.search(r"\)[*+{]", operators) is not None
    return not repeats_group and num_repeats <= _MAX_REPEATS and operators.count("?") <= _MAX_OPTIONS


def refuse_if_set(given: Mapping[str, Any], *names: str) -> None:
    """Raise UnsupportedModel for the first of these fields that is set."""
    for name in names:
        if given.get(name):
            raise unsupported(name, given[name], "none")


def unsupported(name: str, value: object, known: str) -> UnsupportedModel:
    """Return the error for a field of `quantization_config` whose value is not implemented."""
    given = f"{name}={shown(value)}"
    return UnsupportedModel(f"config.json: quantization_config: {given} is not implemented; known: {known}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Config:
    """Layout of the scales of a checkpoint's fp8 matrices."""

    block_size: tuple[int, int] | None = None
    """Rows and columns that share a scale; None: the shape of the scales shows whether it is per row or per matrix."""

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> Fp8Config:
        """Read quant_method fp8 (transformers, vLLM, AutoFP8), or compressed-tensors' float-quantized.

        The rounding of activations and KV cache is not read: activations stay as they are, and `--kv-cache-dtype` sets
        the format of the cache.

        Raises:
            UnsupportedModel: a value is not implemented.
            CorruptCheckpoint: a value has the wrong type.
        """
        if given.get("quant_method") == "compressed-tensors":
            return cls(block_size=_block_of_group(given))
        if given.get("fmt", "e4m3") not in (None, "e4m3", "float8_e4m3fn"):
            raise unsupported("fmt", given["fmt"], "e4m3")
        return cls(block_size=_block_size("weight_block_size", given.get("weight_block_size")))


@dataclass(frozen=True, slots=True)
class Mxfp4Config:
    """Experts stored as MXFP4, in one layout; the names of tensors show which they are."""


StoredQuantization = QuantizationConfig | Fp8Config | Mxfp4Config


def read_quantization(given: Mapping[str, Any]) -> StoredQuantization | None:
    """Return a parsed `quantization_config`; None if it is empty.

    Raises:
        UnsupportedModel: a method, layout or number is not implemented.
        CorruptCheckpoint: a value has the wrong type.
    """
    if given.get("quant_method") == "mxfp4":
        return Mxfp4Config()
    return Fp8Config.from_hf(given) if is_fp8(given) else QuantizationConfig.from_hf(given)


def is_fp8(given: Mapping[str, Any]) -> bool:
    """Return whether a `quantization_config` is for fp8 weights."""
    method, form = given.get("quant_method"), given.get("format")
    return method == "fp8" or (method == "compressed-tensors" and form == "float-quantized")


def _block_of_group(given: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the block shape of compressed-tensors' weights; None: a scale per channel or per matrix."""
    refuse_if_set(given, "transform_config")
    weights = read_mapping(only_group(given), "weights")
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

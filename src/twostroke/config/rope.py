"""RopeConfig: the rotary position embedding in a checkpoint's config.json; no torch.

Both spellings are read: transformers 4 (`rope_theta` next to `rope_scaling`) and transformers 5 (`rope_parameters`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from twostroke.config.fields import is_number, read_bool, read_count, read_list, read_mapping
from twostroke.errors import CorruptCheckpoint, UnsupportedModel, shown

RopeType = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional"]

ROPE_TYPES: tuple[RopeType, ...] = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional")
_ALIASES = {"mrope": "default"}
"""Rope types that equal another one for text: mrope differs only in the positions of images."""
DEFAULT_ROPE_THETA = 10_000.0


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding and its scaling; layers/elementwise.py computes the frequencies.

    Fields that a rope type does not use are None.
    """

    theta: float
    rope_type: RopeType = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    """Context of the pre-training, for yarn, llama3 and longrope; for dynamic the model's max_position_embeddings."""
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    longest_request: int | None = None
    """Tokens that dynamic scaling and longrope are fixed for; None: the original context."""
    frequency_divisors: tuple[float, ...] | None = None
    """Divisors of each pair's frequency, [head_dim / 2], if a file stores them instead of the rule (GGUF)."""
    short_factors: tuple[float, ...] | None = None
    """longrope: divisors of each pair's frequency, [rotated numbers / 2], up to the original context."""
    long_factors: tuple[float, ...] | None = None
    """longrope: the same divisors, beyond the original context."""
    query_growth: float | None = None
    """Queries are multiplied by 1 + query_growth * log(1 + position // original context) (Ministral 3)."""
    rotary_dim: int | None = None
    """Numbers of a head that are rotated, the first ones; None: all."""
    rotating_share: float = 1.0
    """proportional: share of the pairs that rotate, the first ones, each as fast as if all did (Gemma 4)."""
    is_interleaved: bool = False
    """Whether a pair is two neighbours; otherwise it is one number of the first half and one of the second."""

    @classmethod
    def from_hf(
        cls,
        config: Mapping[str, Any],
        *,
        head_dim: int | None = None,
        is_interleaved: bool = False,
        scales_queries: bool = False,
        longrope_names: Collection[str] = (),
    ) -> RopeConfig:
        """Read either spelling from a config.json.

        Args:
            config: the parsed config.json.
            head_dim: of heads that may be rotated in part; None: the architecture always rotates whole heads.
            is_interleaved: whether its pairs are neighbours.
            scales_queries: whether it reads `llama_4_scaling_beta`.
            longrope_names: other names of longrope in its configs.

        Raises:
            UnsupportedModel: a rope type is not implemented, or there is one per kind of layer.
            CorruptCheckpoint: a parameter that the rope type needs is absent or no number.
        """
        given = {**(read_mapping(config, "rope_scaling") or read_mapping(config, "rope_parameters"))}
        if any(isinstance(value, Mapping) for value in given.values()):
            raise UnsupportedModel("rope parameters per kind of layer are not implemented; known: one set for all.")
        rope_type = _rope_type(given, longrope_names)
        partial = given.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        is_proportional = rope_type == "proportional"
        rotating_share = _rotated_fraction(partial) if is_proportional else 1.0
        partial = None if is_proportional else partial
        rotary_dim = None if head_dim is None else _rotary_dim(partial, head_dim)
        if head_dim is None and partial not in (None, 1):
            raise UnsupportedModel(f"partial_rotary_factor={shown(partial)}: only whole heads can be rotated (1.0).")
        theta = given.get("rope_theta", config.get("rope_theta"))
        max_positions = read_count(config, "max_position_embeddings")
        original: int | None = None
        if rope_type in ("yarn", "llama3", "longrope"):
            # a value outside of the rope parameters wins over one inside them: transformers' rule
            name = "original_max_position_embeddings"
            original = read_count({name: config.get(name) or given.get(name)}, name, max_positions)
        elif rope_type == "dynamic":
            original = max_positions
        factor = given.get("factor")
        if factor is None and rope_type in ("yarn", "longrope") and original:
            factor = max_positions / original
        numbers: dict[str, Any] = {"theta": DEFAULT_ROPE_THETA if theta is None else theta, "factor": factor}
        if rope_type == "default" or (is_proportional and factor is None):
            numbers["factor"] = 1.0
        numbers |= {name: given.get(name) for name in _OPTIONAL_ROPE_NUMBERS}
        numbers["query_growth"] = given.get("llama_4_scaling_beta") if scales_queries else None
        # 0 switches these off
        numbers |= {name: None for name in ("mscale", "mscale_all_dim", "query_growth") if numbers[name] == 0}
        _check_rope_numbers(rope_type, numbers, original)
        return cls(
            rope_type=rope_type,
            original_max_position_embeddings=original,
            truncate=read_bool(given, "truncate", default=True),
            longest_request=None,
            frequency_divisors=None,
            short_factors=_factors(given, "short_factor", rotary_dim or head_dim) if rope_type == "longrope" else None,
            long_factors=_factors(given, "long_factor", rotary_dim or head_dim) if rope_type == "longrope" else None,
            rotary_dim=rotary_dim,
            rotating_share=rotating_share,
            is_interleaved=is_interleaved,
            **{name: float(value) for name, value in numbers.items() if value is not None},
        )

    def context(self, max_position_embeddings: int, *, is_original_given: bool) -> int:
        """Return the context length after scaling, by vLLM's rule.

        linear, dynamic   max_position_embeddings x factor: it is the context before the scaling
        yarn              original_max_position_embeddings x factor, if that is given
        llama3, default   max_position_embeddings: it is the context after the scaling
        """
        if self.rope_type in ("linear", "dynamic"):
            return int(max_position_embeddings * self.factor)
        if self.rope_type == "yarn" and is_original_given:
            assert self.original_max_position_embeddings is not None
            return int(self.original_max_position_embeddings * self.factor)
        return max_position_embeddings


def _rope_type(given: Mapping[str, Any], longrope_names: Collection[str]) -> RopeType:
    told = given.get("rope_type") or given.get("type") or "default"
    found = _ALIASES.get(str(told), told)
    # without long_factor, such a name means the type of that name: yarn in a GGUF file is yarn
    if told in longrope_names and (found not in ROPE_TYPES or "long_factor" in given):
        found = "longrope"
    if found not in ROPE_TYPES:
        raise UnsupportedModel(f"rope type {shown(found)} is not implemented; known: {', '.join(ROPE_TYPES)}.")
    return found


def rotary_share(num_rotated: int, head_dim: int) -> float:
    """Return the share of a head that is rotated, such that int(head_dim * share) is `num_rotated` again.

    >>> int(100 * (58 / 100)), int(100 * rotary_share(58, 100))
    (57, 58)
    """
    return 1.0 if num_rotated == head_dim else math.nextafter(num_rotated / head_dim, 1.0)


def _rotary_dim(partial: object, head_dim: int) -> int | None:
    """Return the numbers of a head that are rotated; None: all."""
    if partial is None:
        return None
    rotated = int(head_dim * partial) if is_number(partial) and 0 < partial <= 1 else 0
    if rotated < 2 or rotated % 2:
        raise CorruptCheckpoint(
            f"config.json: partial_rotary_factor must give an even number of at least 2 of the {head_dim} numbers of a "
            f"head, found {shown(partial)}."
        )
    return None if rotated == head_dim else rotated


def _rotated_fraction(partial: object) -> float:
    if partial is None:
        return 1.0
    if not is_number(partial) or not 0 < partial <= 1:
        raise CorruptCheckpoint(
            f"config.json: partial_rotary_factor must be a number above 0 and at most 1, found {shown(partial)}."
        )
    return float(partial)


def _factors(given: Mapping[str, Any], name: str, num_rotated: int | None) -> tuple[float, ...]:
    """Return longrope's divisors of frequencies."""
    if num_rotated is None:
        raise UnsupportedModel("rope type 'longrope' is not implemented for this architecture.")
    found = read_list(given, name)
    low, high = _ROPE_NUMBERS
    if len(found) != num_rotated // 2 or not all(is_number(value) and low <= value <= high for value in found):
        raise CorruptCheckpoint(
            f"config.json: rope type 'longrope' needs {num_rotated // 2} numbers above 0 as {name}, found "
            f"{len(found)} entries: {shown(found)}."
        )
    return tuple(float(value) for value in found)


_OPTIONAL_ROPE_NUMBERS = (
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)
_ROPE_NUMBERS = (1e-12, 1e12)
"""Limits far beyond real models; smaller numbers would make frequencies infinite in float32, and every logit NaN."""


def _check_rope_numbers(rope_type: str, numbers: Mapping[str, Any], original: int | None) -> None:
    if numbers["query_growth"] is not None and original is None:
        raise UnsupportedModel(f"llama_4_scaling_beta beside rope type {shown(rope_type)} is not implemented.")
    if rope_type == "longrope" and (original or 0) < 2:
        raise CorruptCheckpoint(
            f"config.json: rope type 'longrope' needs an original_max_position_embeddings above 1, found {original}."
        )
    needed = ["theta", "factor"]
    if rope_type == "llama3":
        needed += ["low_freq_factor", "high_freq_factor"]
    low, high = _ROPE_NUMBERS
    for name, value in numbers.items():
        is_absent = value is None and name not in needed
        if not is_absent and not (is_number(value) and low <= value <= high):
            key = "rope_theta" if name == "theta" else name
            raise CorruptCheckpoint(
                f"config.json: rope type {shown(rope_type)} needs a number above 0 (from {low:g} to {high:g}) for "
                f"{key}, found {shown(value)}."
            )
    if rope_type == "yarn" and numbers["theta"] <= 1:
        raise CorruptCheckpoint(f"config.json: rope type 'yarn' needs a rope_theta above 1, found {numbers['theta']}.")
    if rope_type == "llama3" and numbers["low_freq_factor"] == numbers["high_freq_factor"]:
        raise CorruptCheckpoint(f"config.json: low_freq_factor equals high_freq_factor ({numbers['low_freq_factor']}).")

"""RopeConfig: the rotary position embedding that a checkpoint's config.json states; no torch.

Both spellings are understood: transformers 4 (`rope_theta` beside `rope_scaling`) and transformers 5
(`rope_parameters`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from twostroke.config.fields import count, is_number, mapping, switch
from twostroke.errors import CorruptCheckpoint, UnsupportedModel

RopeType = Literal["default", "linear", "dynamic", "yarn", "llama3"]

ROPE_TYPES: tuple[RopeType, ...] = ("default", "linear", "dynamic", "yarn", "llama3")
DEFAULT_ROPE_THETA = 10_000.0


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding and how it is stretched; layers/rotary.py computes the frequencies.

    Fields that a rope type does not use are None.
    """

    theta: float
    rope_type: RopeType = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    """Context of the pre-training, for yarn and llama3; for dynamic the model's max_position_embeddings."""
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    longest_request: int | None = None
    """Tokens that dynamic scaling is fixed for; None is the original context, where it changes nothing."""
    frequency_divisors: tuple[float, ...] | None = None
    """What each pair's frequency is divided by, [head_dim / 2], where a file stores that and not the rule (GGUF)."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> RopeConfig:
        """Reads either spelling out of a config.json.

        Raises:
            UnsupportedModel: a rope type that is not implemented, or one per kind of layer.
            CorruptCheckpoint: a parameter that the rope type needs is absent or no number.
        """
        given = {**(mapping(config, "rope_scaling") or mapping(config, "rope_parameters"))}
        if any(isinstance(value, Mapping) for value in given.values()):
            raise UnsupportedModel("rope parameters per kind of layer are not implemented; known: one set for all.")
        rope_type = given.get("rope_type") or given.get("type") or "default"
        if rope_type not in ROPE_TYPES:
            raise UnsupportedModel(f"rope type {rope_type!r} is not implemented; known: {', '.join(ROPE_TYPES)}.")
        partial = given.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        if partial is not None and partial != 1:
            raise UnsupportedModel(f"partial_rotary_factor={partial}: only whole heads can be rotated (1.0).")
        theta = given.get("rope_theta", config.get("rope_theta"))
        max_positions = count(config, "max_position_embeddings")
        original: int | None = None
        if rope_type in ("yarn", "llama3"):
            # a value beside the rope parameters wins over one among them: transformers' rule
            name = "original_max_position_embeddings"
            original = count({name: config.get(name) or given.get(name)}, name, max_positions)
        elif rope_type == "dynamic":
            original = max_positions
        factor = given.get("factor")
        if factor is None and rope_type == "yarn" and original:
            factor = max_positions / original
        numbers: dict[str, Any] = {"theta": DEFAULT_ROPE_THETA if theta is None else theta, "factor": factor}
        if rope_type == "default":
            numbers["factor"] = 1.0
        numbers |= {name: given.get(name) for name in _OPTIONAL_ROPE_NUMBERS}
        _check_rope_numbers(rope_type, numbers)
        return cls(
            rope_type=rope_type,
            original_max_position_embeddings=original,
            truncate=switch(given, "truncate", default=True),
            longest_request=None,
            frequency_divisors=None,
            **{name: float(value) for name, value in numbers.items() if value is not None},
        )

    def context(self, max_position_embeddings: int, *, is_original_given: bool) -> int:
        """Tokens that the stretched embedding reaches, by vLLM's rule.

        linear, dynamic   max_position_embeddings x factor: it is the context before the stretching
        yarn              original_max_position_embeddings x factor, where that was given
        llama3, default   max_position_embeddings: it is the context after it
        """
        if self.rope_type in ("linear", "dynamic"):
            return int(max_position_embeddings * self.factor)
        if self.rope_type == "yarn" and is_original_given:
            assert self.original_max_position_embeddings is not None
            return int(self.original_max_position_embeddings * self.factor)
        return max_position_embeddings


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
"""Far beyond what models have; smaller ones would make frequencies infinite in float32, and every logit NaN."""


def _check_rope_numbers(rope_type: str, numbers: Mapping[str, Any]) -> None:
    needed = ["theta", "factor"]
    if rope_type == "llama3":
        needed += ["low_freq_factor", "high_freq_factor"]
    low, high = _ROPE_NUMBERS
    for name, value in numbers.items():
        is_absent = value is None and name not in needed
        if not is_absent and not (is_number(value) and low <= value <= high):
            key = "rope_theta" if name == "theta" else name
            raise CorruptCheckpoint(
                f"config.json: rope type {rope_type!r} needs a number above 0 (from {low:g} to {high:g}) for {key}, "
                f"found {value!r}."
            )
    if rope_type == "yarn" and numbers["theta"] <= 1:
        raise CorruptCheckpoint(f"config.json: rope type 'yarn' needs a rope_theta above 1, found {numbers['theta']}.")
    if rope_type == "llama3" and numbers["low_freq_factor"] == numbers["high_freq_factor"]:
        raise CorruptCheckpoint(f"config.json: low_freq_factor equals high_freq_factor ({numbers['low_freq_factor']}).")

"""Settings of speculative decoding: vLLM's `speculative_config`, as far as it goes here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from twostroke.config.checks import one_of, whole_number
from twostroke.errors import InvalidParameter, UnknownParameter

Method = Literal["ngram"]

MAX_DRAFTS = 64
"""Tokens drafted at once; far beyond what pays."""
MAX_ENDING = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Who drafts, and how much. Whatever it is, the tokens are the same; only their time changes."""

    method: Method
    """`ngram`: what followed the last tokens when they stood in the text before."""
    num_speculative_tokens: int = 4
    """Most tokens drafted at once."""
    prompt_lookup_max: int = 5
    """Of the n-gram method: tokens of the ending that is looked for, at most."""
    prompt_lookup_min: int = 2
    """And at least: a shorter match is taken for chance."""

    def __post_init__(self) -> None:
        """Checks types and ranges."""
        one_of("speculative_config.method", self.method, get_args(Method))
        whole_number("speculative_config.num_speculative_tokens", self.num_speculative_tokens, 1, MAX_DRAFTS)
        whole_number("speculative_config.prompt_lookup_max", self.prompt_lookup_max, 1, MAX_ENDING)
        whole_number("speculative_config.prompt_lookup_min", self.prompt_lookup_min, 1, MAX_ENDING)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise InvalidParameter(
                "speculative_config.prompt_lookup_min",
                self.prompt_lookup_min,
                f"must not be more than prompt_lookup_max, which is {self.prompt_lookup_max}",
            )

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> SpeculativeConfig:
        """Of an object like vLLM's.

        Raises:
            InvalidParameter: a field is missing, or its value is out of range.
            UnknownParameter: there is no such field.
        """
        known = {field.name for field in fields(cls)}
        for name in given:
            if name not in known:
                raise UnknownParameter(name, known, "speculative_config")
        if "method" not in given:
            names = ", ".join(map(repr, get_args(Method)))
            raise InvalidParameter("speculative_config", dict(given), f"needs a method: {names}")
        return cls(**given)

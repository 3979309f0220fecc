"""Settings of speculative decoding: the supported part of vLLM's `speculative_config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from twostroke.config.checks import check_choice, check_int, check_text
from twostroke.errors import InvalidParameter, UnknownParameter

Method = Literal["ngram", "draft_model", "early_exit", "medusa", "eagle"]

AUTO = "auto"
MAX_DRAFTS = 64
"""Most draft tokens per step; far beyond what pays off."""
MAX_AUTO_DRAFTS = 8
"""Most draft tokens per step with "auto", which measures lengths before it uses them."""
MAX_ENDING = 64

_OF_METHOD: Mapping[Method, frozenset[str]] = {
    "ngram": frozenset({"prompt_lookup_max", "prompt_lookup_min"}),
    "draft_model": frozenset({"model"}),
    "early_exit": frozenset({"exit_layer"}),
    "medusa": frozenset({"model"}),
    "eagle": frozenset({"model"}),
}
"""Fields that each method has in addition to the common ones."""
_OF_ALL = frozenset({"method", "num_speculative_tokens"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Method and length of drafting. They change only the time of tokens, not the tokens."""

    method: Method
    """`ngram`: the tokens that followed an earlier occurrence of the last tokens. `draft_model`: a smaller model with
    the same vocabulary. `early_exit`: the model's own first layers, with its norm and head. `medusa`: heads that
    predict several tokens from one hidden state. `eagle`: an EAGLE-3 head, a layer over the model's hidden states."""
    num_speculative_tokens: int | Literal["auto"] = AUTO
    """Draft tokens per step; "auto" drafts if measurements while serving show that it pays off. With medusa, more
    tokens than heads make branches: alternatives that are verified along with the first."""
    model: str | None = None
    """For draft_model: a folder, a GGUF file or a hub id; for medusa and eagle: a folder or a hub id. None takes the
    drafter that comes with the embedded model."""
    exit_layer: int | None = None
    """For early_exit: number of layers that draft; None takes the first exit that the model was trained for."""
    prompt_lookup_max: int | None = None
    """For ngram: most tokens at the end of the text to look up; 5 by default."""
    prompt_lookup_min: int | None = None
    """For ngram: fewest tokens to look up, since a shorter match is taken for chance; 2 by default."""

    def __post_init__(self) -> None:
        """Check types and ranges, and that every field given belongs to the method."""
        check_choice("speculative_config.method", self.method, get_args(Method))
        if self.num_speculative_tokens != AUTO:
            name, limit = "speculative_config.num_speculative_tokens", f'a whole number, 1 to {MAX_DRAFTS}, or "{AUTO}"'
            check_int(name, self.num_speculative_tokens, 1, MAX_DRAFTS, limit=limit)
        known = _OF_METHOD[self.method]
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and field.name not in known | _OF_ALL:
                meant = " and ".join(repr(method) for method, names in _OF_METHOD.items() if field.name in names)
                remedy = f"It is for method {meant}; leave it out."
                raise InvalidParameter(
                    f"speculative_config.{field.name}", value, f"is no field of method {self.method!r}", remedy
                )
        if self.model is not None:
            check_text("speculative_config.model", self.model)
        for name, most in (("exit_layer", None), ("prompt_lookup_max", MAX_ENDING), ("prompt_lookup_min", MAX_ENDING)):
            if getattr(self, name) is not None:
                check_int(f"speculative_config.{name}", getattr(self, name), 1, most)
        fewest, most = self.lookup_lengths
        if fewest > most:
            limit = f"must not be more than prompt_lookup_max, which is {most}"
            raise InvalidParameter("speculative_config.prompt_lookup_min", fewest, limit)

    @property
    def lookup_lengths(self) -> tuple[int, int]:
        """For ngram: fewest and most tokens at the end of the text to look up; if one is given, it bounds the other."""
        most = self.prompt_lookup_max or max(5, self.prompt_lookup_min or 0)
        return self.prompt_lookup_min or min(2, most), most

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> SpeculativeConfig:
        """Read an object like vLLM's `speculative_config`.

        Raises:
            InvalidParameter: a field is missing, or its value is out of range.
            UnknownParameter: there is no such field.
        """
        known = {field.name for field in fields(cls)}
        for name in given:
            if name not in known:
                raise UnknownParameter(str(name), known, "speculative_config")  # a Python mapping may have any key
        if "method" not in given:
            names = ", ".join(map(repr, get_args(Method)))
            raise InvalidParameter("speculative_config", dict(given), f"needs a method: {names}")
        return cls(**given)

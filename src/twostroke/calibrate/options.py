"""Options of `twostroke calibrate`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from twostroke.config.checks import check_int, check_text, parse_ints
from twostroke.config.kv_format import KVCacheDType
from twostroke.config.speculation import MAX_AUTO_DRAFTS, MAX_DRAFTS, Method
from twostroke.errors import InvalidParameter

DEFAULT_SIZES = "1,2,3,4,5,6,7,8,9,12,16,24,32,48,64"
_METHOD_OF = {"exit_layers": "early_exit", "draft_model": "draft_model", "medusa": "medusa", "eagle": "eagle"}
"""Drafting method that an option belongs to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateOptions:
    """Measurements to make, and their limits."""

    drafts: bool = True
    """Time every drafting method as well as steps; without it a calibration takes about a minute."""
    methods: str | None = None
    """Drafting methods, comma-separated; default: every method that the model has a drafter for."""
    exit_layers: str | None = None
    """Exit layers for early_exit, comma-separated; default: every number below the model's layers."""
    draft_model: str | None = None
    """Model for draft_model: a folder, a GGUF file or a hub id; default: the one of the embedded model."""
    medusa: str | None = None
    """Heads for medusa: a folder or a hub id; default: those of the embedded model."""
    eagle: str | None = None
    """Head for eagle: a folder or a hub id; default: the one of the embedded model."""
    data: Path | None = None
    """UTF-8 text similar to what the model will continue; default: code, as for `benchmarks spec`."""
    sizes: str = DEFAULT_SIZES
    """Query tokens of the steps to time, from 1 on, comma-separated."""
    most_drafts: int = MAX_AUTO_DRAFTS
    """Maximum number of drafts in a step."""
    context_tokens: int = 128
    """Tokens of each prompt."""
    output_tokens: int = 96
    """Output tokens of each request."""
    prompts: int = 3
    """Number of prompts whose acceptance counts."""
    repeats: int = 15
    """Fewest steps of each size; their lower quartile counts, as other processes can only make steps longer."""
    max_num_batched_tokens: int = 512
    """Tokens of the largest step to time; use the value of the server that will use the calibration."""
    max_num_seqs: int = 64
    """Requests in the largest step."""
    kv_cache_dtype: KVCacheDType = "auto"
    """Format of the KV cache."""
    seed: int = 0
    """Seed for the places in the text at which prompts begin."""
    output: Path | None = None
    """Output file; default: in ~/.cache/twostroke, where a server finds it."""

    def __post_init__(self) -> None:
        """Check everything that needs no model."""
        if not self.drafts:
            self._check_without_drafts()
        for method in self.asked or ():
            if method not in get_args(Method):
                known = ", ".join(get_args(Method))
                raise InvalidParameter("methods", self.methods, f"names {method!r}; known: {known}")
        check_int("most_drafts", self.most_drafts, 1, MAX_DRAFTS)
        self._check_sizes()
        if self.asked == ():
            limit = "names no method"
            raise InvalidParameter("methods", self.methods, limit, "Give some, comma-separated, or leave it out.")
        if self.exit_layers is not None:
            parse_ints("exit_layers", self.exit_layers, 1, 10_000)
        for name in self.companions:
            if getattr(self, name) is not None:
                check_text(name, getattr(self, name))
        for name, method in _METHOD_OF.items():
            if getattr(self, name) is not None and self.asked is not None and method not in self.asked:
                limit = f"changes nothing: {method!r} is not among the methods ({self.methods})"
                raise InvalidParameter(name, getattr(self, name), limit, "Name the method, or leave it out.")
        check_int("context_tokens", self.context_tokens, 2, 1 << 20)
        check_int("output_tokens", self.output_tokens, 2 * (1 + self.most_drafts), 1 << 20)
        check_int("prompts", self.prompts, 1, 10_000)
        check_int("repeats", self.repeats, 3, 10_000)
        check_int("seed", self.seed, 0)

    def _check_without_drafts(self) -> None:
        """Raise if an option that only concerns drafts is given."""
        for name in ("methods", *_METHOD_OF):
            if getattr(self, name) is not None:
                raise InvalidParameter(name, getattr(self, name), "changes nothing with --no-drafts", "Leave one out.")

    def _check_sizes(self) -> None:
        if self.step_sizes[0] != 1:
            raise InvalidParameter("sizes", self.sizes, "must begin with 1, the step without drafts")
        if len(self.step_sizes) == 1:
            raise InvalidParameter("sizes", self.sizes, "has no step with drafts", "Add a size of 2 or more.")

    @property
    def step_sizes(self) -> tuple[int, ...]:
        """Sizes to time, rising."""
        return parse_ints("sizes", self.sizes, 1, MAX_DRAFTS + 1)

    @property
    def asked(self) -> tuple[str, ...] | None:
        """Methods that were named; None: all."""
        return None if self.methods is None else tuple(dict.fromkeys(filter(None, self.methods.split(","))))

    @property
    def companions(self) -> Mapping[str, str | None]:
        """Drafter by method, for methods with a model of their own."""
        return {"draft_model": self.draft_model, "medusa": self.medusa, "eagle": self.eagle}

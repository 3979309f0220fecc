"""What `twostroke calibrate` measures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from twostroke.config.checks import text, whole_number, whole_numbers
from twostroke.config.kv_format import KVCacheDType
from twostroke.config.speculation import MAX_AUTO_DRAFTS, MAX_DRAFTS, Method
from twostroke.errors import InvalidParameter

DEFAULT_SIZES = "1,2,3,4,5,6,7,8,9,12,16,24,32,48,64"
_METHOD_OF = {"exit_layers": "early_exit", "draft_model": "draft_model", "medusa": "medusa", "eagle": "eagle"}
"""Options that are about one way of drafting, and which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateOptions:
    """What is tried, and on what."""

    drafts: bool = True
    """Also time every way of drafting; without, it takes about a minute, and step times are all there is."""
    methods: str | None = None
    """Who drafts, with commas between; default: every method that the model has something for."""
    exit_layers: str | None = None
    """Of early_exit, how many layers draft, with commas between; default: every number below that of the model."""
    draft_model: str | None = None
    """Of draft_model: a folder, a GGUF file or a hub id; default: what comes with the embedded model."""
    medusa: str | None = None
    """Of medusa: a folder or a hub id of heads; default: what comes with the embedded model."""
    eagle: str | None = None
    """Of eagle: a folder or a hub id of a head; default: what comes with the embedded model."""
    data: Path | None = None
    """UTF-8 text like what the model is to go on with; default: code, as for `benchmarks spec`."""
    sizes: str = DEFAULT_SIZES
    """Query tokens of the steps that are timed, from 1 on, with commas between."""
    most_drafts: int = MAX_AUTO_DRAFTS
    """Drafts in a step, at most."""
    context_tokens: int = 128
    """Tokens of each prompt."""
    output_tokens: int = 96
    """Tokens that each answer is long."""
    prompts: int = 3
    """Whose acceptances count."""
    repeats: int = 15
    """Steps of each size, at least; the lower quartile counts, as others on the machine can only make steps longer."""
    max_num_batched_tokens: int = 512
    """Tokens of the largest step that is timed; that of the server that goes by it."""
    max_num_seqs: int = 64
    """Requests in the fullest."""
    kv_cache_dtype: KVCacheDType = "auto"
    """Format of the KV cache."""
    seed: int = 0
    """Of the places in the text where prompts begin."""
    output: Path | None = None
    """File for what was measured; default: in ~/.cache/twostroke, where a server looks for it."""

    def __post_init__(self) -> None:
        """Checks what needs no model."""
        if not self.drafts:
            self._check_without_drafts()
        for method in self.asked or ():
            if method not in get_args(Method):
                known = ", ".join(get_args(Method))
                raise InvalidParameter("methods", self.methods, f"names {method!r}; known: {known}")
        whole_number("most_drafts", self.most_drafts, 1, MAX_DRAFTS)
        self._check_sizes()
        if self.asked == ():
            limit = "names no method"
            raise InvalidParameter("methods", self.methods, limit, "Give some with commas between, or leave it out.")
        if self.exit_layers is not None:
            whole_numbers("exit_layers", self.exit_layers, 1, 10_000)
        for name in self.companions:
            if getattr(self, name) is not None:
                text(name, getattr(self, name))
        for name, method in _METHOD_OF.items():
            if getattr(self, name) is not None and self.asked is not None and method not in self.asked:
                limit = f"changes nothing: {method!r} is not among the methods ({self.methods})"
                raise InvalidParameter(name, getattr(self, name), limit, "Name the method, or leave it out.")
        whole_number("context_tokens", self.context_tokens, 2, 1 << 20)
        whole_number("output_tokens", self.output_tokens, 2 * (1 + self.most_drafts), 1 << 20)
        whole_number("prompts", self.prompts, 1, 10_000)
        whole_number("repeats", self.repeats, 3, 10_000)
        whole_number("seed", self.seed, 0)

    def _check_without_drafts(self) -> None:
        """What is about drafts alone changes nothing."""
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
        """The sizes, rising."""
        return whole_numbers("sizes", self.sizes, 1, MAX_DRAFTS + 1)

    @property
    def asked(self) -> tuple[str, ...] | None:
        """The methods that were named; None for all."""
        return None if self.methods is None else tuple(dict.fromkeys(filter(None, self.methods.split(","))))

    @property
    def companions(self) -> Mapping[str, str | None]:
        """Method to what drafts, for those that have something of their own."""
        return {"draft_model": self.draft_model, "medusa": self.medusa, "eagle": self.eagle}

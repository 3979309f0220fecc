"""Workload of an experiment: seeded, so that both sides get the same requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from random import Random
from typing import Any, Literal, get_args

from twostroke.config.checks import check_choice, check_int, check_number
from twostroke.errors import InvalidParameter, UnknownParameter

Prompts = Literal["code", "edit", "shared"]
"""Kinds of prompts. `code`: the beginning of a module. `edit`: a module, then its beginning again. `shared`: all begin
with the same long text."""
MAX_REQUESTS = 64
MAX_PROMPT_WORDS = 1200
MAX_OUTPUT = 1000
MAX_ARRIVALS_S = 30.0
"""Limit for the arrival time of the last request: an experiment should take about a minute."""


@dataclass(frozen=True, slots=True)
class LabRequest:
    """One request to send."""

    arrival_s: float
    prompt: str
    max_tokens: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LabWorkload:
    """Workload that both sides get."""

    seed: int = 0
    num_requests: int = 16
    rate: float = 0.0
    """Arrivals per second, evenly spaced; 0: all at once."""
    prompts: Prompts = "code"
    prompt_words: int = 40
    """Words of most prompts, about three tokens each."""
    min_output: int = 20
    max_output: int = 100
    """Output tokens: drawn between the minimum and the maximum, long answers less often."""
    every_nth_is_long: int = 0
    """Each n-th request has a prompt of `long_words` words and 16 output tokens; 0: none."""
    long_words: int = 900

    def __post_init__(self) -> None:
        """Raise if a value is out of range."""
        check_int("seed", self.seed, 0, 2**31)
        check_int("num_requests", self.num_requests, 1, MAX_REQUESTS)
        check_number("rate", self.rate, 0, 1000, "from 0 (all at once) to 1000 a second")
        check_choice("prompts", self.prompts, get_args(Prompts))
        check_int("prompt_words", self.prompt_words, 1, MAX_PROMPT_WORDS)
        check_int("long_words", self.long_words, 1, MAX_PROMPT_WORDS)
        check_int("max_output", self.max_output, 1, MAX_OUTPUT)
        check_int("min_output", self.min_output, 1, self.max_output)
        check_int("every_nth_is_long", self.every_nth_is_long, 0, MAX_REQUESTS)
        if self.rate and self.num_requests / self.rate > MAX_ARRIVALS_S:
            limit = f"must let all {self.num_requests} requests arrive within {MAX_ARRIVALS_S:g} s"
            raise InvalidParameter("rate", self.rate, limit, "Ask for fewer requests, or for a higher rate.")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> LabWorkload:
        """Return the workload with the given fields.

        Raises:
            UnknownParameter: there is no such field.
            InvalidParameter: a value is out of range.
        """
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise UnknownParameter(name, known, "the workload")
        return cls(**given)

    def requests(self) -> list[LabRequest]:
        """Return the requests in order of arrival; equal fields give equal requests.

        >>> LabWorkload(seed=1).requests() == LabWorkload(seed=1).requests()
        True
        """
        rng = Random(self.seed)
        shared = _module(rng, self.prompt_words)
        found: list[LabRequest] = []
        for index in range(self.num_requests):
            is_long = bool(self.every_nth_is_long) and index % self.every_nth_is_long == self.every_nth_is_long - 1
            num_words = self.long_words if is_long else self.prompt_words
            prompt = self._prompt(rng, num_words, shared, is_long=is_long)
            spread = self.max_output - self.min_output
            num_output = 16 if is_long else self.min_output + round(spread * rng.random() ** 2)
            arrival_s = index / self.rate if self.rate else 0.0
            found.append(LabRequest(arrival_s, prompt, num_output, rng.randrange(2**31)))
        return found

    def _prompt(self, rng: Random, num_words: int, shared: str, *, is_long: bool) -> str:
        if self.prompts == "shared" and not is_long:
            return shared + _module(rng, 8)
        text = _module(rng, num_words)
        return f"{text}\n\n# the same again\n{text[:60]}" if self.prompts == "edit" and not is_long else text


_VERBS = ("add", "area", "count", "find", "merge", "parse", "read", "scale", "sort", "split", "sum", "write")
_NOUNS = ("items", "lines", "nodes", "numbers", "pairs", "paths", "points", "rows", "tokens", "values", "words")


def _module(rng: Random, num_words: int) -> str:
    """Return a module of random functions with about this many words in all."""
    parts: list[str] = []
    num_so_far = 0
    while num_so_far < num_words:
        verb, noun, other = rng.choice(_VERBS), rng.choice(_NOUNS), rng.choice(_NOUNS)
        part = f"def {verb}_{noun}_{rng.randrange(100)}({noun}, {other}):\n     result = []\n"
        part += f"    for value in {noun}:\n        result.append({verb}(value, {other}))\n    return result\n\n\n"
        parts.append(part)
        num_so_far += len(part.split())
    return "".join(parts)

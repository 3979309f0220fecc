"""Workloads: requests with their arrival times. Pure and seeded: equal arguments give equal requests on every machine.

Prompts and outputs have fixed, uniform or exponential lengths, whose order statistics are known. Lengths are whole
tokens, at least one. An exponential length is max(1, round(x)) with x of the given mean, and its expectations are
summed exactly for that rounding, so predictions have no discretisation error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from twostroke.config.checks import check_int, check_number
from twostroke.errors import InvalidParameter
from twostroke.simulation.trace import TRACE_BLOCK, TraceEntry

MAX_LENGTH = 2**24
"""Limit for a length in tokens: longer than any context, and short enough to be drawn and thrown away."""

Kind = Literal["fixed", "uniform", "exponential"]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Distribution of lengths in tokens.

    >>> Lengths.parse("uniform:1:128")
    Lengths(kind='uniform', mean=64.5, low=1, high=128)
    """

    kind: Kind
    mean: float
    """Mean before rounding; for an exponential, its scale."""
    low: int = 1
    high: int = 0
    """Upper bound of a uniform length, `low` the lower one, both inclusive; unused otherwise."""

    @classmethod
    def fixed(cls, length: int) -> Lengths:
        """Return the distribution of a constant length."""
        return cls("fixed", float(_checked("length", length)))

    @classmethod
    def uniform(cls, low: int, high: int) -> Lengths:
        """Return the distribution of whole numbers from low to high, all equally likely."""
        if _checked("high", high) < _checked("low", low):
            raise InvalidParameter("high", high, f"must be at least low, which is {low}")
        return cls("uniform", (low + high) / 2, low, high)

    @classmethod
    def exponential(cls, mean: float) -> Lengths:
        """Return an exponential distribution: many short lengths, few long ones."""
        if not 0 < mean <= MAX_LENGTH / 64:  # one draw in 10^28 is longer than 64 means
            raise InvalidParameter("mean", mean, f"must be more than 0 and at most {MAX_LENGTH // 64}")
        return cls("exponential", float(mean))

    @classmethod
    def parse(cls, text: str, name: str = "lengths") -> Lengths:
        """Parse `fixed:N`, `uniform:LOW:HIGH` or `exponential:MEAN`.

        Args:
            text: one of these.
            name: name of the parameter, for the error.

        Raises:
            InvalidParameter: the text has another form, or a length is out of range.
        """
        try:
            match text.split(":"):
                case ["fixed", length]:
                    return cls.fixed(int(length))
                case ["uniform", low, high]:
                    return cls.uniform(int(low), int(high))
                case ["exponential", mean]:
                    return cls.exponential(float(mean))
                case _:
                    raise ValueError("none of these forms")
        except ValueError as error:  # also InvalidParameter, which names the number that is out of range
            limit = "must be fixed:N, uniform:LOW:HIGH or exponential:MEAN"
            raise InvalidParameter(name, text, f"{limit} ({error})") from error

    def __str__(self) -> str:
        """Return the form that `parse` reads."""
        if self.kind == "uniform":
            return f"uniform:{self.low}:{self.high}"
        return f"{self.kind}:{self.mean:g}"

    def draw(self, count: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
        """Draw `count` lengths; int64 [count]."""
        if self.kind == "fixed":
            return np.full(count, int(self.mean), np.int64)
        if self.kind == "uniform":
            return rng.integers(self.low, self.high, count, endpoint=True, dtype=np.int64)
        return np.maximum(1, np.rint(rng.exponential(self.mean, count))).astype(np.int64)

    def expected_max(self, of: int) -> float:
        """Return E[longest of `of` independent lengths], for whole tokens.

        E[max] = sum over k >= 0 of P(max > k) = sum of 1 - P(length <= k) ** of.
        """
        if self.kind == "fixed":
            return self.mean
        if self.kind == "uniform":
            span = self.high - self.low + 1
            return self.low + sum(1 - (k / span) ** of for k in range(1, span))
        total, k = 1.0, 1  # k = 0: every length is longer than 0
        while True:
            # round(x) <= k  <=>  x < k + 1/2; ties have no weight
            term = 1 - (-math.expm1(-(k + 0.5) / self.mean)) ** of
            if term < 1e-12:
                return total
            total, k = total + term, k + 1

    @property
    def expected(self) -> float:
        """E[length], for whole tokens."""
        return self.expected_max(1)

    def textbook_max_over_mean(self, of: int) -> float:
        """Return E[max of `of`] / mean of the continuous distribution, as textbooks give it.

        Exponential: the harmonic number. Uniform from zero: 2 B / (B + 1). Constant: 1.
        """
        if self.kind == "fixed":
            return 1.0
        if self.kind == "uniform":
            return 2 * of / (of + 1)
        return sum(1 / i for i in range(1, of + 1))


def _checked(name: str, value: int) -> int:
    check_int(name, value, 1, MAX_LENGTH)
    return value


MIN_RATE, MAX_RATE = 1e-6, 1e9
"""Limits for arrivals per second and for the divisor of a trace's times; beyond, waiting times are meaningless."""

MIN_BURSTINESS = 1e-3
"""Lower limit of burstiness: below, nearly all requests arrive at once and the rest never."""

SMALL_VOCAB_SIZE = 128
"""Number of token ids that every vocabulary has; the choice of tokens does not affect times."""

RESERVED_TOKEN_IDS = 16
"""Ids below this are not drawn: models keep their special tokens there."""

MAX_HASH_IDS = 1_000_000
"""Limit for the hash ids of a trace: as many as two tokens of a vocabulary of 1,024 can distinguish."""


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request to send."""

    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    """Output tokens; a request that ignores the end of the text generates exactly this many."""
    arrival_s: float = 0.0
    """Seconds after the start of the run."""
    ignore_eos: bool = True
    seed: int = 0
    background: bool = False
    """Whether it runs in the background: it gets only capacity that other requests leave unused."""

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output."""
        return len(self.prompt_token_ids) + self.max_tokens


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival."""

    requests: tuple[WorkloadRequest, ...]
    description: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Specification that it was made from; saved in the result beside the figures."""

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(r.prompt_token_ids) for r in self.requests)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all outputs if each reaches its limit."""
        return sum(r.max_tokens for r in self.requests)

    @property
    def max_request_tokens(self) -> int:
        """Tokens of prompt and output of the longest request: the context that the workload needs."""
        return max((r.num_tokens for r in self.requests), default=0)

    @property
    def output_lengths(self) -> tuple[int, ...]:
        """Output lengths in order of arrival."""
        return tuple(r.max_tokens for r in self.requests)

    def first(self, count: int) -> Workload:
        """Return the first `count` requests."""
        return Workload(self.requests[:count], {**self.description, "first": count})

    def cut_outputs(self, max_tokens: int) -> Workload:
        """Return the workload with outputs of at most `max_tokens` tokens."""
        cut = tuple(replace(r, max_tokens=min(r.max_tokens, max_tokens)) for r in self.requests)
        return Workload(cut, {**self.description, "max_output_tokens": max_tokens})

    def within_context(self, max_model_len: int) -> Workload:
        """Return the workload without requests that exceed a context of `max_model_len` tokens."""
        kept = tuple(r for r in self.requests if r.num_tokens <= max_model_len)
        return Workload(kept, {**self.description, "max_model_len": max_model_len, "left_out": len(self) - len(kept)})


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticSpec:
    """Specification of a workload to draw."""

    num_requests: int = 64
    prompt_lengths: Lengths = field(default_factory=lambda: Lengths.fixed(64))
    """Lengths of the part of a prompt that it does not share."""
    output_lengths: Lengths = field(default_factory=lambda: Lengths.fixed(64))
    request_rate: float | None = None
    """Random arrivals per second; None queues everything at the start."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of the times between arrivals: 1 is Poisson, inf evenly spaced."""
    num_prefix_groups: int = 0
    """Groups of requests whose prompts share a prefix; 0: nothing is shared."""
    prefix_length: int = 0
    """Tokens that the prompts of a group share."""
    vocab_size: int = 4096
    reserved_token_ids: int = RESERVED_TOKEN_IDS
    """Ids below this are not drawn: models keep their special tokens there."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise if a workload cannot be drawn from these values."""
        check_int("num_requests", self.num_requests, 1)
        if self.request_rate is not None:
            check_number(
                "request_rate", self.request_rate, MIN_RATE, MAX_RATE, f"{MIN_RATE:g} to {MAX_RATE:g} a second"
            )
        if self.burstiness != math.inf:
            check_number("burstiness", self.burstiness, MIN_BURSTINESS, 1e9, f"{MIN_BURSTINESS:g} to 1e9, or inf")
        if self.burstiness != 1 and self.request_rate is None:
            limit = "shapes the times between arrivals, but all requests arrive at the start"
            raise InvalidParameter("burstiness", self.burstiness, limit, "Give a request_rate.")
        check_int("num_prefix_groups", self.num_prefix_groups, 0)
        check_int("prefix_length", self.prefix_length, 0, MAX_LENGTH)
        if (self.num_prefix_groups > 0) != (self.prefix_length > 0):
            raise InvalidParameter(
                "prefix_length",
                self.prefix_length,
                f"can only be set together with num_prefix_groups, which is {self.num_prefix_groups}",
                "Give both, or neither.",
            )
        check_int("seed", self.seed, 0, 2**62)
        if self.vocab_size <= self.reserved_token_ids:
            raise InvalidParameter("vocab_size", self.vocab_size, f"must be more than {self.reserved_token_ids}")

    @property
    def description(self) -> dict[str, Any]:
        """Specification as JSON."""
        names = ("num_requests", "request_rate", "num_prefix_groups", "prefix_length", "vocab_size", "seed")
        own = {name: getattr(self, name) for name in names}
        burstiness = "inf" if self.burstiness == math.inf else self.burstiness  # JSON has no infinity
        return {
            "kind": "synthetic",
            "prompt_lengths": str(self.prompt_lengths),
            "output_lengths": str(self.output_lengths),
            "burstiness": burstiness,
            **own,
        }


def synthetic(spec: SyntheticSpec) -> Workload:
    """Draw a workload.

    Lengths, arrivals and contents have separate random streams, so that a change of one keeps the others.
    """
    length_rng, arrival_rng, content_rng = (np.random.default_rng((spec.seed, stream)) for stream in range(3))
    count = spec.num_requests
    prompt_lens = spec.prompt_lengths.draw(count, length_rng)
    output_lens = spec.output_lengths.draw(count, length_rng)
    arrivals = np.zeros(count)
    if spec.request_rate is not None:
        arrivals = np.cumsum(_gaps(count, spec.request_rate, spec.burstiness, arrival_rng))
    prefixes = [_tokens(spec, spec.prefix_length, content_rng) for _ in range(spec.num_prefix_groups)]
    requests: list[WorkloadRequest] = []
    for i in range(count):
        prefix = prefixes[i % len(prefixes)] if prefixes else ()
        requests.append(
            WorkloadRequest(
                prompt_token_ids=prefix + _tokens(spec, int(prompt_lens[i]), content_rng),
                max_tokens=int(output_lens[i]),
                arrival_s=float(arrivals[i]),
                seed=spec.seed + i,
            )
        )
    return Workload(tuple(requests), spec.description)


def _gaps(count: int, rate: float, burstiness: float, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Return the seconds before each arrival, with mean 1 / rate and coefficient of variation burstiness ** -0.5."""
    if burstiness == math.inf:
        return np.full(count, 1 / rate)
    return rng.gamma(burstiness, 1 / (rate * burstiness), count)  # shape 1 gives the same draws as an exponential


def workload_of_lengths(
    lengths: Sequence[tuple[int, int]],
    *,
    vocab_size: int = 4096,
    seed: int = 0,
    description: Mapping[str, Any] | None = None,
) -> Workload:
    """Return a saturated workload of the given (prompt, output) lengths with random contents."""
    rng = np.random.default_rng(seed)
    spec = SyntheticSpec(vocab_size=vocab_size)
    requests = (
        WorkloadRequest(_tokens(spec, prompt, rng), output, seed=seed + i) for i, (prompt, output) in enumerate(lengths)
    )
    return Workload(tuple(requests), description or {})


def with_arrivals(workload: Workload, arrivals_s: Sequence[float]) -> Workload:
    """Return the requests with other arrival times, which must not decrease."""
    pairs = zip(workload.requests, arrivals_s, strict=True)
    return Workload(tuple(replace(r, arrival_s=t) for r, t in pairs), workload.description)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSpec:
    """Rules that turn a trace into a workload.

    With divisor 64 a 512-token block of the trace becomes one of 8 tokens, the block size to run it with. Shared
    prefixes stay shared, block by block, for every divisor.
    """

    divisor: int = 64
    vocab_size: int = 4096
    reserved_token_ids: int = RESERVED_TOKEN_IDS
    max_output_tokens: int | None = None
    """Limit for every output; None keeps the trace's lengths."""
    time_divisor: float | None = None
    """Divisor of the trace's arrival times; None: all requests arrive at the start."""

    @property
    def block_size(self) -> int:
        """Tokens that one hash id stands for after scaling."""
        return TRACE_BLOCK // self.divisor

    def __post_init__(self) -> None:
        """Check that blocks stay whole and have enough tokens to be distinct."""
        if self.divisor < 1 or TRACE_BLOCK % self.divisor or self.block_size < 2:
            raise InvalidParameter(
                "divisor", self.divisor, f"must divide {TRACE_BLOCK} and leave blocks of 2 tokens or more"
            )


def workload_of_trace(entries: Sequence[TraceEntry], spec: TraceSpec, *, name: str = "trace") -> Workload:
    """Scale a trace: lengths are divided and rounded up, hash ids become contents."""
    requests = tuple(_scaled(i, entry, spec) for i, entry in enumerate(entries))
    description = {"kind": "trace", "trace": name, "num_requests": len(requests), "divisor": spec.divisor}
    return Workload(
        requests, {**description, "max_output_tokens": spec.max_output_tokens, "time_divisor": spec.time_divisor}
    )


def _scaled(index: int, entry: TraceEntry, spec: TraceSpec) -> WorkloadRequest:
    num_prompt_tokens = -(-entry.input_length // spec.divisor)
    contents = (token for hash_id in entry.hash_ids for token in block_content(hash_id, spec))
    # rounding up twice is rounding up once, so the last block's content is cut to between 1 and block_size tokens
    prompt = tuple(contents)[:num_prompt_tokens]
    assert len(prompt) == num_prompt_tokens, f"request {index}: {len(prompt)} tokens for {num_prompt_tokens}"
    output = max(1, -(-entry.output_length // spec.divisor))
    return WorkloadRequest(
        prompt,
        output if spec.max_output_tokens is None else min(output, spec.max_output_tokens),
        arrival_s=entry.timestamp_s / spec.time_divisor if spec.time_divisor else 0.0,
        seed=index,
    )


def block_content(hash_id: int, spec: TraceSpec) -> tuple[int, ...]:
    """Return the tokens that a hash id stands for; different ids give different tokens.

    The digits of the id come first, so that no two ids agree. The rest only has to look random (a multiplicative hash).

    Raises:
        InvalidParameter: the block has too few tokens for the digits.
    """
    base = spec.vocab_size - spec.reserved_token_ids
    num_digits = 2
    while base**num_digits < MAX_HASH_IDS:
        num_digits += 1
    if hash_id >= MAX_HASH_IDS:
        raise InvalidParameter("trace", hash_id, f"contains this hash id; ids must be below {MAX_HASH_IDS:,}")
    if num_digits > spec.block_size:
        limit = (
            f"leaves {spec.block_size} tokens per block; {num_digits} of {base} token ids are needed to make blocks "
            "distinct"
        )
        raise InvalidParameter("trace_divisor", spec.divisor, limit, "Give a smaller divisor.")
    digits = (hash_id // base**i % base for i in range(num_digits))
    scattered = (
        (hash_id * spec.block_size + i + 1) * 2654435761 % (1 << 32) for i in range(num_digits, spec.block_size)
    )
    return tuple(spec.reserved_token_ids + token % base for token in (*digits, *scattered))


def _tokens(spec: SyntheticSpec, count: int, rng: np.random.Generator) -> tuple[int, ...]:
    drawn: npt.NDArray[np.int64] = rng.integers(spec.reserved_token_ids, spec.vocab_size, count)
    return tuple(int(token) for token in drawn)

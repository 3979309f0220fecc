"""Options for a benchmark's workload: drawn at random or read from a trace."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from twostroke.config.checks import check_int, check_number
from twostroke.errors import InvalidParameter
from twostroke.measure.workload import (
    MAX_RATE,
    MIN_RATE,
    Lengths,
    SyntheticSpec,
    TraceSpec,
    Workload,
    synthetic,
    workload_of_trace,
)
from twostroke.simulation.trace import read_trace

MAX_SEED = 2**32 - 1
MAX_NAME_BYTES = 200
"""Limit for the bytes of a result's name: file systems allow 255, and temporary files have longer names."""

_TRACE_ONLY: dict[str, str] = dict.fromkeys(("trace_divisor", "time_divisor"), "give a --trace.")
_WITHOUT_TRACE = "leave out --trace."
_SYNTHETIC_ONLY = {
    "prompt_lengths": _WITHOUT_TRACE,
    "output_lengths": _WITHOUT_TRACE,
    "request_rate": "scale the trace's own times with --time-divisor.",
    "burstiness": "scale the trace's own times with --time-divisor.",
    "num_prefix_groups": _WITHOUT_TRACE,
    "prefix_length": _WITHOUT_TRACE,
    "seed": _WITHOUT_TRACE,
}
"""Options that apply to only one of the two kinds of workload, with the advice if given with the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    """Options: the requests and their arrival times."""

    num_requests: int = 64
    """Number of requests."""
    prompt_lengths: str = "uniform:16:128"
    """Tokens of a prompt: fixed:N, uniform:LOW:HIGH or exponential:MEAN."""
    output_lengths: str = "exponential:64"
    """Tokens of an output, in the same forms; end-of-text tokens are ignored."""
    request_rate: float | None = None
    """Random arrivals per second, even if the engine cannot keep up; default: all are queued at the start."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of the times between arrivals: 1 is Poisson, less is burstier, more is more
    regular, inf is evenly spaced."""
    num_prefix_groups: int = 0
    """Groups of requests whose prompts share a prefix."""
    prefix_length: int = 0
    """Tokens of the prefix that the prompts of a group share."""
    trace: Path | None = None
    """A Mooncake trace whose first num_requests are run instead."""
    trace_divisor: int = 64
    """Divisor of the trace's lengths and blocks; with 64 the block size should be 8."""
    time_divisor: float = 0.0
    """Divisor of the trace's times; 0 queues everything at the start."""
    seed: int = 0
    """Seed of the workload."""

    def __post_init__(self) -> None:
        """Check what can be checked without drawing; raise if an option has no effect."""
        check_int("num_requests", self.num_requests, 1)
        check_int("seed", self.seed, 0, MAX_SEED)
        if self.time_divisor != 0:
            check_number("time_divisor", self.time_divisor, MIN_RATE, MAX_RATE, f"0, or {MIN_RATE:g} to {MAX_RATE:g}")
        others = _TRACE_ONLY if self.trace is None else _SYNTHETIC_ONLY
        defaults = {field.name: field.default for field in fields(self)}
        for name in others:
            value = getattr(self, name)
            if value != defaults[name]:
                limit = "changes nothing without a trace" if self.trace is None else "changes nothing beside a trace"
                raise InvalidParameter(name, value, limit, "Leave it out, or " + others[name])
        if self.trace is None:
            self.spec(vocab_size=4096)  # any size will do: this only checks the other values

    def spec(self, vocab_size: int) -> SyntheticSpec:
        """Return the specification of the workload that is drawn if there is no trace."""
        return SyntheticSpec(
            num_requests=self.num_requests,
            prompt_lengths=Lengths.parse(self.prompt_lengths, "prompt_lengths"),
            output_lengths=Lengths.parse(self.output_lengths, "output_lengths"),
            request_rate=self.request_rate,
            burstiness=self.burstiness,
            num_prefix_groups=self.num_prefix_groups,
            prefix_length=self.prefix_length,
            vocab_size=vocab_size,
            seed=self.seed,
        )

    def workload(self, vocab_size: int) -> Workload:
        """Return the requests that the options describe, with prompts of token ids below `vocab_size`.

        Raises:
            InvalidParameter: the trace cannot be read.
        """
        if self.trace is None:
            return synthetic(self.spec(vocab_size))
        spec = TraceSpec(
            divisor=self.trace_divisor,
            vocab_size=vocab_size,
            time_divisor=self.time_divisor or None,
        )
        return workload_of_trace(read_trace(self.trace)[: self.num_requests], spec, name=self.trace.name)


def check_name(name: object) -> None:
    """Raise if a result's name is not a plain file name.

    Raises:
        InvalidParameter: the name contains a folder, is hidden, or is too long.
    """
    limit = f"must be a file name without folders, not hidden, of at most {MAX_NAME_BYTES} bytes"
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name.encode()) <= MAX_NAME_BYTES:
        raise InvalidParameter("name", name, limit)
    if Path(name).name != name or name.startswith("."):
        raise InvalidParameter("name", name, limit, "The folder is --results.")

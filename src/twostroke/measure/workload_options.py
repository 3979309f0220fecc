"""Which requests a benchmark makes, as options: drawn at random or read from a trace."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from twostroke.config.checks import number, whole_number
from twostroke.errors import InvalidParameter
from twostroke.measure.workload import (
    MAX_RATE,
    MIN_RATE,
    Lengths,
    SyntheticSpec,
    TraceSpec,
    Workload,
    of_trace,
    synthetic,
)
from twostroke.simulation.trace import read_trace

MAX_SEED = 2**32 - 1
MAX_NAME_BYTES = 200
"""Of a result; file systems take 255, and the files are written under longer names first."""

_OF_A_TRACE: dict[str, str] = dict.fromkeys(("trace_divisor", "time_divisor"), "give a --trace.")
_GO_WITHOUT = "leave out --trace."
_OF_A_DRAW = {
    "prompt_lengths": _GO_WITHOUT,
    "output_lengths": _GO_WITHOUT,
    "request_rate": "scale the trace's own times with --time-divisor.",
    "burstiness": "scale the trace's own times with --time-divisor.",
    "num_prefix_groups": _GO_WITHOUT,
    "prefix_length": _GO_WITHOUT,
    "seed": _GO_WITHOUT,
}
"""Options that only one of the two kinds of workload has, and what to do instead of giving them with the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    """What is asked, and when."""

    num_requests: int = 64
    """Requests to make."""
    prompt_lengths: str = "uniform:16:128"
    """Tokens of a prompt: fixed:N, uniform:LOW:HIGH or exponential:MEAN."""
    output_lengths: str = "exponential:64"
    """Tokens of an output, in the same forms; the end of the text is ignored."""
    request_rate: float | None = None
    """Arrivals per second, at random, whether or not the engine keeps up; default: all are queued at the start."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of the times between arrivals: 1 is Poisson, less comes in bursts, more is more
    regular, inf evenly spaced."""
    num_prefix_groups: int = 0
    """Groups of requests whose prompts begin alike."""
    prefix_length: int = 0
    """Tokens that the prompts of a group share, before their own."""
    trace: Path | None = None
    """A Mooncake trace whose first num_requests are run instead."""
    trace_divisor: int = 64
    """Lengths and blocks of the trace are divided by this; with 64 the block size should be 8."""
    time_divisor: float = 0.0
    """The trace's times are divided by this; 0 queues everything at the start."""
    seed: int = 0
    """Of the workload."""

    def __post_init__(self) -> None:
        """Checks what can be checked without drawing; every option changes something, or is refused."""
        whole_number("num_requests", self.num_requests, 1)
        whole_number("seed", self.seed, 0, MAX_SEED)
        if self.time_divisor != 0:
            number("time_divisor", self.time_divisor, MIN_RATE, MAX_RATE, f"0, or {MIN_RATE:g} to {MAX_RATE:g}")
        others = _OF_A_TRACE if self.trace is None else _OF_A_DRAW
        defaults = {field.name: field.default for field in fields(self)}
        for name in others:
            value = getattr(self, name)
            if value != defaults[name]:
                limit = "changes nothing without a trace" if self.trace is None else "changes nothing beside a trace"
                raise InvalidParameter(name, value, limit, "Leave it out, or " + others[name])
        if self.trace is None:
            self.spec(vocab_size=4096)  # any: this only refuses what cannot be drawn

    def spec(self, vocab_size: int) -> SyntheticSpec:
        """What is drawn when no trace is run."""
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
        """The requests that the options describe, with prompts of token ids below `vocab_size`.

        Raises:
            InvalidParameter: a trace that cannot be read.
        """
        if self.trace is None:
            return synthetic(self.spec(vocab_size))
        spec = TraceSpec(
            divisor=self.trace_divisor,
            vocab_size=vocab_size,
            time_divisor=self.time_divisor or None,
        )
        return of_trace(read_trace(self.trace)[: self.num_requests], spec, name=self.trace.name)


def check_name(name: object) -> None:
    """Refuses names of results that are no plain file names.

    Raises:
        InvalidParameter: with a folder in it, hidden, or too long.
    """
    limit = f"must be a file name without folders, not hidden, of at most {MAX_NAME_BYTES} bytes"
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name.encode()) <= MAX_NAME_BYTES:
        raise InvalidParameter("name", name, limit)
    if Path(name).name != name or name.startswith("."):
        raise InvalidParameter("name", name, limit, "The folder is --results.")

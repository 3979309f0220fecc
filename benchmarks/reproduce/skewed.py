"""The skewed workload of R3 and R4: many short requests and a few that need all of the context, as chats have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.reproduce.claim import ReproduceOptions
from twostroke.measure.workload import TraceSpec, Workload, of_lengths, of_trace
from twostroke.simulation.trace import read_trace

DIVISOR = 16
"""Trace lengths are divided by this: prompts of 750 tokens on average, 7,900 at most."""
TRACE = "mooncake_conversation.jsonl"


@dataclass(frozen=True, slots=True)
class Residence:
    """What a workload does to KV memory, from its lengths alone, when each prompt is computed in one step.

    A request of p prompt and o output tokens is there for o steps, with p, p + 1, … p + o - 1 tokens (the last token
    that is sampled is never computed).
    """

    mean_len: float
    """Tokens of a live request, on average over requests and their steps."""
    max_len: int
    paged_waste: float
    """Share of the slots in blocks of `block_size` that hold nothing."""
    contiguous_waste: float
    """The same when each request is given room for the longest, in whole blocks."""

    @classmethod
    def of(cls, workload: Workload, block_size: int) -> Residence:
        """Sums over every request and step."""
        used = allocated = steps = 0
        for request in workload.requests:
            lens = np.arange(request.max_tokens) + len(request.prompt_token_ids)
            used += int(lens.sum())
            allocated += int((-(-lens // block_size) * block_size).sum())
            steps += len(lens)
        longest = workload.max_request_tokens
        room_for_longest = -(-longest // block_size) * block_size
        return cls(used / steps, longest, 1 - used / allocated, 1 - used / steps / room_for_longest)


def skewed_workloads(options: ReproduceOptions) -> dict[str, Workload]:
    """A synthetic one, always; the trace that it imitates, when it is there."""
    workloads = {"imitated": _imitated(8000 if options.full else 400, options.seed)}
    path = options.traces / TRACE
    if path.exists():
        entries = read_trace(path)
        trace = of_trace(entries if options.full else entries[:400], TraceSpec(divisor=DIVISOR), name=TRACE)
        workloads["trace"] = trace
    return workloads


def _imitated(count: int, seed: int) -> Workload:
    """Log-normal lengths with the logarithmic mean and deviation of the conversation trace, over DIVISOR."""
    rng = np.random.default_rng(seed)
    prompts = _whole(rng.lognormal(8.737, 1.199, count) / DIVISOR, at_most=7800)
    outputs = _whole(rng.lognormal(5.336, 1.358, count) / DIVISOR, at_most=120)
    description = {"kind": "log-normal, after the conversation trace", "num_requests": count, "divisor": DIVISOR}
    return of_lengths(list(zip(prompts, outputs, strict=True)), seed=seed, description={**description, "seed": seed})


def _whole(lengths: Sequence[float] | np.ndarray, at_most: int) -> list[int]:
    return [min(at_most, max(1, round(float(length)))) for length in lengths]

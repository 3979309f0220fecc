"""R3 and R4: KV memory under a skewed load, paged against contiguous.

The load is many short requests and a few that need all of the context, as in chats.

R3, share of the allocated memory that holds nothing, sampled at every step. Contiguous reservation gives each request
space for the longest one: 1 - mean/max of it is empty. Paged memory wastes only the unfilled end of each request's last
block: about 7.5 slots of 16.

R4, requests that run at once in the same bytes. Contiguous: bytes / space for the longest request. Paged: bytes / mean
length of a live request. So the ratio is max_len / mean_len, less the memory that is free but too small for the request
at the head of the queue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.claim import Claim, ReproduceOptions, Reproduction
from benchmarks.counting_engine import counting_engine
from twostroke.config.cache import CacheConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.kv_cache.manager import KVCacheManager
from twostroke.measure.figure import bar_chart
from twostroke.measure.report import percentiles
from twostroke.measure.workload import TraceSpec, Workload, workload_of_lengths, workload_of_trace
from twostroke.served_run import Run
from twostroke.simulation.trace import read_trace

BLOCK_SIZE = 16
NUM_SEQS = 32
LONGEST_THAT_FIT = 8
"""Requests of the greatest length for which R4 has KV memory."""
KINDS = ("paged", "contiguous")
DIVISOR = 16
"""Divisor of the trace's lengths: prompts of 750 tokens on average, 7,900 at most."""
TRACE = "mooncake_conversation.jsonl"


@dataclass(frozen=True, slots=True)
class KVResidency:
    """KV memory of a workload, from its lengths alone, if each prompt is computed in one step.

    A request of p prompt and o output tokens stays for o steps, with p, p + 1, … p + o - 1 tokens (the last sampled
    token is never computed).
    """

    mean_len: float
    """Tokens of a live request, averaged over requests and their steps."""
    max_len: int
    paged_waste: float
    """Unused share of the slots in blocks of `block_size`."""
    contiguous_waste: float
    """Unused share if each request gets space for the longest, in whole blocks."""

    @classmethod
    def of(cls, workload: Workload, block_size: int) -> KVResidency:
        """Sum over every request and step."""
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
    """Return an imitated workload, and the trace that it imitates if that is available."""
    workloads = {"imitated": _imitated(8000 if options.full else 400, options.seed)}
    path = options.traces / TRACE
    if path.exists():
        entries = read_trace(path)
        trace = workload_of_trace(entries if options.full else entries[:400], TraceSpec(divisor=DIVISOR), name=TRACE)
        workloads["trace"] = trace
    return workloads


def _imitated(count: int, seed: int) -> Workload:
    """Return log-normal lengths with the logarithmic mean and deviation of the conversation trace, over DIVISOR."""
    rng = np.random.default_rng(seed)
    prompts = _whole(rng.lognormal(8.737, 1.199, count) / DIVISOR, at_most=7800)
    outputs = _whole(rng.lognormal(5.336, 1.358, count) / DIVISOR, at_most=120)
    description = {"kind": "log-normal, after the conversation trace", "num_requests": count, "divisor": DIVISOR}
    return workload_of_lengths(
        list(zip(prompts, outputs, strict=True)), seed=seed, description={**description, "seed": seed}
    )


def _whole(lengths: Sequence[float] | np.ndarray, at_most: int) -> list[int]:
    return [min(at_most, max(1, round(float(length)))) for length in lengths]


class WasteSampler:
    """Sum of the bytes of used blocks, and of those that hold something, over all steps."""

    def __init__(self) -> None:
        self.allocated = self.used = 0

    def __call__(self, kv: KVCacheManager) -> None:
        usage = kv.usage()
        self.allocated += usage.allocated_bytes
        self.used += usage.filled_bytes

    @property
    def waste(self) -> float:
        """Share of the allocated bytes that held nothing."""
        return 1 - self.used / self.allocated


_Found = tuple[tuple[Claim, ...], dict[str, Any]]
"""Claims of one workload, and their data."""


def reproduce_waste(options: ReproduceOptions) -> Reproduction:
    """R3: predict from the lengths alone, then count."""
    found = _reproduction(options, _waste, {"max_num_seqs": NUM_SEQS})
    shown = [claim for claim in found.claims if claim.predicted is not None]
    labels = [claim.what.replace(": ", "\n").replace(", ", ",\n") for claim in shown]
    draw = bar_chart(labels, _beside(shown), "share of allocated slots that is empty")
    return replace(found, draw=draw, figure_size=(9.0, 4.0))


def _waste(name: str, workload: Workload, residence: KVResidency) -> _Found:
    # every prompt in one step, so that a request's tokens are known from its age
    scheduler = SchedulerConfig(max_num_seqs=NUM_SEQS, enable_chunked_prefill=False)
    samplers = {kind: WasteSampler() for kind in KINDS}
    for kind, sampler in samplers.items():
        _run("R3", workload, kind, scheduler, at_submit=sampler)
    measured = {kind: sampler.waste for kind, sampler in samplers.items()}
    rule_of_thumb = (BLOCK_SIZE - 1) / 2 / residence.mean_len
    claims = (
        Claim.within(f"{name}: paged, predicted to the slot", residence.paged_waste, measured["paged"], 1e-9),
        Claim.at_most(f"{name}: paged, predicted as 7.5 / mean", 0.04, measured["paged"], rule_of_thumb),
        Claim.within(f"{name}: contiguous", residence.contiguous_waste, measured["contiguous"], 1e-9),
        Claim.at_least(f"{name}: contiguous, of max_model_len", 0.60, measured["contiguous"]),
    )
    return claims, {"mean_len": residence.mean_len, "max_len": residence.max_len, "waste": measured}


def reproduce_concurrency(options: ReproduceOptions) -> Reproduction:
    """R4: predict from the lengths, then count running requests while requests wait for KV memory."""
    found = _reproduction(options, _concurrency, {"longest_that_fit": LONGEST_THAT_FIT})
    ratios = [claim for claim in found.claims if claim.rule.startswith("within") and "/" in claim.what]
    shown = _beside(ratios, "predicted: max / mean length")
    return replace(found, draw=bar_chart(list(found.details), shown, "requests at once, paged / contiguous"))


def _concurrency(name: str, workload: Workload, residence: KVResidency) -> _Found:
    scheduler = SchedulerConfig(max_num_seqs=4096, max_num_batched_tokens=1 << 20)
    num_blocks = LONGEST_THAT_FIT * -(-residence.max_len // BLOCK_SIZE)
    # mean filled slots over requests and steps, divided by the filled share
    predicted = residence.max_len / (residence.mean_len / (1 - residence.paged_waste))
    runs = {kind: _run("R4", workload, kind, scheduler, num_blocks) for kind in KINDS}
    running = {kind: [step.num_seqs for step in run.steps if step.num_waiting] for kind, run in runs.items()}
    mean = {kind: percentiles(counts)["mean"] for kind, counts in running.items()}
    ratio = mean["paged"] / mean["contiguous"]
    claims = (
        Claim.within(f"{name}: running at once, contiguous", LONGEST_THAT_FIT, mean["contiguous"], 1e-9),
        Claim.within(f"{name}: running at once, paged / contiguous", predicted, ratio, 0.2),
        Claim.at_least(f"{name}: most at once, paged / contiguous", 5.0, max(running["paged"]) / LONGEST_THAT_FIT),
    )
    return claims, {
        "num_blocks": num_blocks,
        "max_len": residence.max_len,
        "mean_len": residence.mean_len,
        "max_over_mean": residence.max_len / residence.mean_len,
        "running": {kind: percentiles(counts) for kind, counts in running.items()},
    }


def _reproduction(
    options: ReproduceOptions, measure: Callable[[str, Workload, KVResidency], _Found], config: dict[str, int]
) -> Reproduction:
    """Measure every workload; add a remark if there is no trace."""
    workloads = skewed_workloads(options)
    found = {
        name: measure(name, workload, KVResidency.of(workload, BLOCK_SIZE)) for name, workload in workloads.items()
    }
    missing = f"no trace in {options.traces_name}: only the imitated workload was run"
    return Reproduction(
        claims=tuple(claim for of_workload, _ in found.values() for claim in of_workload),
        config={"block_size": BLOCK_SIZE, **config},
        workload={name: workload.description for name, workload in workloads.items()},
        details={name: of_workload for name, (_, of_workload) in found.items()},
        remarks=() if "trace" in workloads else (missing,),
    )


def _run(
    title: str,
    workload: Workload,
    kind: str,
    scheduler: SchedulerConfig,
    num_blocks: int | None = None,
    at_submit: Callable[[KVCacheManager], None] | None = None,
) -> Run:
    cache = CacheConfig(
        block_size=BLOCK_SIZE,
        num_kv_blocks=num_blocks,
        enable_prefix_caching=False,
        kv_reservation="paged" if kind == "paged" else "contiguous",
    )
    engine = counting_engine(scheduler, cache, max_model_len=workload.max_request_tokens, at_submit=at_submit)
    return engine.run(workload, progress=f"{title}, {kind}")


def _beside(claims: Sequence[Claim], predicted: str = "predicted") -> dict[str, list[float]]:
    return {predicted: [claim.predicted or 0.0 for claim in claims], "measured": [claim.measured for claim in claims]}

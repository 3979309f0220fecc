"""Summary of a run: throughput of prefill and decode, latencies, binding limits, and the engine's own time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from twostroke.batch import Limit
from twostroke.measure.report import percentiles
from twostroke.served_run import Run, StepSample

_MAX_POINTS = 100
"""Most points of a time series in a result file."""


def summarize(run: Run) -> dict[str, Any]:
    """Return everything that a result file contains about a run; times in seconds, rates in tokens per second."""
    return {
        "duration_s": run.duration_s,
        "num_requests": len(run.requests),
        "num_preemptions": sum(r.times.num_preemptions for r in run.requests),
        "num_cached_tokens": sum(r.num_cached_tokens for r in run.requests),
        "throughput": throughput(run),
        "latency": latencies(run),
        "steps": len(run.steps),
        "limited_by": _shares(run.steps),
        "own_time_s": own_time_by_batch_size(run.steps),
        "over_time": over_time(run),
    }


def throughput(run: Run) -> dict[str, float]:
    """Return tokens per second of prefill, decode and output, and requests per second, over the whole duration."""
    prefill, decode = sum(s.num_prefill_tokens for s in run.steps), sum(s.num_decode_tokens for s in run.steps)
    return {
        "prefill_tok_s": prefill / run.duration_s,
        "decode_tok_s": decode / run.duration_s,
        "output_tok_s": run.num_output_tokens / run.duration_s,
        "requests_per_s": len(run.requests) / run.duration_s,
    }


def latencies(run: Run) -> dict[str, dict[str, float]]:
    """Return percentiles over requests; those of ITL are over all gaps between tokens."""
    times = [request.times for request in run.requests]
    return {
        "queue_time_s": percentiles([t.queue_time_s for t in times]),
        "ttft_s": percentiles([t.ttft_s for t in times]),
        "tpot_s": percentiles([t.tpot_s for t in times if t.tpot_s is not None]),
        "itl_s": percentiles([gap for t in times for gap in t.itl_s]),
        "e2e_s": percentiles([t.e2e_s for t in times]),
    }


def own_time_by_batch_size(steps: Sequence[StepSample]) -> dict[str, dict[str, float]]:
    """Return the engine's own time per step, by number of requests in the batch."""
    by_size: dict[int, list[float]] = defaultdict(list)
    for step in steps:
        by_size[step.num_seqs].append(step.own_s)
    return {str(size): percentiles(by_size[size]) for size in sorted(by_size)}


def over_time(run: Run) -> dict[str, list[Any]]:
    """Return the run in parts of equally many steps: end time, batch and queue sizes, and the most frequent limit."""
    series: dict[str, list[Any]] = {
        name: [] for name in ("end_s", "num_seqs", "num_tokens", "num_waiting", "limited_by")
    }
    size = -(-len(run.steps) // _MAX_POINTS) or 1
    for begin in range(0, len(run.steps), size):
        part = run.steps[begin : begin + size]
        series["end_s"].append(part[-1].end_s)
        series["num_seqs"].append(_mean([s.num_seqs for s in part]))
        series["num_tokens"].append(_mean([s.num_tokens for s in part]))
        series["num_waiting"].append(_mean([s.num_waiting for s in part]))
        series["limited_by"].append(Counter(str(s.limited_by) for s in part).most_common(1)[0][0])
    return series


def _shares(steps: Sequence[StepSample]) -> dict[str, float]:
    count = Counter(s.limited_by for s in steps)
    return {str(limit): count[limit] / len(steps) for limit in Limit} if steps else {}


def _mean(values: Sequence[int]) -> float:
    return round(sum(values) / len(values), 3)

"""Figures of one side of an experiment, for one run and for all runs; pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import median

from twostroke.outputs import RequestOutput


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one run of a side; times in milliseconds."""

    duration_s: float
    """Seconds from the first arrival to the last token."""
    output_tokens_per_s: float
    tokens_per_s_a_process: float
    """Output tokens per second and engine process: two pools are two processes with twice the cores."""
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float | None
    itl_p50_ms: float | None
    itl_p99_ms: float | None
    """Both None if drafts were verified: a step then gives several tokens and half of the gaps are 0. Use TPOT."""
    longest_gap_ms: float | None
    """Longest gap between two tokens of an answer."""
    e2e_p50_ms: float
    most_running: int
    """Most requests that ran at once."""
    num_preemptions: int
    cached_share: float
    """Share of prompt tokens found in the prefix cache."""
    tokens_per_pass: float | None
    """Mean tokens per step and request; None if no drafts were verified."""
    rejected_share: float | None
    """Share of verified draft tokens that were rejected; None if none were verified."""
    kv_capacity_tokens: int
    """Tokens that fit in KV memory."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Spread of a figure over all runs of a side."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of one value per run.

        >>> Spread.of([3.0, 1.0, 2.0])
        Spread(median=2.0, low=1.0, high=3.0)
        """
        return cls(median(values), min(values), max(values))


Measured = Mapping[str, Spread | None]
"""Spread of each figure by name; None if a run lacks the figure."""


def measured(runs: Sequence[Figures]) -> Measured:
    """Return the spread of each figure over the runs of a side."""
    found: dict[str, Spread | None] = {}
    for name in (field.name for field in fields(Figures)):
        values = [getattr(run, name) for run in runs]
        found[name] = None if None in values else Spread.of(values)
    return found


def apart(a: Spread | None, b: Spread | None) -> int:
    """Return 1 if every run of b is above every run of a, -1 if below, else 0 (the difference may be chance).

    Four runs of each side without a real difference come apart once in 35 times.

    >>> apart(Spread(2, 1, 3), Spread(5, 4, 6)), apart(Spread(2, 1, 3), Spread(4, 3, 6)), apart(None, Spread(5, 4, 6))
    (1, 0, 0)
    """
    if a is None or b is None:
        return 0
    return int(b.low > a.high) - int(b.high < a.low)


def figures_of(
    outputs: Sequence[RequestOutput],
    first_arrival_s: float,
    *,
    num_processes: int,
    most_running: int,
    kv_capacity_tokens: int,
) -> Figures:
    """Compute the figures of a run from its answers; each answer has at least one token."""
    metrics = [known for output in outputs if (known := output.metrics) is not None]
    assert metrics, "no request got a token"
    gaps = [gap for known in metrics for gap in known.itl_s]
    end_s = max(known.arrival_time_s + known.e2e_s for known in metrics)
    num_tokens = sum(len(part.token_ids) for output in outputs for part in output.outputs)
    drafts = [known.drafts for known in metrics if known.drafts is not None]
    num_passes = sum(known.num_passes for known in drafts)
    num_drafts = sum(known.num_draft_tokens for known in drafts)
    has_itl = bool(gaps) and not num_drafts
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    tpots = [known.tpot_s for known in metrics if known.tpot_s is not None]
    ttfts = [known.ttft_s for known in metrics]
    return Figures(
        duration_s=end_s - first_arrival_s,
        output_tokens_per_s=num_tokens / (end_s - first_arrival_s),
        tokens_per_s_a_process=num_tokens / (end_s - first_arrival_s) / num_processes,
        ttft_p50_ms=1e3 * percentile(ttfts, 0.5),
        ttft_p99_ms=1e3 * percentile(ttfts, 0.99),
        tpot_p50_ms=1e3 * percentile(tpots, 0.5) if tpots else None,
        itl_p50_ms=1e3 * percentile(gaps, 0.5) if has_itl else None,
        itl_p99_ms=1e3 * percentile(gaps, 0.99) if has_itl else None,
        longest_gap_ms=1e3 * max(gaps) if gaps else None,
        e2e_p50_ms=1e3 * percentile([known.e2e_s for known in metrics], 0.5),
        most_running=most_running,
        num_preemptions=sum(known.num_preemptions for known in metrics),
        cached_share=sum(output.num_cached_tokens for output in outputs) / num_prompt,
        tokens_per_pass=sum(known.num_tokens for known in drafts) / num_passes if num_passes else None,
        rejected_share=1 - sum(known.num_accepted_tokens for known in drafts) / num_drafts if num_drafts else None,
        kv_capacity_tokens=kv_capacity_tokens,
    )


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed.

    >>> percentile([3.0, 1.0, 2.0], 0.5), percentile([3.0, 1.0, 2.0], 0.99)
    (2.0, 3.0)
    """
    ordered = sorted(values)
    return ordered[max(0, -(-round(share * len(ordered) * 1000) // 1000) - 1)]


Answers = Sequence[tuple[int, ...]]
"""Token ids of each request's answer in one run."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Numbers of requests whose answers are equal."""

    num_requests: int
    num_equal: int
    """Requests with the same answer in all runs of both sides."""
    num_steady: int
    """Requests with the same answer in all runs of each side, even if the sides differ."""
    num_runs: int
    """Number of runs of both sides together."""

    @classmethod
    def of(cls, a: Sequence[Answers], b: Sequence[Answers]) -> Tokens:
        """Compare all runs, request by request."""
        mine, theirs = ([set(answers) for answers in zip(*side, strict=True)] for side in (a, b))
        pairs = list(zip(mine, theirs, strict=True))
        num_equal = sum(len(ours | others) == 1 for ours, others in pairs)
        num_steady = sum(len(ours) == len(others) == 1 for ours, others in pairs)
        return cls(len(pairs), num_equal, num_steady, len(a) + len(b))

    def told(self, *, may_differ: bool) -> str:
        """Return the comparison in words.

        Args:
            may_differ: whether the sides round K and V differently.
        """
        if self.num_equal == self.num_requests:
            return f"Tokens: equal for all {self.num_requests} requests, in all {self.num_runs} runs."
        counts = f"Tokens: equal for {self.num_equal} of {self.num_requests} requests in all {self.num_runs} runs."
        if may_differ and self.num_steady == self.num_requests:
            return f"{counts} The two sides round K and V differently; each side gives the same tokens in every run."
        return f"{counts} That is a bug in the engine: none of these settings may change a token. Please report it."

"""Figures of a load run: latencies, rates, goodput, refusals, and the load generator's own share. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from twostroke.cost.price import RunCost
from twostroke.errors import InvalidParameter
from twostroke.measure.report import percentiles
from twostroke.measure.serve.load import LoadRun
from twostroke.measure.serve.openai_wire import Exchange

_DURATIONS: Mapping[str, Callable[[Exchange], float | None]] = {
    "ttft": lambda e: e.ttft_s,
    "tpot": lambda e: e.tpot_s,
    "e2el": lambda e: e.e2e_s,
}
"""Durations that an SLO can limit, under vLLM's names."""

_KEPT_MESSAGES = 5
"""Number of failure messages kept in a result file."""

_MAX_POINTS = 100
"""Most points of a time series in a result file."""

REFUSALS = frozenset({"429", "503"})
"""Failures by which a server reports overload; all others count as errors."""


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits that a request must keep to count as good.

    >>> Slo.parse(["ttft:300", "tpot:50"])
    Slo(limits_s={'ttft': 0.3, 'tpot': 0.05})
    """

    limits_s: Mapping[str, float]

    @classmethod
    def parse(cls, pairs: Sequence[str]) -> Slo:
        """Parse NAME:MILLISECONDS pairs; one text may hold several, separated by spaces or commas.

        Raises:
            InvalidParameter: a pair has another form, an unknown name, or a name that was already given.
        """
        limits_s: dict[str, float] = {}
        for pair in " ".join(pairs).replace(",", " ").split():
            name, _, value = pair.partition(":")
            try:
                limit_s = float(value) / 1000
            except ValueError:
                limit_s = 0.0
            if name not in _DURATIONS or name in limits_s or not 0 < limit_s < float("inf"):
                form = f"must be NAME:MILLISECONDS, once for each of {', '.join(_DURATIONS)}"
                raise InvalidParameter("goodput", pair, form, "As in: ttft:300 tpot:50.")
            limits_s[name] = limit_s
        return cls(limits_s)

    def missed(self, exchange: Exchange) -> list[str]:
        """Return the limits that a successful request exceeded; a single token has no TPOT."""
        found = ((name, _DURATIONS[name](exchange), limit_s) for name, limit_s in self.limits_s.items())
        return [name for name, value, limit_s in found if value is not None and value > limit_s]


def figures_of(run: LoadRun, slo: Slo, price_per_hour: float | None = None) -> dict[str, Any]:
    """Return everything that a result file contains about a run; times in seconds, rates per second.

    Args:
        run: the requests that were sent and their answers.
        slo: the limits that a good request keeps.
        price_per_hour: price of the server's machines; None leaves out the cost.
    """
    well = [e for e in run.exchanges if e.failure is None]
    duration_s = run.duration_s
    num_tokens = sum(e.num_output_tokens for e in well)
    good = [e for e in well if not slo.missed(e)]
    prompt_tokens = [e.prompt_tokens for e in well if e.prompt_tokens is not None]
    cost = None
    if price_per_hour is not None:
        all_known = len(prompt_tokens) == len(well)
        num_prompt_tokens = sum(prompt_tokens) if all_known else None
        cost = asdict(
            RunCost.of(price_per_hour, duration_s, num_prompt_tokens=num_prompt_tokens, num_output_tokens=num_tokens)
        )
    return {
        "duration_s": duration_s,
        "num_requests": len(run.exchanges),
        "num_completed": len(well),
        "num_output_tokens": num_tokens,
        "num_prompt_tokens": sum(prompt_tokens) if prompt_tokens else None,
        "num_cached_tokens": sum(e.cached_tokens or 0 for e in well),
        "throughput": _per_second(
            duration_s,
            {"requests_per_s": len(well), "output_tok_s": num_tokens, "prompt_tok_s": sum(prompt_tokens)},
        ),
        "goodput": {
            "slo_ms": {name: 1000 * limit_s for name, limit_s in slo.limits_s.items()},
            **_per_second(duration_s, {"requests_per_s": len(good)}),
            "share": len(good) / len(run.exchanges) if run.exchanges else 0.0,
            "missed": dict(Counter(name for e in well for name in slo.missed(e))),
        },
        "cost": cost,
        "latency": latencies(well),
        "from_sent": {"ttft_s": percentiles([e.ttft_s - e.lateness_s for e in well if e.ttft_s is not None])},
        "failures": failures(run.exchanges),
        "finish_reasons": dict(Counter(str(e.finish_reason) for e in well)),
        "generator": _generator(run),
        "over_time": over_time(run),
        "remarks": remarks(run),
    }


def latencies(exchanges: Sequence[Exchange]) -> dict[str, dict[str, float]]:
    """Return percentiles over requests; gaps between tokens and chunks are taken over all of them."""
    return {
        "ttft_s": percentiles([e.ttft_s for e in exchanges if e.ttft_s is not None]),
        "tpot_s": percentiles([e.tpot_s for e in exchanges if e.tpot_s is not None]),
        "itl_s": percentiles([itl for e in exchanges for itl in e.itl_s]),
        "gap_s": percentiles([gap for e in exchanges for gap in e.gaps_s]),
        "e2e_s": percentiles([e.e2e_s for e in exchanges]),
    }


def failures(exchanges: Sequence[Exchange]) -> dict[str, Any]:
    """Return failures by kind, and the latency and Retry-After of refusals."""
    failed = [e for e in exchanges if e.failure is not None]
    refused = [e for e in failed if e.failure in REFUSALS]
    advised = [e.retry_after_s for e in refused if e.retry_after_s is not None]
    return {
        "by_kind": dict(Counter(str(e.failure) for e in failed)),
        "num_refused": len(refused),
        "num_errors": len(failed) - len(refused),
        "refusal_latency_s": percentiles([e.end_s - e.sent_s for e in refused]),
        "num_with_retry_after": len(advised),
        "retry_after_s": percentiles(advised),
        "messages": list(dict.fromkeys(e.message for e in failed if e.message))[:_KEPT_MESSAGES],
    }


def remarks(run: LoadRun) -> list[str]:
    """Return warnings that a reader needs to judge the figures."""
    found: list[str] = []
    well = [e for e in run.exchanges if e.failure is None]
    uncounted = sum(e.completion_tokens is not None and e.completion_tokens != sum(e.chunk_tokens) for e in well)
    if uncounted:
        found.append(
            f"{uncounted} answers had other numbers of tokens than their chunks: ITL is computed from the chunks, "
            "TPOT and throughput from the server's count"
        )
    unbilled = sum(e.completion_tokens is None for e in well)
    if unbilled:
        found.append(f"{unbilled} answers had no usage: each chunk with text counts as one token")
    if run.duration_s and run.generator_cpu_s > 0.8 * run.duration_s:
        share = run.generator_cpu_s / run.duration_s
        found.append(f"the load generator was busy {share:.0%} of the time: this affects the figures")
    return found


def over_time(run: LoadRun) -> dict[str, list[float]]:
    """Return the run in equal parts of time: requests in flight at the end, and output tokens per second."""
    width_s = run.duration_s / _MAX_POINTS
    if not width_s:
        return {"end_s": [], "under_way": [], "output_tok_s": []}
    begun, ended, tokens = Counter[int](), Counter[int](), Counter[int]()
    for e in run.exchanges:
        begun[_part(e.scheduled_s, width_s)] += 1
        ended[_part(e.end_s, width_s)] += 1
        for time_s, count in zip(e.chunk_times_s, e.chunk_tokens, strict=True):
            tokens[_part(time_s, width_s)] += count
    under_way: list[float] = []
    now = 0
    for i in range(_MAX_POINTS):
        now += begun[i] - ended[i]
        under_way.append(now)
    return {
        "end_s": [(i + 1) * width_s for i in range(_MAX_POINTS)],
        "under_way": under_way,
        "output_tok_s": [tokens[i] / width_s for i in range(_MAX_POINTS)],
    }


def _part(time_s: float, width_s: float) -> int:
    return min(int(time_s / width_s), _MAX_POINTS - 1)


def _generator(run: LoadRun) -> dict[str, Any]:
    num_tokens = sum(sum(e.chunk_tokens) for e in run.exchanges)
    return {
        "lateness_s": percentiles([e.lateness_s for e in run.exchanges]),
        "cpu_s": run.generator_cpu_s,
        "cpu_us_per_token": 1e6 * run.generator_cpu_s / num_tokens if num_tokens else None,
    }


def _per_second(duration_s: float, counts: Mapping[str, int]) -> dict[str, float]:
    return {name: count / duration_s if duration_s else 0.0 for name, count in counts.items()}

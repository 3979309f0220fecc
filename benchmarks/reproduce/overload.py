"""Three times more requests than a server can do: what it refuses, how soon, and what becomes of those that it takes.

capacity    closed loop, as many requests at a time as the engine has slots: requests per second
SLO         TTFT: the p99 at capacity, and the time that a whole generation of requests takes there;
            TPOT: 1.5 times the p99 at capacity
overload    open loop, three times the capacity, every request with the SLO's TTFT as its deadline; good is what keeps
            the SLO, and counts over the part of the run in which requests arrive and the first ones have had time to
            end
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from benchmarks.reproduce.claim import Claim, ReproduceOptions, Reproduction
from benchmarks.serving.local_server import local_server
from twostroke.errors import SetupError
from twostroke.measure.figure import MEASURED, PREDICTED, bar_chart
from twostroke.measure.serve.figures import Slo, figures_of
from twostroke.measure.serve.http_connection import Origin
from twostroke.measure.serve.openai_wire import Exchange
from twostroke.measure.serve.target import ServerTarget, TargetLoad, run_loads
from twostroke.measure.workload import Lengths, Workload

SLOTS = 16
TIMES_CAPACITY = 3.0
GOAL_GOODPUT = 0.90
GOAL_REFUSAL_MS = 50.0
PROMPTS, OUTPUTS = Lengths.uniform(16, 96), Lengths.uniform(16, 96)
_SETTLED = 0.25
"""Share of the run that is not counted: at its beginning there is room for everybody."""


def reproduce(options: ReproduceOptions) -> Reproduction:
    """Measures capacity, then offers three times as much."""
    for_s = 30.0 if options.full else 4.0
    settings = engine_settings(options)
    with local_server(options.model, settings) as server:
        target = ServerTarget(origin=Origin.parse(server.url), model=options.model)
        at_capacity, capacity = measure_capacity(target, options)
        slo = _slo(at_capacity["latency"])
        rate = TIMES_CAPACITY * capacity
        workload = drawn(options, int(rate * for_s), rate)
        hurried = dataclasses.replace(target, patience_s=slo.limits_s["ttft"])
        (run,) = run_loads([TargetLoad(hurried, workload)])
    over = figures_of(run, slo)
    last_s = workload.requests[-1].arrival_s
    goodput = _good_per_second(run.exchanges, slo, _SETTLED * last_s, last_s)
    failed = over["failures"]
    refusal_ms = 1000 * failed["refusal_latency_s"].get("p99", 0.0)
    claims = (
        Claim.at_least("goodput / capacity", GOAL_GOODPUT, goodput / capacity).judged(options.full),
        Claim.at_least("requests refused", 1, failed["num_refused"]),
        Claim.at_most("time to a refusal, p99 ms", GOAL_REFUSAL_MS, refusal_ms).judged(options.full),
        Claim.equal("refusals without Retry-After", 0, failed["num_refused"] - failed["num_with_retry_after"]),
        Claim.equal("other failures", 0, failed["num_errors"]),
        Claim.reported("capacity, requests per second", capacity),
    )
    return Reproduction(
        claims=claims,
        config={"model": options.model_name, **settings},
        workload=workload.description,
        details={"at_capacity": at_capacity, "overload": over, "goodput_requests_per_s": goodput},
        draw=bar_chart(
            ["capacity,\ngoodput", "offered,\ncompleted"],
            {
                "before": ([capacity, rate], PREDICTED),
                "under overload": ([goodput, over["throughput"]["requests_per_s"]], MEASURED),
            },
            "requests per second",
        ),
        figure_size=(5.0, 4.0),
    )


def engine_settings(options: ReproduceOptions) -> dict[str, Any]:
    """One model thread, few slots, and room for all of them."""
    longest = int(PROMPTS.high + OUTPUTS.high)
    return {
        "threads": options.threads or 1,
        "max_num_seqs": SLOTS,
        "max_model_len": longest,
        "num_kv_blocks": 4 * SLOTS * -(-longest // 16),
    }


def drawn(options: ReproduceOptions, count: int, rate: float | None, seed: int = 0) -> Workload:
    """Requests of mixed lengths, no two alike; `seed` is added to the options' own."""
    return options.drawn(max(1, count), PROMPTS, OUTPUTS, rate=rate, seed=seed)


def measure_capacity(target: ServerTarget, options: ReproduceOptions) -> tuple[dict[str, Any], float]:
    """Figures of a closed loop that keeps every slot busy, after a warm-up, and its requests per second.

    Raises:
        SetupError: a request failed.
    """
    run_loads([TargetLoad(target, drawn(options, SLOTS, None, 10**6), max_concurrency=SLOTS)])
    count = SLOTS * (16 if options.full else 4)
    (run,) = run_loads([TargetLoad(target, drawn(options, count, None, 10**6 + 1), max_concurrency=SLOTS)])
    found = figures_of(run, Slo({}))
    if found["num_completed"] != count:
        raise SetupError(f"the server refuses what it should have room for: {found['failures']}")
    # while every slot is busy: the last requests end one by one
    ends_s = sorted(e.end_s for e in run.exchanges)
    return found, (count - SLOTS) / ends_s[count - SLOTS - 1]


def _slo(at_capacity: dict[str, Any]) -> Slo:
    ttft_s = at_capacity["ttft_s"]["p99"] + at_capacity["e2e_s"]["mean"]
    return Slo({"ttft": ttft_s, "tpot": 1.5 * at_capacity["tpot_s"]["p99"]})


def _good_per_second(exchanges: Sequence[Exchange], slo: Slo, begin_s: float, end_s: float) -> float:
    good = (e for e in exchanges if e.failure is None and not slo.missed(e))
    return sum(begin_s < e.end_s <= end_s for e in good) / (end_s - begin_s)

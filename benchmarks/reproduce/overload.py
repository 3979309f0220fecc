"""Three times more requests than a server can serve: which it refuses, how soon, and the latency of the others.

capacity    closed loop, as many requests at a time as the engine has slots: requests per second
SLO         TTFT: the p99 at capacity, plus the mean time of a request there;
            TPOT: 1.5 times the p99 at capacity
overload    open loop, three times the capacity, every request with the SLO's TTFT as its deadline; good are requests
            within the SLO, counted over the part of the run in which requests arrive and the first ones have had time
            to end

One tenant floods a server, another sends a request now and then: the wait of the second one, compared with its wait
alone.

Both send the same requests, the flood first. A prefix cache hit of the quiet tenant would be on the other's prefix.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from benchmarks.claim import Claim, ReproduceOptions, Reproduction
from benchmarks.serving.local_server import local_server, room_for
from twostroke.errors import SetupError
from twostroke.measure.figure import bar_chart
from twostroke.measure.report import percentiles
from twostroke.measure.serve.figures import Slo, failures, figures_of
from twostroke.measure.serve.load import Origin
from twostroke.measure.serve.openai_wire import Exchange
from twostroke.measure.serve.target import ServerTarget, TargetLoad, run_loads
from twostroke.measure.workload import Lengths, Workload

SLOTS = 16
TIMES_CAPACITY = 3.0
GOAL_GOODPUT = 0.90
GOAL_REFUSAL_MS = 50.0
PROMPTS, OUTPUTS = Lengths.uniform(16, 96), Lengths.uniform(16, 96)
_SETTLED = 0.25
"""Share of the run that is not counted: at its beginning every request fits."""


def reproduce(options: ReproduceOptions) -> Reproduction:
    """Measure the capacity, then offer three times as much."""
    for_s = 30.0 if options.full else 4.0
    settings = engine_settings(options)
    with local_server(options.model, settings) as server:
        target = ServerTarget(origin=Origin.parse(server.url), model=options.model)
        at_capacity, capacity = measure_capacity(target, options)
        slo = _slo(at_capacity["latency"])
        rate = TIMES_CAPACITY * capacity
        workload = drawn(options, int(rate * for_s), rate)
        hurried = dataclasses.replace(target, request_timeout_s=slo.limits_s["ttft"])
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
            {"before": [capacity, rate], "under overload": [goodput, over["throughput"]["requests_per_s"]]},
            "requests per second",
        ),
        figure_size=(5.0, 4.0),
    )


def engine_settings(options: ReproduceOptions) -> dict[str, Any]:
    """One model thread, few slots, and KV memory for all of them."""
    return {"threads": options.threads or 1, **room_for(SLOTS, int(PROMPTS.high + OUTPUTS.high), times=4)}


def drawn(options: ReproduceOptions, count: int, rate: float | None, seed: int = 0) -> Workload:
    """Return requests of mixed lengths, all different; `seed` is added to the options' own."""
    return options.drawn(max(1, count), PROMPTS, OUTPUTS, rate=rate, seed=seed)


def measure_capacity(target: ServerTarget, options: ReproduceOptions) -> tuple[dict[str, Any], float]:
    """Return the figures of a closed loop that keeps every slot busy, after a warm-up, and its requests per second.

    Raises:
        SetupError: a request failed.
    """
    count = SLOTS * (16 if options.full else 4)
    workloads = (drawn(options, number, None, 10**6 + i) for i, number in enumerate((SLOTS, count)))
    _, run = (run_loads([TargetLoad(target, workload, max_concurrency=SLOTS)])[0] for workload in workloads)
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


QUIET, FLOOD = "key-of-the-quiet-one", "key-of-the-flood"
QUIET_SHARE = 0.1
"""Load of the quiet tenant as a share of the capacity."""
FLOOD_CONCURRENCY = 4 * SLOTS
GOAL_RATIO = 2.0


def reproduce_two_tenants(options: ReproduceOptions) -> Reproduction:
    """Measure the quiet tenant alone and during the flood, alternating."""
    rounds, count = (4, 100) if options.full else (1, 10)
    settings = {**engine_settings(options), "api_key": (QUIET, FLOOD)}
    alone, beside, flood = (list[Exchange]() for _ in range(3))
    with local_server(options.model, settings) as server:
        origin = Origin.parse(server.url)
        quiet_one, flooding = (ServerTarget(origin=origin, model=options.model, api_key=key) for key in (QUIET, FLOOD))
        _, capacity = measure_capacity(quiet_one, options)
        rate = QUIET_SHARE * capacity
        for i in range(rounds):
            # new prompts in each half of each round: no tenant finds even its own
            (run,) = run_loads([TargetLoad(quiet_one, drawn(options, count, rate, 2 * i))])
            alone += run.exchanges
            asked = drawn(options, count, rate, 2 * i + 1)
            more = drawn(options, int(2 * capacity * count / rate), None, 10**7 + i)
            flood_of = Workload((*asked.requests, *more.requests), more.description)
            first, second = run_loads(
                [
                    TargetLoad(flooding, flood_of, max_concurrency=FLOOD_CONCURRENCY),
                    TargetLoad(quiet_one, asked),
                ]
            )
            flood += first.exchanges
            until_s = max(e.end_s for e in first.exchanges)
            beside += [e for e in second.exchanges if e.scheduled_s < until_s]  # while the flood lasts
    ttft_s = {
        name: percentiles([e.ttft_s for e in of if e.ttft_s is not None])
        for name, of in (("alone", alone), ("beside", beside), ("flood", flood))
    }
    ratio = ttft_s["beside"]["p99"] / ttft_s["alone"]["p99"]
    crossed = sum(e.cached_tokens or 0 for e in beside)
    refused = failures([*alone, *beside])
    claims = (
        Claim.at_most("TTFT p99 of the quiet tenant: beside the flood / alone", GOAL_RATIO, ratio).judged(options.full),
        Claim.equal("its prompt tokens found in the other's cache", 0, crossed),
        Claim.equal("its requests that failed", 0, refused["num_refused"] + refused["num_errors"]),
        Claim.reported("TTFT p99 of the quiet tenant alone, ms", 1000 * ttft_s["alone"]["p99"]),
        Claim.reported("TTFT p50 of the flood, ms", 1000 * ttft_s["flood"]["p50"]),
    )
    return Reproduction(
        claims=claims,
        config={"model": options.model_name, **{k: v for k, v in settings.items() if k != "api_key"}},
        workload={"requests_of_the_quiet_one": rounds * count, "its_share_of_capacity": QUIET_SHARE},
        details={"ttft_s": ttft_s, "capacity_requests_per_s": capacity, "flood": failures(flood)},
        draw=bar_chart(
            ["p50", "p99"],
            {name: [1000 * ttft_s[name][q] for q in ("p50", "p99")] for name in ("alone", "beside")},
            "TTFT of the quiet tenant, ms",
        ),
        figure_size=(5.0, 4.0),
        repeats=rounds,
    )

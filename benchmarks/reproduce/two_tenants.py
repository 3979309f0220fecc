"""One tenant floods a server, another asks now and then: what the second one waits, beside what it waits alone.

Both ask the same things, the flood first. What the quiet tenant finds in the prefix cache would be the other's.
"""

from __future__ import annotations

from benchmarks.reproduce.claim import Claim, ReproduceOptions, Reproduction
from benchmarks.reproduce.overload import SLOTS, drawn, engine_settings, measure_capacity
from benchmarks.serving.local_server import local_server
from twostroke.measure.figure import MEASURED, PREDICTED, bar_chart
from twostroke.measure.report import percentiles
from twostroke.measure.serve.figures import failures
from twostroke.measure.serve.http_connection import Origin
from twostroke.measure.serve.openai_wire import Exchange
from twostroke.measure.serve.target import ServerTarget, TargetLoad, run_loads
from twostroke.measure.workload import Workload

QUIET, FLOOD = "key-of-the-quiet-one", "key-of-the-flood"
QUIET_SHARE = 0.1
"""Of the capacity."""
FLOOD_CONCURRENCY = 4 * SLOTS
GOAL_RATIO = 2.0


def reproduce(options: ReproduceOptions) -> Reproduction:
    """The quiet tenant alone and beside the flood, in turn."""
    rounds, count = (4, 100) if options.full else (1, 10)
    settings = {**engine_settings(options), "api_key": (QUIET, FLOOD)}
    alone: list[Exchange] = []
    beside: list[Exchange] = []
    flood: list[Exchange] = []
    with local_server(options.model, settings) as server:
        origin = Origin.parse(server.url)
        quiet_one, flooding = (ServerTarget(origin=origin, model=options.model, api_key=key) for key in (QUIET, FLOOD))
        _, capacity = measure_capacity(quiet_one, options)
        rate = QUIET_SHARE * capacity
        for i in range(rounds):
            # new prompts in each half of each round: nobody finds even his own
            (run,) = run_loads([TargetLoad(quiet_one, drawn(options, count, rate, 2 * i))])
            alone += run.exchanges
            asked = drawn(options, count, rate, 2 * i + 1)
            more = drawn(options, int(2 * capacity * count / rate), None, 10**7 + i)
            first, second = run_loads(
                [
                    TargetLoad(flooding, _after(asked, more), max_concurrency=FLOOD_CONCURRENCY),
                    TargetLoad(quiet_one, asked),
                ]
            )
            flood += first.exchanges
            beside += _while_flooded(second.exchanges, first.exchanges)
    ttft_s = {name: percentiles(_ttfts(of)) for name, of in (("alone", alone), ("beside", beside), ("flood", flood))}
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
            {
                name: ([1000 * ttft_s[name][q] for q in ("p50", "p99")], colour)
                for name, colour in (("alone", PREDICTED), ("beside", MEASURED))
            },
            "TTFT of the quiet tenant, ms",
        ),
        figure_size=(5.0, 4.0),
        repeats=rounds,
    )


def _after(asked: Workload, more: Workload) -> Workload:
    """What the quiet tenant will ask, and then what only the flood asks."""
    return Workload((*asked.requests, *more.requests), more.description)


def _while_flooded(quiet: tuple[Exchange, ...], flood: tuple[Exchange, ...]) -> list[Exchange]:
    """Without what was asked when the flood had ended."""
    until_s = max(e.end_s for e in flood)
    return [e for e in quiet if e.scheduled_s < until_s]


def _ttfts(exchanges: list[Exchange]) -> list[float]:
    return [e.ttft_s for e in exchanges if e.ttft_s is not None]

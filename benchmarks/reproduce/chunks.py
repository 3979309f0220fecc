"""R5: the token budget of a step trades TTFT against the time between tokens; a controller chooses it.

Some requests decode, and a long prompt arrives now and then. Without chunks the decodes wait for the whole prompt; the
smaller the budget, the shorter they wait and the longer the prompt takes.

    predicted     each budget, the same requests through the real scheduler in simulated time (simulation/), by the
                  step times that were fitted just before
    controller    --itl-slo: no budget is given; it has to keep the limit at the 99th percentile, with a TTFT no worse
                  than that of the best fixed budget that keeps it

R6: chunks and mixed batches, each alone and both (Agrawal et al. 2024, Sarathi-Serve, section 5.4, table 4).

    prefill first   prompts whole, in steps of their own, before decodes
    mixed           whole prompts, together with decodes: first tokens come early, decodes wait for a whole prompt
    chunked         prompts in chunks, in steps of their own: first tokens come late
    both            chunks together with decodes: the engine's default

Each of the two alone is worse than both in one of the two latencies: mixing alone in the time between tokens, chunking
alone in the time to the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.alternating import alternate, medians
from benchmarks.claim import Claim, ReproduceOptions, Reproduction
from benchmarks.reproduce.recorded import FittedSteps, serve_and_simulate, served
from twostroke.config.cache import CacheConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.measure.figure import MEASURED, PREDICTED, bar_chart, style_axes
from twostroke.measure.report import median, percentiles
from twostroke.measure.workload import Lengths, Workload, with_arrivals
from twostroke.served_run import Run

NUM_DECODES = 8
SHORT_PROMPT = 16
UNCHUNKED = 0
BUDGETS = (UNCHUNKED, 2048, 1024, 512, 256, 128, 64)
SLO_TIMES = (4.0, 8.0, 16.0)
"""Limits, as multiples of a decode-only step."""
TTFT_SLACK = 1.05
"""Tolerance for the difference between two equal runs on this machine."""


def reproduce(options: ReproduceOptions) -> Reproduction:
    """Measure every budget and the controller, round by round."""
    prompt, num_prompts, rounds = (1536, 6, 3) if options.full else (256, 2, 1)
    budgets = BUDGETS if options.full else (UNCHUNKED, 128, 64)
    scheduler = SchedulerConfig(max_num_seqs=NUM_DECODES + num_prompts, max_num_batched_tokens=2048)
    step_times = FittedSteps.measured(options, scheduler)
    step_s = step_times.seconds([(SHORT_PROMPT, 1, 1)] * NUM_DECODES)
    workload = _workload(prompt, num_prompts, step_times, step_s, options)
    limits = {f"itl_slo {times:g}x": times * step_s for times in SLO_TIMES}
    configs = {"alone": scheduler, **_configs(budgets, limits, scheduler)}
    loads = {name: workload.first(NUM_DECODES) if name == "alone" else workload for name in configs}
    runs = alternate(
        rounds, configs, lambda name, _: serve_and_simulate(options, configs[name], loads[name], step_times.model)
    )
    floor = [_itl_p99_s(run) for run, _ in runs.pop("alone")]
    found = {name: [_figures(run) for run, _ in of] for name, of in runs.items()}
    predicted = {name: _figures(of[-1][1]) for name, of in runs.items()}
    middle = {name: medians(of) for name, of in found.items()}
    return Reproduction(
        claims=(
            Claim.reported("p99 ITL ms, no prompts at all: the machine", median(floor) * 1e3, step_s * 1e3),
            *_claims(middle, predicted, limits, median(floor), full=options.full),
        ),
        config={"model": options.model_name, "budgets": budgets, "slo_s": limits},
        workload={"decodes": NUM_DECODES, "prompt": prompt, "prompts": num_prompts},
        details={
            "measured": middle,
            "predicted": predicted,
            "rounds": found,
            "decode_step_s": step_s,
            "floor_s": floor,
        },
        draw=lambda figure: _draw(figure, middle, predicted, limits),
        figure_size=(9.0, 4.0),
        repeats=rounds,
        remarks=tuple(_unkeepable(limits, median(floor))),
    )


def _unkeepable(limits: dict[str, float], floor_s: float) -> Iterator[str]:
    """Yield the limits that no chunk size keeps on this machine."""
    for name, limit_s in limits.items():
        if floor_s > limit_s:
            alone = f"a step without any prompt takes {floor_s * 1e3:.3g} ms at p99"
            yield f"{name}: {limit_s * 1e3:.3g} ms cannot be kept: {alone}; the claim is not judged"


def _workload(
    prompt: int, num_prompts: int, step_times: FittedSteps, step_s: float, options: ReproduceOptions
) -> Workload:
    """Return prompts far enough apart, and answers that last until the last prompt is computed."""
    every_s = 2.5 * step_times.seconds([(0, prompt, 1)])
    lasts_s = every_s * (num_prompts + 1)
    most = min(1500, 8 + round(lasts_s / step_s))
    lengths = [(SHORT_PROMPT, most)] * NUM_DECODES + [(prompt, 2)] * num_prompts
    arrivals = [0.0] * NUM_DECODES + [every_s * (0.5 + i) for i in range(num_prompts)]
    return with_arrivals(options.workload_of_lengths(lengths), arrivals)


def _configs(
    budgets: Sequence[int], limits: dict[str, float], scheduler: SchedulerConfig
) -> dict[str, SchedulerConfig]:
    whole = {"unchunked": replace(scheduler, enable_chunked_prefill=False)}
    fixed = {f"budget {budget}": replace(scheduler, max_num_batched_tokens=budget) for budget in budgets if budget}
    return whole | fixed | {name: replace(scheduler, itl_slo=limit) for name, limit in limits.items()}


def _itl_p99_s(run: Run) -> float:
    return percentiles([gap for request in run.requests for gap in request.times.itl_s])["p99"]


def _figures(run: Run) -> dict[str, float]:
    short = [r for r in run.requests if r.times.arrival_s == min(x.times.arrival_s for x in run.requests)]
    long = [r for r in run.requests if r not in short]
    last_s = max(r.times.token_times_s[0] for r in long)
    gaps = [
        later - earlier
        for r in short
        for earlier, later in zip(r.times.token_times_s, r.times.token_times_s[1:], strict=False)
        if earlier <= last_s
    ]
    ttft = percentiles([r.times.ttft_s for r in long])
    return {"itl_p99_s": percentiles(gaps)["p99"], "itl_max_s": max(gaps), "ttft_s": ttft["mean"]}


def _claims(
    measured: dict[str, dict[str, float]],
    predicted: dict[str, dict[str, float]],
    limits: dict[str, float],
    floor_s: float,
    *,
    full: bool,
) -> list[Claim]:
    """Return the claims. A limit that steps without prompts already exceed is reported as unkeepable, not judged."""
    claims: list[Claim] = []
    fixed = [name for name in measured if name not in limits]
    for name in fixed:
        guess = predicted[name]
        for key, words in (("itl_p99_s", "p99 ITL"), ("ttft_s", "TTFT")):
            claims.append(Claim.reported(f"{words} ms, {name}", measured[name][key] * 1e3, guess[key] * 1e3))
    for name, limit in limits.items():
        p99, ttft = measured[name]["itl_p99_s"], measured[name]["ttft_s"]
        can_be = floor_s <= limit
        claims.append(Claim.at_most(f"p99 ITL ms, {name}", limit * 1e3, p99 * 1e3).judged(full and can_be))
        keeping = [measured[other]["ttft_s"] for other in fixed if measured[other]["itl_p99_s"] <= limit]
        if keeping:
            best = min(keeping)
            claims.append(
                Claim.at_most(
                    f"TTFT ms, {name}, beside the best budget that keeps it",
                    best * TTFT_SLACK * 1e3,
                    ttft * 1e3,
                    best * 1e3,
                ).judged(full)
            )
        else:
            claims.append(Claim.reported(f"TTFT ms, {name}; no budget keeps it", ttft * 1e3))
    return claims


def _draw(
    figure: Any,
    measured: dict[str, dict[str, float]],
    predicted: dict[str, dict[str, float]],
    limits: dict[str, float],
) -> None:
    axes = figure.add_subplot()
    fixed = [name for name in measured if name not in limits]
    for found, colour, label in ((measured, MEASURED, "measured"), (predicted, PREDICTED, "predicted")):
        xs = [found[name]["itl_p99_s"] * 1e3 for name in fixed]
        ys = [found[name]["ttft_s"] * 1e3 for name in fixed]
        axes.plot(xs, ys, "o-", color=colour, label=f"fixed budgets, {label}")
    for name in fixed:
        place = (measured[name]["itl_p99_s"] * 1e3, measured[name]["ttft_s"] * 1e3)
        axes.annotate(name.removeprefix("budget "), place, textcoords="offset points", xytext=(6, 4), fontsize=8)
    for name, limit in limits.items():
        axes.axvline(limit * 1e3, color="black", linewidth=0.6, linestyle=":")
        place = (measured[name]["itl_p99_s"] * 1e3, measured[name]["ttft_s"] * 1e3)
        axes.plot(*place, "*", color="black", markersize=11)
        axes.annotate(f"{name}", place, textcoords="offset points", xytext=(6, -10), fontsize=8)
    xlabel = "p99 ITL of those who decode, ms; dotted: limits, stars: the controller with each of them"
    style_axes(axes, xscale="log", xlabel=xlabel, ylabel="mean TTFT of the long prompts, ms")


BUDGET, SLOTS = 256, 16
BOTH = SchedulerConfig(max_num_batched_tokens=BUDGET, max_num_seqs=SLOTS)
VARIANTS = {
    "prefill first": replace(BOTH, mixing="prefill_first", enable_chunked_prefill=False),
    "mixed": replace(BOTH, enable_chunked_prefill=False),
    "chunked": replace(BOTH, mixing="prefill_first"),
    "both": BOTH,
}
MAX_OUTPUT_TOKENS = 96
SHARE = 0.6
"""Offered load as a share of the throughput of an engine that always has work."""


def reproduce_ablation(options: ReproduceOptions) -> Reproduction:
    """Measure the four variants, round by round."""
    count, rounds = (60, 3) if options.full else (8, 1)
    capacity = _capacity(options)
    loads = [_load(options, count, SHARE * capacity, seed=number) for number in range(rounds)]
    found = alternate(rounds, VARIANTS, lambda name, number: _serve(options, VARIANTS[name], loads[number]))
    middle = {name: medians(runs) for name, runs in found.items()}
    mixed, chunked, both = (middle[name] for name in ("mixed", "chunked", "both"))
    claims = (
        Claim.at_least("p99 ITL, mixing alone / both", 1.0, mixed["itl_p99_s"] / both["itl_p99_s"]),
        Claim.at_least("median TTFT, chunking alone / both", 1.0, chunked["ttft_p50_s"] / both["ttft_p50_s"]),
        Claim.reported("p99 ITL, chunking alone / both", chunked["itl_p99_s"] / both["itl_p99_s"]),
        Claim.reported("median TTFT, mixing alone / both", mixed["ttft_p50_s"] / both["ttft_p50_s"]),
        *(
            Claim.reported(f"{words}, {name}", of[key] * 1e3)
            for name, of in middle.items()
            for key, words in (("ttft_p50_s", "median TTFT ms"), ("itl_p99_s", "p99 ITL ms"))
        ),
    )
    return Reproduction(
        claims=tuple(claim.judged(options.full) for claim in claims),
        config={"model": options.model_name, "max_num_batched_tokens": BUDGET, "slots": SLOTS},
        workload={"requests": count, "share_of_capacity": SHARE, "capacity": capacity},
        details={"medians": middle, "rounds": found},
        draw=bar_chart(
            list(middle),
            {
                "median TTFT": [of["ttft_p50_s"] * 1e3 for of in middle.values()],
                "p99 ITL": [of["itl_p99_s"] * 1e3 for of in middle.values()],
            },
            "ms",
        ),
        repeats=rounds,
    )


def _load(options: ReproduceOptions, count: int, rate: float | None, seed: int) -> Workload:
    longest = 1200 if options.full else 400  # several budgets long, or short for a quick run
    prompts, outputs = Lengths.uniform(64, longest), Lengths.uniform(16, MAX_OUTPUT_TOKENS)
    return options.drawn(count, prompts, outputs, rate=rate, seed=seed)


def _capacity(options: ReproduceOptions) -> float:
    """Return the requests per second of an engine that always has work."""
    workload = _load(options, 24, None, seed=99)
    return len(workload) / _serve(options, BOTH, workload)["duration_s"]


def _serve(options: ReproduceOptions, config: SchedulerConfig, workload: Workload) -> dict[str, float]:
    warm_up = options.workload_of_lengths([(64, 2)] * 2)
    run = served(options, config, CacheConfig(enable_prefix_caching=False), workload, warm_up=warm_up)
    ttft_s = median([request.times.ttft_s for request in run.requests])
    return {"ttft_p50_s": ttft_s, "itl_p99_s": _itl_p99_s(run), "duration_s": run.duration_s}

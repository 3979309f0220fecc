"""R5: the budget of a step trades the time to the first token against the time between tokens; a controller picks it.

Some requests decode, and a long prompt comes every now and then. Without chunks those who decode wait for the whole
prompt; the smaller the budget, the shorter they wait and the longer the prompt takes.

    predicted     each budget, the same requests through the real scheduler in simulated time (simulation/), by the
                  step times that were fitted a moment before
    controller    --itl-slo: no budget is given; it has to keep the limit at the 99th percentile, with a TTFT no worse
                  than that of the best fixed budget that keeps it
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.reproduce.claim import Claim, ReproduceOptions, Reproduction
from benchmarks.reproduce.recorded import serve_and_simulate
from twostroke.config.cache import CacheConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.cost.step_cost import Layers
from twostroke.cost.step_fit import fit_step_model
from twostroke.cost.step_model import StepTimeModel
from twostroke.measure.figure import MEASURED, PREDICTED, finish
from twostroke.measure.report import median, percentiles
from twostroke.measure.steps import measure_steps
from twostroke.measure.workload import Workload, with_arrivals
from twostroke.model.model_files import find_model
from twostroke.served_run import Run

NUM_DECODES = 8
SHORT_PROMPT = 16
UNCHUNKED = 0
BUDGETS = (UNCHUNKED, 2048, 1024, 512, 256, 128, 64)
SLO_TIMES = (4.0, 8.0, 16.0)
"""Limits, in steps in which everybody decodes and nobody prefills."""
TTFT_SLACK = 1.05
"""Of two runs of one thing on this machine."""


def reproduce(options: ReproduceOptions) -> Reproduction:
    """Measures every budget and the controller, round by round."""
    prompt, num_prompts, rounds = (1536, 6, 3) if options.full else (256, 2, 1)
    budgets = BUDGETS if options.full else (UNCHUNKED, 128, 64)
    longest = max(prompt + 8, 2048)
    scheduler = SchedulerConfig(max_num_seqs=NUM_DECODES + num_prompts, max_num_batched_tokens=2048)
    load = options.load(min(longest, find_model(options.model).config().max_context))
    measured_steps = measure_steps(load, scheduler, CacheConfig())
    step_times = fit_step_model(measured_steps.steps)
    step_s = step_times.seconds(measured_steps.layers.work([(SHORT_PROMPT, 1, 1)] * NUM_DECODES))
    workload = _workload(prompt, num_prompts, step_times, measured_steps.layers, options)
    limits = {f"itl_slo {times:g}x": times * step_s for times in SLO_TIMES}
    found: dict[str, list[dict[str, Any]]] = {}
    predicted: dict[str, dict[str, Any]] = {}
    alone = workload.first(NUM_DECODES)
    floor: list[float] = []
    for _ in range(rounds):
        run, _ = serve_and_simulate(options, scheduler, alone, step_times)
        floor.append(percentiles([gap for request in run.requests for gap in request.times.itl_s])["p99"])
        for name, config in _configs(budgets, limits, scheduler).items():
            run, simulated = serve_and_simulate(options, config, workload, step_times)
            found.setdefault(name, []).append(_figures(run))
            predicted[name] = _figures(simulated)
    middle = {name: {key: median([r[key] for r in runs]) for key in runs[0]} for name, runs in found.items()}
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
    """Return which limits no chunk size keeps on this machine."""
    for name, limit_s in limits.items():
        if floor_s > limit_s:
            alone = f"a step without any prompt takes {floor_s * 1e3:.3g} ms at p99"
            yield f"{name}: {limit_s * 1e3:.3g} ms cannot be kept: {alone}; the claim is not judged"


def _workload(
    prompt: int, num_prompts: int, step_times: StepTimeModel, layers: Layers, options: ReproduceOptions
) -> Workload:
    """Prompts far enough from each other, and answers that last until the last of them is through."""
    work = layers.work([(0, prompt, 1)])
    every_s = 2.5 * step_times.seconds(work)
    step_s = step_times.seconds(layers.work([(SHORT_PROMPT, 1, 1)] * NUM_DECODES))
    lasts_s = every_s * (num_prompts + 1)
    most = min(1500, 8 + round(lasts_s / step_s))
    lengths = [(SHORT_PROMPT, most)] * NUM_DECODES + [(prompt, 2)] * num_prompts
    arrivals = [0.0] * NUM_DECODES + [every_s * (0.5 + i) for i in range(num_prompts)]
    return with_arrivals(options.of_lengths(lengths), arrivals)


def _configs(
    budgets: Sequence[int], limits: dict[str, float], scheduler: SchedulerConfig
) -> dict[str, SchedulerConfig]:
    slots = scheduler.max_num_seqs
    fixed = {
        _name(budget): SchedulerConfig(
            max_num_seqs=slots,
            max_num_batched_tokens=budget or 2048,
            enable_chunked_prefill=budget != UNCHUNKED,
        )
        for budget in budgets
    }
    paced = {
        name: SchedulerConfig(max_num_seqs=slots, max_num_batched_tokens=2048, itl_slo=limit)
        for name, limit in limits.items()
    }
    return fixed | paced


def _name(budget: int) -> str:
    return f"budget {budget}" if budget else "unchunked"


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
    """Return the claims. A limit that steps without prompts already break is reported as unkeepable, not judged."""
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
    finish(axes, xscale="log", xlabel=xlabel, ylabel="mean TTFT of the long prompts, ms")

"""R11: the cost of prefix caching without hits: unique prompts, with caching on and off, alternating.
R14: the savings of the KV cache: a prompt of 500 tokens and 200 outputs, with and without it.

Without a cache every step computes everything again: 500 + 501 + … + 699 = 119,900 token-passes. With it the prompt is
computed once and each output but the last once more: 500 + 199 = 699. That is 171.5 times fewer.
"""

from __future__ import annotations

from typing import Any

from benchmarks.alternating import alternate, close_together, ratio
from benchmarks.claim import Claim, ReproduceOptions, Reproduction
from benchmarks.counting_engine import counting_engine
from benchmarks.reproduce.recorded import served
from twostroke.config.cache import CacheConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.measure.figure import MEASURED, PREDICTED, bars, style_axes
from twostroke.measure.model_engine import ModelEngine, model_engine
from twostroke.measure.report import median
from twostroke.measure.workload import Lengths, Workload
from twostroke.served_run import Run

NUM_SEQS = 16
MAX_BOOKKEEPING_SHARE = 0.02
"""Share of the time that the bookkeeping may cost."""


def reproduce(options: ReproduceOptions) -> Reproduction:
    """Run both alternately and compare medians."""
    repeats = 7 if options.full else 2
    workloads = [_workload(options, i) for i in range(repeats + 1)]
    with close_together({name: _engine(options, name == "on") for name in ("off", "on")}) as engines:
        runs = alternate(
            repeats,
            engines,
            lambda name, number: engines[name].run(workloads[number], progress=f"R11, caching {name}"),
            warm_up=1,  # its number is -1: the last of the workloads
        )
    seconds = {name: [run.duration_s for run in of] for name, of in runs.items()}
    overhead = ratio(seconds["on"], seconds["off"]) - 1
    found = sum(r.num_cached_tokens for run in runs["on"] for r in run.requests)
    return Reproduction(
        claims=(
            Claim.equal("tokens found in the cache", 0, found),
            Claim.at_most("time lost to caching, share", MAX_BOOKKEEPING_SHARE, overhead, 0.0).judged(options.full),
        ),
        config={"max_num_seqs": NUM_SEQS, "model": options.model_name},
        workload=workloads[0].description,
        details={"duration_s": seconds, "medians_s": {name: median(of) for name, of in seconds.items()}},
        draw=lambda figure: _draw(figure, seconds),
        warmup=1,
        repeats=repeats,
    )


def _workload(options: ReproduceOptions, seed: int) -> Workload:
    return options.drawn(64 if options.full else 16, Lengths.fixed(128), Lengths.fixed(32), seed=seed)


def _engine(options: ReproduceOptions, enable_prefix_caching: bool) -> ModelEngine:
    return model_engine(
        options.load(256),
        SchedulerConfig(max_num_seqs=NUM_SEQS),
        CacheConfig(enable_prefix_caching=enable_prefix_caching),
    )


def _draw(figure: Any, seconds: dict[str, list[float]]) -> None:
    axes = figure.add_subplot()
    for name, colour in (("off", PREDICTED), ("on", MEASURED)):
        axes.plot(range(1, len(seconds[name]) + 1), seconds[name], "o-", color=colour, label=f"caching {name}")
    axes.set_xticks(range(1, len(seconds["off"]) + 1))
    style_axes(axes, xlabel="run", ylabel="seconds", ylim=(0, None))


PROMPT, OUTPUT = 500, 200
MODES = ("without", "with")


def reproduce_without(options: ReproduceOptions) -> Reproduction:
    """Count with the counting executor and on the model; the times are the model's."""
    predicted = {"without": sum(PROMPT + i for i in range(OUTPUT)), "with": PROMPT + OUTPUT - 1}
    workload = options.workload_of_lengths([(PROMPT, OUTPUT)])
    counted = {
        mode: _passes(counting_engine(*_configs(mode), max_model_len=PROMPT + OUTPUT).run(workload)) for mode in MODES
    }
    claims = [Claim.equal(f"token-passes {mode} a cache, counted", predicted[mode], counted[mode]) for mode in MODES]
    details: dict[str, Any] = {"token_passes": counted}
    ratio = predicted["without"] / predicted["with"]
    claims.append(Claim.within("token-passes: without / with", ratio, counted["without"] / counted["with"], 1e-9))
    if options.with_model:
        runs = {mode: served(options, *_configs(mode), workload, title=f"R14, {mode} a cache") for mode in MODES}
        passes = {mode: _passes(run) for mode, run in runs.items()}
        claims += [
            Claim.equal(f"token-passes {mode} a cache, on the model", predicted[mode], passes[mode]) for mode in MODES
        ]
        seconds = {mode: run.duration_s for mode, run in runs.items()}
        claims.append(Claim.reported("wall time: without / with", seconds["without"] / seconds["with"]))
        details["duration_s"] = seconds
    return Reproduction(
        claims=tuple(claims),
        config={"model": options.model_name if options.with_model else None},
        workload={"prompt_tokens": PROMPT, "output_tokens": OUTPUT, "seed": options.seed},
        details=details,
        remarks=() if options.with_model else ("wall time was left out: it needs a model",),
        draw=lambda figure: _draw_passes(figure, counted, details.get("duration_s")),
    )


def _configs(mode: str) -> tuple[SchedulerConfig, CacheConfig]:
    with_cache = mode == "with"
    scheduler = SchedulerConfig(max_num_seqs=1, enable_chunked_prefill=with_cache)
    return scheduler, CacheConfig(enable_prefix_caching=False, enable_kv_cache=with_cache)


def _passes(run: Run) -> int:
    return sum(step.num_tokens for step in run.steps)


def _draw_passes(figure: Any, counted: dict[str, int], seconds: dict[str, float] | None) -> None:
    columns = figure.subplots(1, 2 if seconds else 1, squeeze=False)[0]
    labels = [f"{mode} a cache" for mode in MODES]
    bars(columns[0], labels, {"token-passes": [counted[mode] for mode in MODES]}, "token-passes")
    if seconds:
        bars(columns[1], labels, {"wall time": [seconds[mode] for mode in MODES]}, "seconds")
    for axes in columns:
        axes.set_yscale("log")

"""R11: what prefix caching costs when nothing is ever found: unique prompts, caching on and off in turn."""

from __future__ import annotations

from typing import Any

from benchmarks.claim import Claim, ReproduceOptions, Reproduction
from benchmarks.side_by_side import in_turn, open_together, ratio
from twostroke.config.cache import CacheConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.measure.figure import MEASURED, PREDICTED, finish
from twostroke.measure.model_engine import ModelEngine, model_engine
from twostroke.measure.report import median
from twostroke.measure.workload import Lengths, Workload

NUM_SEQS = 16
MOST = 0.02
"""Share of the time that the bookkeeping may cost."""


def reproduce(options: ReproduceOptions) -> Reproduction:
    """Runs both in turn and compares medians."""
    repeats = 7 if options.full else 2
    workloads = [_workload(options, i) for i in range(repeats + 1)]
    with open_together({name: _engine(options, name == "on") for name in ("off", "on")}) as engines:
        runs = in_turn(
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
            Claim.at_most("time lost to caching, share", MOST, overhead, 0.0).judged(options.full),
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
    finish(axes, xlabel="run", ylabel="seconds", ylim=(0, None))

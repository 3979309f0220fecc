"""R11: what prefix caching costs when nothing is ever found: unique prompts, caching on and off in turn."""

from __future__ import annotations

from typing import Any

from benchmarks.reproduce.claim import Claim, ReproduceOptions, Reproduction
from twostroke.config.cache import CacheConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.measure.figure import MEASURED, PREDICTED
from twostroke.measure.model_engine import ModelEngine, model_engine
from twostroke.measure.report import median
from twostroke.measure.workload import Lengths, SyntheticSpec, synthetic
from twostroke.served_run import Run

NUM_SEQS = 16
MOST = 0.02
"""Share of the time that the bookkeeping may cost."""


def reproduce(options: ReproduceOptions) -> Reproduction:
    """Runs both in turn and compares medians."""
    repeats = 7 if options.full else 2
    specs = [_spec(options, options.seed + i) for i in range(repeats + 1)]
    if not options.with_model:
        remark = "R11 compares times of a model: nothing was run"
        return Reproduction(name="r11", title=_TITLE, claims=(), config={}, workload={}, remarks=(remark,))
    engines = {name: _engine(options, name == "on") for name in ("off", "on")}
    for engine in engines.values():
        engine.run(synthetic(specs[-1]), progress="R11 warm-up")
    runs: dict[str, list[Run]] = {name: [] for name in engines}
    for spec in specs[:-1]:
        for name, engine in engines.items():
            runs[name].append(engine.run(synthetic(spec), progress=f"R11, caching {name}"))
    for engine in engines.values():
        engine.close()
    seconds = {name: [run.duration_s for run in of] for name, of in runs.items()}
    # each pair ran back to back; their ratio is less noisy than the ratio of two medians
    overhead = median([on / off for on, off in zip(seconds["on"], seconds["off"], strict=True)]) - 1
    found = sum(r.num_cached_tokens for run in runs["on"] for r in run.requests)
    return Reproduction(
        name="r11",
        title=_TITLE,
        claims=(
            Claim.equal("tokens found in the cache", 0, found),
            Claim.at_most("time lost to caching, share", MOST, overhead, 0.0).judged(options.full),
        ),
        config={"max_num_seqs": NUM_SEQS, "model": options.model_name},
        workload=specs[0].description,
        details={"duration_s": seconds, "medians_s": {name: median(of) for name, of in seconds.items()}},
        draw=lambda figure: _draw(figure, seconds),
        warmup=1,
        repeats=repeats,
    )


_TITLE = "R11: the cost of prefix caching without hits"


def _spec(options: ReproduceOptions, seed: int) -> SyntheticSpec:
    return SyntheticSpec(
        num_requests=64 if options.full else 16,
        prompt_lengths=Lengths.fixed(128),
        output_lengths=Lengths.fixed(32),
        vocab_size=options.vocab_size(),
        seed=seed,
    )


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
    axes.set_xlabel("run")
    axes.set_xticks(range(1, len(seconds["off"]) + 1))
    axes.set_ylabel("seconds")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)

"""R14: what the KV cache saves. A prompt of 500 tokens and 200 outputs, with and without it.

Without a cache every step computes everything again: 500 + 501 + … + 699 = 119,900 token-passes. With it the prompt is
computed once and each output but the last once more: 500 + 199 = 699. That is 171.5 times fewer.
"""

from __future__ import annotations

from typing import Any

from benchmarks.claim import Claim, ReproduceOptions, Reproduction
from benchmarks.counting_engine import counting_engine
from benchmarks.reproduce.recorded import served
from twostroke.config.cache import CacheConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.measure.figure import bars
from twostroke.served_run import Run

PROMPT, OUTPUT = 500, 200
MODES = ("without", "with")


def reproduce(options: ReproduceOptions) -> Reproduction:
    """Counts on the fake executor and on the model; the times are the model's."""
    predicted = {"without": sum(PROMPT + i for i in range(OUTPUT)), "with": PROMPT + OUTPUT - 1}
    workload = options.of_lengths([(PROMPT, OUTPUT)])
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
        draw=lambda figure: _draw(figure, counted, details.get("duration_s")),
    )


def _configs(mode: str) -> tuple[SchedulerConfig, CacheConfig]:
    with_cache = mode == "with"
    scheduler = SchedulerConfig(max_num_seqs=1, enable_chunked_prefill=with_cache)
    return scheduler, CacheConfig(enable_prefix_caching=False, enable_kv_cache=with_cache)


def _passes(run: Run) -> int:
    return sum(step.num_tokens for step in run.steps)


def _draw(figure: Any, counted: dict[str, int], seconds: dict[str, float] | None) -> None:
    columns = figure.subplots(1, 2 if seconds else 1, squeeze=False)[0]
    labels = [f"{mode} a cache" for mode in MODES]
    bars(columns[0], labels, {"token-passes": [counted[mode] for mode in MODES]}, "token-passes")
    if seconds:
        bars(columns[1], labels, {"wall time": [seconds[mode] for mode in MODES]}, "seconds")
    for axes in columns:
        axes.set_yscale("log")

"""The engine's own time per step: everything but the model's operators, by number of requests in the batch."""

from __future__ import annotations

from typing import Any

from benchmarks.counting_engine import counting_engine
from benchmarks.reproduce.claim import Claim, ReproduceOptions, Reproduction
from twostroke.config.cache import CacheConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.measure.figure import MEASURED, PREDICTED, finish
from twostroke.measure.model_engine import model_engine
from twostroke.measure.report import percentiles
from twostroke.measure.workload import Workload
from twostroke.served_run import Run

SIZES = (1, 8, 32, 64)
GOALS_MS = {1: 0.3, 64: 1.0}
PROMPT = 16


def reproduce(options: ReproduceOptions) -> Reproduction:
    """Decode-only steps at several batch sizes, on the model and without one."""
    output = 128 if options.full else 24
    workloads = {n: options.of_lengths([(PROMPT, output)] * n, seed=n) for n in SIZES}
    # without a model, all of a step is deciding and accounting: the part that the runner's preparation adds to
    deciding = {n: _own_ms(_count(n, workload, PROMPT + output), n) for n, workload in workloads.items()}
    own = deciding
    cache = CacheConfig(enable_prefix_caching=False)
    if options.with_model:
        engine = model_engine(options.load(PROMPT + output), SchedulerConfig(max_num_seqs=max(SIZES)), cache)
        engine.run(workloads[max(SIZES)].cut_outputs(8), progress="engine time, warm-up")
        own = {n: _own_ms(engine.run(workload, progress="engine time"), n) for n, workload in workloads.items()}
        engine.close()
    what = "engine's own time a step" if options.with_model else "deciding and accounting a step"
    claims: list[Claim] = []
    for n in SIZES:
        title = f"{what}, {n} requests, median ms"
        goal = GOALS_MS.get(n)
        if goal is None:
            claims.append(Claim.reported(title, own[n]["p50"]))
        else:
            claims.append(Claim.at_most(title, goal, own[n]["p50"]).judged(options.full))
    return Reproduction(
        claims=tuple(claims),
        config={"model": options.model_name if options.with_model else None},
        workload={"prompt_tokens": PROMPT, "output_tokens": output, "num_requests": SIZES},
        details={
            "own_ms": {str(n): of for n, of in own.items()},
            "deciding_ms": {str(n): of for n, of in deciding.items()},
        },
        draw=lambda figure: _draw(figure, own, deciding),
    )


def _count(num_seqs: int, workload: Workload, max_model_len: int) -> Run:
    return counting_engine(SchedulerConfig(max_num_seqs=num_seqs), CacheConfig(), max_model_len=max_model_len).run(
        workload
    )


def _own_ms(run: Run, num_seqs: int) -> dict[str, float]:
    return percentiles([1000 * step.own_s for step in run.decode_steps(num_seqs)])


def _draw(figure: Any, own: dict[int, dict[str, float]], deciding: dict[int, dict[str, float]]) -> None:
    axes = figure.add_subplot()
    axes.plot(
        SIZES, [deciding[n]["p50"] for n in SIZES], "o-", color=PREDICTED, label="deciding and accounting, median"
    )
    axes.plot(SIZES, [own[n]["p50"] for n in SIZES], "o-", color=MEASURED, label="all but the operators, median")
    axes.plot(SIZES, [own[n]["p99"] for n in SIZES], ":", color=MEASURED, label="all but the operators, p99")
    axes.plot(list(GOALS_MS), list(GOALS_MS.values()), "k_", markersize=16, label="goal")
    finish(axes, xlabel="requests in the batch", ylabel="milliseconds a step", ylim=(0, None))

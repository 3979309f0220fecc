"""The engine's own time per step: everything but the model's operators, by number of requests in the batch.

Time of a decode step at a fixed batch and context, over prompts of different content.

A step reads the same weights and the same amount of KV for any tokens. So a hard question costs no more per token than
an easy one; it only takes more tokens. One engine runs the contents alternately, in many short runs, each round in
another order. Each run is compared with the other contents of its own round, because a machine's speed changes more
between rounds than between contents. The spread between the contents' medians is held against the spread that chance
alone gives: that of the same times with the contents exchanged at random within each round.

R13: the roofline of decode. A step that makes one token of one request reads every weight and its KV once.

The prediction is the bytes to read over the bandwidth measured in the same run. The measurement is TPOT at several
contexts. The claim is that the measured limits hold. If a step is faster than they allow, the limits are raised to fit
it; the claim's figure is the factor (1: they hold). The reached share of the floor is reported.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from random import Random
from typing import Any

import torch

from benchmarks.alternating import alternate, in_ms
from benchmarks.claim import Claim, ReproduceOptions, Reproduction
from benchmarks.counting_engine import counting_engine
from twostroke.config.cache import CacheConfig
from twostroke.config.load import LoadConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.hardware import Hardware
from twostroke.kernels.dispatch import operators_for
from twostroke.measure.figure import MEASURED, PREDICTED, bar_chart, style_axes
from twostroke.measure.limits import measure_limits
from twostroke.measure.model_engine import model_engine
from twostroke.measure.report import median, percentiles
from twostroke.measure.spec.measure import prompts
from twostroke.measure.sweep.run import SweepOptions, measure_sweep
from twostroke.measure.workload import RESERVED_TOKEN_IDS, Workload, WorkloadRequest
from twostroke.model.model_files import find_model
from twostroke.served_run import Run

SIZES = (1, 8, 32, 64)
GOALS_MS = {1: 0.3, 64: 1.0}
PROMPT = 16


def reproduce(options: ReproduceOptions) -> Reproduction:
    """Measure decode-only steps at several batch sizes, on the model and without one."""
    output = 128 if options.full else 24
    workloads = {n: options.workload_of_lengths([(PROMPT, output)] * n, seed=n) for n in SIZES}
    # without a model, a step is only deciding and accounting; the runner's preparation comes on top
    counting = {
        n: counting_engine(SchedulerConfig(max_num_seqs=n), CacheConfig(), max_model_len=PROMPT + output) for n in SIZES
    }
    deciding = {n: _own_ms(counting[n].run(workload), n) for n, workload in workloads.items()}
    own = deciding
    cache = CacheConfig(enable_prefix_caching=False)
    if options.with_model:
        scheduler = SchedulerConfig(max_num_seqs=max(SIZES))
        with closing(model_engine(options.load(PROMPT + output), scheduler, cache)) as engine:
            engine.run(workloads[max(SIZES)].cut_outputs(8), progress="engine time, warm-up")
            own = {n: _own_ms(engine.run(workload, progress="engine time"), n) for n, workload in workloads.items()}
    what = "engine's own time a step" if options.with_model else "deciding and accounting a step"
    titles = {n: f"{what}, {n} requests, median ms" for n in SIZES}
    return Reproduction(
        claims=tuple(
            Claim.at_most(title, GOALS_MS.get(n, math.inf), own[n]["p50"]).judged(options.full and n in GOALS_MS)
            for n, title in titles.items()
        ),
        config={"model": options.model_name if options.with_model else None},
        workload={"prompt_tokens": PROMPT, "output_tokens": output, "num_requests": SIZES},
        details={
            "own_ms": {str(n): of for n, of in own.items()},
            "deciding_ms": {str(n): of for n, of in deciding.items()},
        },
        draw=lambda figure: _draw(figure, own, deciding),
    )


def _own_ms(run: Run, num_seqs: int) -> dict[str, float]:
    return percentiles([1000 * step.own_s for step in run.decode_steps(num_seqs)])


def _draw(figure: Any, own: dict[int, dict[str, float]], deciding: dict[int, dict[str, float]]) -> None:
    axes = figure.add_subplot()
    for times, figure_name, style, colour, label in (
        (deciding, "p50", "o-", PREDICTED, "deciding and accounting, median"),
        (own, "p50", "o-", MEASURED, "all but the operators, median"),
        (own, "p99", ":", MEASURED, "all but the operators, p99"),
    ):
        axes.plot(SIZES, [times[n][figure_name] for n in SIZES], style, color=colour, label=label)
    axes.plot(list(GOALS_MS), list(GOALS_MS.values()), "k_", markersize=16, label="goal")
    style_axes(axes, xlabel="requests in the batch", ylabel="milliseconds a step", ylim=(0, None))


BATCHES = (1, 8)
CONTEXT = 512
CONTENTS = ("one token, repeated", "two tokens, alternating", "code", "random tokens")
GOAL_SPREAD = 0.05
"""Largest difference between the fastest and the slowest content, as a share of the step time."""
Prompts = Sequence[tuple[int, ...]]


def reproduce_content(options: ReproduceOptions) -> Reproduction:
    """Run all contents alternately, A B C D, B C D A, at each batch size."""
    rounds, steps = (200, 24) if options.full else (2, 6)
    given = {content: _prompts(content, options) for content in CONTENTS}
    cache = CacheConfig(enable_prefix_caching=False)
    scheduler = SchedulerConfig(max_num_seqs=max(BATCHES), max_num_batched_tokens=max(BATCHES) * CONTEXT)
    with closing(model_engine(options.load(CONTEXT + steps + 2), scheduler, cache)) as engine:

        def step_s(batch: int, content: str) -> float:
            requests = tuple(WorkloadRequest(prompt, steps + 1) for prompt in given[content][:batch])
            run = engine.run(Workload(requests), progress=f"{content}, batch {batch}")
            return median([step.wall_s for step in run.decode_steps(batch)])

        measured = {
            batch: alternate(
                rounds, CONTENTS, lambda content, _, batch=batch: step_s(batch, content), warm_up=1, rotates=True
            )
            for batch in BATCHES
        }
    chances = {batch: spread_by_chance(of_batch, options.seed) for batch, of_batch in measured.items()}
    noisy = [batch for batch, chance in chances.items() if chance > GOAL_SPREAD]
    remark = (
        f"the machine was too noisy to tell a difference of {GOAL_SPREAD:.0%} at batch {', '.join(map(str, noisy))}"
    )
    return Reproduction(
        claims=tuple(claims_of(measured, chances, full=options.full)),
        config={"model": options.model_name, "max_num_seqs": max(BATCHES)},
        workload={"context": CONTEXT, "batches": BATCHES, "contents": CONTENTS, "steps": steps, "seed": options.seed},
        details={"step_ms": {str(n): in_ms(of_batch) for n, of_batch in measured.items()}},
        remarks=(remark,) if noisy else (),
        draw=lambda figure: _draw_content(figure, measured),
        figure_size=(9.0, 4.0),
        warmup=1,
        repeats=rounds,
    )


Times = Mapping[str, Sequence[float]]
"""Median step of each round, in seconds, by content."""


def claims_of(measured: Mapping[int, Times], chances: Mapping[int, float], *, full: bool) -> Iterator[Claim]:
    """Compare the contents of each batch size.

    Args:
        measured: times by batch size.
        chances: spread by chance by batch size; where it is above the goal, nothing is judged.
        full: False reports and does not judge.
    """
    for batch, of_batch in measured.items():
        for content, seconds in of_batch.items():
            yield Claim.reported(f"step ms, batch {batch}, {content}", 1e3 * median(seconds))
        relative = beside_the_round(of_batch)
        between = spread([median(shares) for shares in relative.values()])
        yield Claim.at_most(f"batch {batch}: between the contents, share", GOAL_SPREAD, between, 0.0).judged(
            full and chances[batch] <= GOAL_SPREAD
        )
        yield Claim.reported(f"batch {batch}: between the contents by chance alone, 95th percentile", chances[batch])
        scatter = median([_middle_half(shares) for shares in relative.values()])
        yield Claim.reported(f"batch {batch}: between runs of one content, middle half, share of its round", scatter)
        within = median([_middle_half(seconds) / median(seconds) for seconds in of_batch.values()])
        yield Claim.reported(f"batch {batch}: between the rounds of one content, middle half, share", within)


def beside_the_round(of_batch: Times) -> dict[str, list[float]]:
    """Return each time as a share of the median over the contents of its round.

    >>> beside_the_round({"a": [1.0, 3.0], "b": [1.0, 3.0], "c": [1.5, 6.0]})
    {'a': [1.0, 1.0], 'b': [1.0, 1.0], 'c': [1.5, 2.0]}
    """
    middle = [median(of_round) for of_round in zip(*of_batch.values(), strict=True)]
    return {content: [s / m for s, m in zip(seconds, middle, strict=True)] for content, seconds in of_batch.items()}


def spread_by_chance(of_batch: Times, seed: int, trials: int = 400) -> float:
    """Return the spread between contents of equal medians that 95 of 100 random exchanges within rounds stay below.

    Each content's times are first divided by their median, so that a difference between contents does not count.
    """
    rng = Random(seed)
    relative = ([share / median(shares) for share in shares] for shares in beside_the_round(of_batch).values())
    rounds = [list(of_round) for of_round in zip(*relative, strict=True)]
    spreads: list[float] = []
    for _ in range(trials):
        for of_round in rounds:
            rng.shuffle(of_round)
        spreads.append(spread([median(shares) for shares in zip(*rounds, strict=True)]))
    return sorted(spreads)[int(0.95 * trials)]


def _middle_half(values: Sequence[float]) -> float:
    """Return the distance between the quarters: half of the values lie between them."""
    ordered = sorted(values)
    return ordered[(3 * len(ordered)) // 4] - ordered[len(ordered) // 4]


def spread(values: Sequence[float]) -> float:
    """Return the distance of the largest from the smallest, as a share of the median.

    >>> spread([9.0, 10.0, 12.0])
    0.3
    """
    return (max(values) - min(values)) / median(values)


def _prompts(content: str, options: ReproduceOptions) -> Prompts:
    files = find_model(options.model)
    vocab_size, count = files.config().vocab_size, max(BATCHES)
    rng = Random(options.seed)
    tokens = [rng.randrange(RESERVED_TOKEN_IDS, vocab_size) for _ in range(2)]
    if content == "one token, repeated":
        return [(tokens[0],) * CONTEXT] * count
    if content == "two tokens, alternating":
        return [tuple(tokens) * (CONTEXT // 2)] * count
    task = "code" if content == "code" else "random"
    return prompts(task, count, CONTEXT, files.tokenizer(), vocab_size, options.seed)


def _draw_content(figure: Any, measured: Mapping[int, Mapping[str, Sequence[float]]]) -> None:
    for axes, (batch, of_batch) in zip(figure.subplots(1, len(measured)), measured.items(), strict=True):
        for place, seconds in enumerate(of_batch.values()):
            axes.plot([place] * len(seconds), [1e3 * value for value in seconds], "o", color=MEASURED, alpha=0.4)
            axes.plot([place], [1e3 * median(seconds)], "k_", markersize=24)
        axes.set_xticks(range(len(of_batch)), [content.replace(", ", ",\n") for content in of_batch], fontsize=7)
        ylabel = f"ms a step, {batch} request{'s' if batch > 1 else ''} of {CONTEXT} tokens"
        style_axes(axes, legend=False, ylabel=ylabel, ylim=(0, None))


_LARGEST_CACHE = 1 << 29
"""Bytes of the largest cache; a model that fits into caches may be faster than memory allows."""


def reproduce_roofline(options: ReproduceOptions) -> Reproduction:
    """Sweep over contexts."""
    config = find_model(options.model).config()
    threads = options.threads or Hardware.of_this_machine().cores
    lengths = "64,256,512" if options.full else "16,32,64"
    sweep_options = SweepOptions(
        prompt_lengths=lengths, contexts=lengths, batch_sizes="1", batch_context=16, steps=24 if options.full else 6
    )
    operators = operators_for(torch.device("cpu"), getattr(torch, config.dtype))
    before = measure_limits(operators, threads)
    load = LoadConfig(model=options.model, threads=threads)
    sweep = measure_sweep(sweep_options, load, CacheConfig(enable_prefix_caching=False), config.max_context)
    limits = before.best_of(measure_limits(operators, threads))
    measured = limits.of(config.dtype)
    machine = sweep.raised(measured)
    floors = {point.context: point.floor_s(machine) for point in sweep.by_context}
    in_memory = all(point.cost.weight_bytes > _LARGEST_CACHE for point in sweep.by_context)
    # a small model's weights stay in the caches, so memory bandwidth is no bound
    is_judged = options.full and in_memory and not limits.is_estimate
    raised = machine.bytes_per_s / measured.bytes_per_s
    claims = [Claim.at_most("bandwidth that steps show, over the measured", 1.0, raised, 1.0).judged(is_judged)]
    for point in sweep.by_context:
        what = f"TPOT at context {point.context}, ms"
        floor_ms = 1e3 * floors[point.context]
        claims.append(Claim.reported(what, 1e3 * point.tpot_s, floor_ms))
        claims.append(
            Claim.reported(f"share of the floor at context {point.context}", floors[point.context] / point.tpot_s)
        )
    return Reproduction(
        claims=tuple(claims),
        config={"model": options.model_name, "dtype": config.dtype, "threads": threads},
        workload={"contexts": lengths, "batch": 1},
        details={"limits": limits.as_json()},
        remarks=_remarks(in_memory=in_memory, is_estimate=limits.is_estimate),
        draw=bar_chart(
            [str(context) for context in floors],
            {
                "floor": [1e3 * floor_s for floor_s in floors.values()],
                "measured": [1e3 * point.tpot_s for point in sweep.by_context],
            },
            "TPOT, ms",
            "context",
        ),
    )


def _remarks(*, in_memory: bool, is_estimate: bool) -> tuple[str, ...]:
    remarks = () if in_memory else ("caches may hold this model: the floor of memory is reported, not claimed",)
    busy = "others were at work while the machine was measured: its limits are an estimate, reported, not claimed"
    return (*remarks, busy) if is_estimate else remarks

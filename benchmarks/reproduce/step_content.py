"""Time of a decode step at a fixed batch and context, over prompts of different content.

A step reads the same weights and the same amount of KV whatever the tokens mean. So a hard question costs no more per
token than an easy one; it only takes more tokens. One engine runs each content in turn, repeatedly. The spread between
contents is compared with the spread between runs of one content.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from random import Random
from typing import Any

from benchmarks.reproduce.claim import Claim, ReproduceOptions, Reproduction
from twostroke.config.cache import CacheConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.measure.figure import MEASURED, finish
from twostroke.measure.model_engine import ModelEngine, model_engine
from twostroke.measure.report import median
from twostroke.measure.spec.measure import prompts
from twostroke.measure.workload import RESERVED_TOKEN_IDS, Workload, WorkloadRequest
from twostroke.model.model_files import find_model

BATCHES = (1, 8)
CONTEXT = 512
CONTENTS = ("one token, repeated", "two tokens, alternating", "code", "random tokens")
GOAL_SPREAD = 0.05
"""Largest difference between the fastest and the slowest content, as a share of the step time."""
Prompts = Sequence[tuple[int, ...]]


def reproduce_content(options: ReproduceOptions) -> Reproduction:
    """Run all contents in turn, A B C D A B C D, at each batch size."""
    rounds, steps = (9, 48) if options.full else (2, 6)
    given = {content: _prompts(content, options) for content in CONTENTS}
    cache = CacheConfig(enable_prefix_caching=False)
    scheduler = SchedulerConfig(max_num_seqs=max(BATCHES), max_num_batched_tokens=max(BATCHES) * CONTEXT)
    measured: dict[int, dict[str, list[float]]] = {}
    with closing(model_engine(options.load(CONTEXT + steps + 2), scheduler, cache)) as engine:
        for batch in BATCHES:
            of_batch: dict[str, list[float]] = {content: [] for content in CONTENTS}
            for number in range(rounds + 1):
                for content, seconds in of_batch.items():
                    found = _step_s(engine, given[content][:batch], steps, f"{content}, batch {batch}")
                    if number:  # the first round warms up
                        seconds.append(found)
            measured[batch] = of_batch
    return Reproduction(
        claims=tuple(claims_of(measured, full=options.full)),
        config={"model": options.model_name, "max_num_seqs": max(BATCHES)},
        workload={"context": CONTEXT, "batches": BATCHES, "contents": CONTENTS, "steps": steps, "seed": options.seed},
        details={"step_ms": {str(n): _in_ms(of_batch) for n, of_batch in measured.items()}},
        draw=lambda figure: _draw_content(figure, measured),
        figure_size=(9.0, 4.0),
        warmup=1,
        repeats=rounds,
    )


def claims_of(measured: Mapping[int, Mapping[str, Sequence[float]]], *, full: bool) -> Iterator[Claim]:
    """Compare the contents of each batch size.

    Args:
        measured: median step of each round, in seconds, by batch size and content.
        full: False reports and does not judge.
    """
    for batch, of_batch in measured.items():
        middle = {content: median(seconds) for content, seconds in of_batch.items()}
        for content, seconds in middle.items():
            yield Claim.reported(f"step ms, batch {batch}, {content}", 1e3 * seconds)
        yield Claim.at_most(
            f"batch {batch}: between the contents, share", GOAL_SPREAD, spread(list(middle.values())), 0.0
        ).judged(full)
        within = median([spread(seconds) for seconds in of_batch.values()])
        yield Claim.reported(f"batch {batch}: between the rounds of one content, share", within)


def spread(values: Sequence[float]) -> float:
    """Return the distance of the largest from the smallest, as a share of the median.

    >>> spread([9.0, 10.0, 12.0])
    0.3
    """
    return (max(values) - min(values)) / median(values)


def _prompts(content: str, options: ReproduceOptions) -> Prompts:
    files = find_model(options.model)
    vocab_size, count = files.config().vocab_size, max(BATCHES)
    dice = Random(options.seed)
    tokens = [dice.randrange(RESERVED_TOKEN_IDS, vocab_size) for _ in range(2)]
    if content == "one token, repeated":
        return [(tokens[0],) * CONTEXT] * count
    if content == "two tokens, alternating":
        return [tuple(tokens) * (CONTEXT // 2)] * count
    task = "code" if content == "code" else "random"
    return prompts(task, count, CONTEXT, files.tokenizer(), vocab_size, options.seed)


def _step_s(engine: ModelEngine, given: Prompts, steps: int, progress: str) -> float:
    requests = tuple(WorkloadRequest(prompt, steps + 1) for prompt in given)
    run = engine.run(Workload(requests), progress=progress)
    return median([step.wall_s for step in run.decode_steps(len(given))])


def _in_ms(of_batch: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    return {content: [round(1e3 * value, 4) for value in seconds] for content, seconds in of_batch.items()}


def _draw_content(figure: Any, measured: Mapping[int, Mapping[str, Sequence[float]]]) -> None:
    for axes, (batch, of_batch) in zip(figure.subplots(1, len(measured)), measured.items(), strict=True):
        for place, seconds in enumerate(of_batch.values()):
            axes.plot([place] * len(seconds), [1e3 * value for value in seconds], "o", color=MEASURED, alpha=0.4)
            axes.plot([place], [1e3 * median(seconds)], "k_", markersize=24)
        axes.set_xticks(range(len(of_batch)), [content.replace(", ", ",\n") for content in of_batch], fontsize=7)
        ylabel = f"ms a step, {batch} request{'s' if batch > 1 else ''} of {CONTEXT} tokens"
        finish(axes, legend=False, ylabel=ylabel, ylim=(0, None))

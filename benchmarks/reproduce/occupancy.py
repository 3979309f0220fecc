"""Slots in use at each step: a saw-tooth with static batching, nearly all slots with continuous batching.

    static       16 ▇▇▅▃▂▁▇▇▆▄▂▁▇…      full when a batch begins, falling until its longest ends
    continuous   16 ▇▇▇▇▇▇▇▇▇▇▇▇▇…      full while any request waits

The real scheduler counts the series with an executor that computes nothing. They must equal the ideal schedules
(benchmarks/slots.py) step by step. On a model, the same load shows occupancy over time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from benchmarks.claim import Claim, ReproduceOptions, Reproduction
from benchmarks.counting_engine import batching, count_slots
from benchmarks.reproduce.recorded import served
from benchmarks.slots import SCHEDULES, SlotCount, SlotStep
from twostroke.measure.figure import MEASURED, PREDICTED, style_axes
from twostroke.measure.workload import Lengths, Workload
from twostroke.served_run import Run

SLOTS = 16
LENGTHS = Lengths.exponential(64)
GROUPS = 8
"""Number of static batches."""
MODES = ("static", "continuous")


def reproduce(options: ReproduceOptions) -> Reproduction:
    """Count the slots of each step, and on a model when each step ended."""
    # prompts of one token, so that each step of a request makes a token
    workload = options.drawn(SLOTS * GROUPS, Lengths.fixed(1), LENGTHS)
    ideal = {mode: list(occupancy_of(SCHEDULES[mode](workload.output_lengths, SLOTS))) for mode in MODES}
    runs = {mode: count_slots(mode, SLOTS, workload, f"occupancy, {mode}") for mode in MODES}
    counted = {mode: [step.num_seqs for step in run.steps] for mode, run in runs.items()}
    claims = list(_claims(workload, ideal, counted, runs))
    details: dict[str, Any] = {"slots_by_step": counted}
    if options.with_model:
        warm_up = workload.first(SLOTS).cut_outputs(4)
        title = "occupancy on the model, "
        timed = {
            mode: served(options, *batching(mode, SLOTS), workload, warm_up=warm_up, title=title + mode)
            for mode in MODES
        }
        details["slots_over_time"] = {
            mode: {"end_s": [round(s.end_s, 6) for s in run.steps], "num_seqs": [s.num_seqs for s in run.steps]}
            for mode, run in timed.items()
        }
        for mode, run in timed.items():
            off = _num_differing(ideal[mode], [s.num_seqs for s in run.steps])
            claims.append(Claim.equal(f"{mode}: steps on the model that differ from the ideal schedule", 0, off))
        ratio = timed["static"].duration_s / timed["continuous"].duration_s
        claims.append(Claim.reported("wall time: static / continuous", ratio))
    return Reproduction(
        claims=tuple(claims),
        config={"slots": SLOTS, "prompt_tokens": 1, "model": options.model_name if options.with_model else None},
        workload={"lengths": str(LENGTHS), "requests": len(workload), "seed": options.seed},
        details=details,
        remarks=() if options.with_model else ("times were left out: they need a model",),
        draw=lambda figure: _draw(figure, details),
        figure_size=(9.0, 4.5),
    )


def occupancy_of(schedule: Iterator[SlotStep]) -> Iterator[int]:
    """Yield the live slots of each step.

    >>> list(occupancy_of(static_schedule([3, 1, 2, 1], 2)))
    [2, 1, 1, 2, 1]
    """
    for part in schedule:
        yield from [part.live] * part.num_steps


def num_teeth(series: Sequence[int]) -> int:
    """Count the steps at which occupancy rises after a fall: each is a new batch of a saw-tooth.

    >>> num_teeth([4, 3, 1, 4, 2, 4, 4, 3]), num_teeth([4, 4, 4, 3, 1])
    (2, 0)
    """
    return sum(later > earlier for earlier, later in pairwise(series))


def _claims(
    workload: Workload,
    ideal: Mapping[str, Sequence[int]],
    counted: Mapping[str, Sequence[int]],
    runs: Mapping[str, Run],
) -> Iterator[Claim]:
    for mode in MODES:
        off = _num_differing(ideal[mode], counted[mode])
        yield Claim.equal(f"{mode}: steps that differ from the ideal schedule", 0, off)
        count = SlotCount.of(SCHEDULES[mode](workload.output_lengths, SLOTS), SLOTS)
        measured = sum(counted[mode]) / (len(counted[mode]) * SLOTS)
        yield Claim.within(f"{mode}: share of slots in use", count.useful_share, measured, 1e-9)
    yield Claim.equal("static: batches that begin behind the first (teeth)", GROUPS - 1, num_teeth(counted["static"]))
    yield Claim.equal("continuous: steps at which occupancy rises", 0, num_teeth(counted["continuous"]))
    waited = {mode: [step.num_seqs for step in run.steps if step.num_waiting] for mode, run in runs.items()}
    # the last request of a batch runs alone for at least one step if it is longer than the second longest
    yield Claim.at_most("static: fewest slots in use while somebody waits", SLOTS // 4, min(waited["static"]))
    yield Claim.equal("continuous: fewest slots in use while somebody waits", SLOTS, min(waited["continuous"]))


def _num_differing(ideal: Sequence[int], found: Sequence[int]) -> int:
    """Return the number of steps at which two series differ, including steps that only one of them has."""
    same_length = min(len(ideal), len(found))
    differing = sum(a != b for a, b in zip(ideal[:same_length], found[:same_length], strict=True))
    return differing + abs(len(ideal) - len(found))


def _draw(figure: Any, details: Mapping[str, Any]) -> None:
    timed = details.get("slots_over_time")
    axes_of = figure.subplots(2, 1, sharex=True)
    for axes, mode, colour in zip(axes_of, MODES, (PREDICTED, MEASURED), strict=True):
        if timed is None:
            series = details["slots_by_step"][mode]
            ends: Sequence[float] = range(1, len(series) + 1)
        else:
            series, ends = timed[mode]["num_seqs"], timed[mode]["end_s"]
        begins = [0.0, *ends[:-1]]
        axes.fill_between([*begins, ends[-1]], [*series, series[-1]], step="post", color=colour, linewidth=0)
        axes.axhline(SLOTS, color="black", linewidth=0.8, linestyle=":")
        style_axes(axes, legend=False, ylabel=f"slots, {mode}", ylim=(0, SLOTS * 1.1))
    axes_of[-1].set_xlabel("step" if timed is None else "seconds")

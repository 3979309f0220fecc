"""R2: one long request holds up short ones: 2,000 tokens in a batch with nine of 20, ten slots.

Static batching keeps nine slots idle for 1,980 of 2,000 steps: 2,180 useful slot-steps of 20,000. Continuous batching
needs 218 steps for the same ten requests while the queue is full. Below saturation, a short request that arrives while
the long one runs waits for the end of the batch with static batching, and only for its own 20 tokens with continuous
batching.
"""

from __future__ import annotations

from typing import Any

from benchmarks.claim import Claim, ReproduceOptions, Reproduction
from benchmarks.counting_engine import count_slots
from benchmarks.slots import SCHEDULES, SlotCount
from twostroke.measure.figure import MEASURED, PREDICTED, bars, style_axes
from twostroke.measure.report import median
from twostroke.measure.workload import with_arrivals, workload_of_lengths
from twostroke.served_run import Run

SLOTS = 10
LONG, SHORT = 2000, 20
GROUP = (LONG, *(SHORT,) * 9)
MODES = ("static", "continuous")
GROUPS = {True: 100, False: 12}
"""Multiples of ten requests, by whether the size is full."""
STEPS_BETWEEN_ARRIVALS = LONG // SLOTS * 1.1
"""Steps between arrivals, for a load just below static batching's capacity of ten requests per 2,000 steps."""


def reproduce(options: ReproduceOptions) -> Reproduction:
    """Predict and measure throughput with a full queue, and latency just below saturation."""
    num_groups = GROUPS[options.full]
    outputs = GROUP * num_groups
    static, continuous = (SlotCount.of(SCHEDULES[mode](outputs, SLOTS), SLOTS) for mode in MODES)
    ideal_steps_each = sum(GROUP) / SLOTS / len(GROUP)  # every slot busy
    useful_share, ratio = static.useful_share, static.num_steps / len(outputs) / ideal_steps_each

    full_queue = workload_of_lengths([(1, output) for output in outputs], seed=options.seed)
    saturated = {mode: count_slots(mode, SLOTS, full_queue, f"R2, {mode}") for mode in MODES}
    arrivals = [i * STEPS_BETWEEN_ARRIVALS for i in range(len(full_queue))]
    spread = {mode: count_slots(mode, SLOTS, with_arrivals(full_queue, arrivals), f"R2, {mode}") for mode in saturated}

    steps_each = {mode: _steps_per_request(run) for mode, run in saturated.items()}
    measured_share = sum(s.num_seqs for s in saturated["static"].steps) / len(saturated["static"].steps) / SLOTS
    short_p50 = {mode: _short_p50(run) for mode, run in spread.items()}
    claims = (
        Claim.within("useful slot-steps, static", useful_share, measured_share, 1e-9),
        Claim.within("steps per request while the queue is full: static / continuous", ratio, _ratio(steps_each), 0.01),
        Claim.at_least("the same", 8.0, _ratio(steps_each)),
        Claim.equal("steps to the queue's end, static", static.num_steps, len(saturated["static"].steps)),
        Claim.equal("steps to the queue's end, continuous", continuous.num_steps, len(saturated["continuous"].steps)),
        Claim.at_most("median latency of a short request, continuous, in steps", SHORT, short_p50["continuous"], SHORT),
        Claim.at_least("median latency of a short request: static / continuous", 10.0, _ratio(short_p50)),
    )
    return Reproduction(
        claims=claims,
        config={"slots": SLOTS},
        workload={"group": GROUP, "groups": num_groups, "steps_between_arrivals": STEPS_BETWEEN_ARRIVALS},
        details={
            "steps_per_request": steps_each,
            "short_p50_steps": short_p50,
            "short_p50_steps_full_queue": {mode: _short_p50(run) for mode, run in saturated.items()},
            "occupancy": {mode: [s.num_seqs for s in run.steps[:6000]][::20] for mode, run in saturated.items()},
        },
        draw=lambda figure: _draw(figure, saturated, short_p50),
        figure_size=(9.0, 3.6),
    )


def _steps_per_request(run: Run) -> float:
    """Return the steps that a request costs while requests wait, by the share of its tokens made in such steps."""
    waiting = [s for s in run.steps if s.num_waiting]
    tokens_each = run.num_output_tokens / len(run.requests)
    return tokens_each * len(waiting) / sum(s.num_seqs for s in waiting)


def _short_p50(run: Run) -> float:
    return median([r.times.e2e_s for r in run.requests if len(r.times.token_times_s) == SHORT])


def _ratio(of: dict[str, float]) -> float:
    return of["static"] / of["continuous"]


def _draw(figure: Any, runs: dict[str, Run], short_p50: dict[str, float]) -> None:
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    for (mode, run), colour in zip(runs.items(), (PREDICTED, MEASURED), strict=True):
        left.plot([s.num_seqs for s in run.steps[: 3 * LONG]], color=colour, label=mode, linewidth=0.8)
    style_axes(left, legend=False, xlabel="step", ylabel="slots in use, of 10")
    left.legend(fontsize=8, frameon=False, loc="center right")
    bars(right, list(short_p50), {"short requests": list(short_p50.values())}, "median latency, steps")
    right.set_yscale("log")

"""R1: continuous against static batching, in slot-steps and in seconds.

Static batching makes all requests of a batch wait for the longest, so a slot-step is useful with a probability of
mean / E[longest of B]; continuous batching uses every slot while any request waits. The gain is E[max of B] / mean: the
harmonic number for exponential lengths, 2 B / (B + 1) for uniform ones, nothing for constant ones.

In seconds the gain is smaller, because a step with few live rows is cheaper than a full one (static mode computes no
dead rows). Its own prediction: step time is measured over live rows and context, fitted, then summed over the ideal
schedules of both modes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.alternating import alternate, close_together, ratio
from benchmarks.claim import Claim, ReproduceOptions, Reproduction
from benchmarks.counting_engine import batching, count_slots
from benchmarks.reproduce.recorded import FittedSteps
from benchmarks.slots import SCHEDULES, SlotCount, SlotStep
from twostroke.config.scheduler import SchedulerConfig
from twostroke.measure.figure import bars
from twostroke.measure.model_engine import model_engine
from twostroke.measure.workload import Lengths, Workload
from twostroke.served_run import Run

SLOTS = (4, 8, 16, 32)
LENGTHS = {"exponential": Lengths.exponential(64), "uniform": Lengths.uniform(1, 128), "constant": Lengths.fixed(64)}
GROUPS: Mapping[str, Mapping[int, int]] = {
    "exponential": {4: 1600, 8: 800, 16: 400, 32: 400},
    "uniform": dict.fromkeys(SLOTS, 400),
    "constant": dict.fromkeys(SLOTS, 50),
}
"""Static batches: enough that the mean of their longest is within a percent or two of its expectation."""
WALL_GROUPS, WALL_ROUNDS = 5, 2
"""Static batches per size on the model, and rounds in which both modes run them alternately."""
STEPS_PER_HEIGHT = 24
"""Steps that are timed at each number of live requests."""
BATCHINGS = ("static", "continuous")


def reproduce(options: ReproduceOptions) -> Reproduction:
    """Predict and measure all sizes and length distributions."""
    claims: list[Claim] = []
    details: dict[str, Any] = {"slot_steps": {}, "wall": {}}
    num_off = 0
    for kind, lengths in LENGTHS.items():
        for num_slots in SLOTS:
            case = _slot_steps(kind, lengths, num_slots, options)
            details["slot_steps"][f"{kind}-{num_slots}"] = case
            num_off += sum(abs(case[f"{mode}_steps"] - case[f"{mode}_steps_ideal"]) for mode in BATCHINGS)
            what = f"slot-steps, {kind}, {num_slots} slots: static / continuous"
            claims.append(Claim.within(what, case["closed_form"], case["measured"], 0.05))
    claims.append(Claim.equal("steps more or fewer than the ideal schedules, all of the above", 0, int(num_off)))
    remarks: tuple[str, ...] = ()
    if options.with_model:
        for name, wall in _wall(options).items():
            details["wall"][name] = wall
            what = f"wall time, {name} slots: static / continuous"
            claims.append(Claim.within(what, wall["predicted"], wall["measured"], 0.2).judged(options.full))
    else:
        remarks = ("wall time was left out: it needs a model",)
    return Reproduction(
        claims=tuple(claims),
        config={"slots": SLOTS, "prompt_tokens": 1, "model": options.model_name if options.with_model else None},
        workload={"lengths": {kind: str(lengths) for kind, lengths in LENGTHS.items()}, "seed": options.seed},
        details=details,
        remarks=remarks,
        draw=lambda figure: _draw(figure, details),
        figure_size=(13.0, 4.2),
    )


# ---------------------------------------------------------------------- slot-steps


def _slot_steps(kind: str, lengths: Lengths, num_slots: int, options: ReproduceOptions) -> dict[str, float]:
    num_groups = GROUPS[kind][num_slots] // (1 if options.full else 10)
    workload = _workload(lengths, num_slots * num_groups, options)
    drawn = workload.output_lengths
    ideal = {mode: SlotCount.of(SCHEDULES[mode](drawn, num_slots), num_slots) for mode in BATCHINGS}
    predicted = {
        "textbook": lengths.textbook_max_over_mean(num_slots),
        "closed_form": lengths.expected_max(num_slots) / lengths.expected,
        "drawn_lengths": num_slots / ideal["static"].tokens_per_step,
    }
    runs = {mode: count_slots(mode, num_slots, workload, f"R1 {kind}, {num_slots} slots, {mode}") for mode in BATCHINGS}
    # while requests wait; a static batch wastes as much in the last group as in any other
    rates = {
        "static": _tokens_per_step(runs["static"], saturated_only=False),
        "continuous": _tokens_per_step(runs["continuous"], saturated_only=True),
    }
    whole = {mode: _tokens_per_step(run, saturated_only=False) for mode, run in runs.items()}
    return {
        **predicted,
        "measured": rates["continuous"] / rates["static"],
        "measured_with_drain": whole["continuous"] / whole["static"],
        "static_useful_share": rates["static"] / num_slots,
        "continuous_useful_share": rates["continuous"] / num_slots,
        **{f"{mode}_steps": len(run.steps) for mode, run in runs.items()},
        **{f"{mode}_steps_ideal": count.num_steps for mode, count in ideal.items()},
        "num_requests": len(workload),
    }


def _tokens_per_step(run: Run, *, saturated_only: bool) -> float:
    steps = [s for s in run.steps if s.num_waiting or not saturated_only]
    return sum(s.num_seqs for s in steps) / len(steps)


# ---------------------------------------------------------------------- wall time


def _predicted_s(mode: str, num_slots: int, workload: Workload, times: FittedSteps) -> float:
    """Return the step times summed over the ideal schedule, its drain included."""
    return sum(_part_s(part, times) for part in SCHEDULES[mode](workload.output_lengths, num_slots))


def _part_s(part: SlotStep, times: FittedSteps) -> float:
    # a prompt is one token: a request that has made n tokens has computed n, and computes the last one of them
    return part.num_steps * times.seconds([(round(part.mean_age), 1, 1)] * part.live)


def _wall(options: ReproduceOptions) -> Mapping[str, dict[str, Any]]:
    num_groups = WALL_GROUPS if options.full else 3
    workloads = {
        (kind, n): _workload(lengths, n * num_groups, options) for kind, lengths in LENGTHS.items() for n in SLOTS
    }
    load = options.load(max(workload.max_request_tokens for workload in workloads.values()))
    times = FittedSteps.measured(options, SchedulerConfig(max_num_seqs=max(SLOTS)), repeats=STEPS_PER_HEIGHT)
    results: dict[str, dict[str, Any]] = {}
    with close_together({(m, n): model_engine(load, *batching(m, n)) for m in BATCHINGS for n in SLOTS}) as engines:

        def seconds(mode: str, kind: str, n: int) -> float:
            return engines[mode, n].run(workloads[kind, n], progress=f"R1 wall {kind}, {n}, {mode}").duration_s

        for case, workload in workloads.items():
            predicted = {mode: _predicted_s(mode, case[1], workload, times) for mode in BATCHINGS}
            rounds = WALL_ROUNDS if options.full else 1
            measured = alternate(rounds, BATCHINGS, lambda mode, _, case=case: seconds(mode, *case))
            results[f"{case[0]}, {case[1]}"] = {
                "predicted": predicted["static"] / predicted["continuous"],
                "measured": ratio(measured["static"], measured["continuous"]),
                "predicted_s": predicted,
                "measured_s": measured,
            }
    return results


# ---------------------------------------------------------------------- parts


def _workload(lengths: Lengths, count: int, options: ReproduceOptions) -> Workload:
    # prompts of one token: a step's rows are then exactly its live requests
    return options.drawn(count, Lengths.fixed(1), lengths)


def _draw(figure: Any, details: Mapping[str, Any]) -> None:
    for i, kind in enumerate(LENGTHS):
        axes = figure.add_subplot(1, len(LENGTHS), i + 1)
        cases = [details["slot_steps"][f"{kind}-{n}"] for n in SLOTS]
        groups = {
            "slot-steps, closed form": [c["closed_form"] for c in cases],
            "slot-steps, measured": [c["measured"] for c in cases],
        }
        if details["wall"]:
            walls = [details["wall"][f"{kind}, {n}"] for n in SLOTS]
            groups |= {f"wall time, {of}": [w[of] for w in walls] for of in ("predicted", "measured")}
        bars(axes, [str(n) for n in SLOTS], groups, "static / continuous" if i == 0 else "")
        axes.set_xlabel(f"slots, {kind} output lengths", fontsize=9)

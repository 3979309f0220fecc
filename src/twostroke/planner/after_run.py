"""Comparison of a plan with the event log of a run.

sizes    planned and actual number of blocks, bytes per block, and longest request
times    with calibrated steps: the run's requests in simulated time, and as measured
         (not where the log is of another machine)
floors   otherwise: each step of the run and its floor at the plan's rates, which are first raised to the fastest step
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from twostroke.cost.step_cost import MachineLimits, StepCost
from twostroke.errors import InvalidParameter
from twostroke.events import Event, ExpertsMeasured, StepCommitted, StepScheduled
from twostroke.planner.machine import ObservedRun, machine_mismatch
from twostroke.planner.plan import Plan
from twostroke.planner.replay import figures, replay_log
from twostroke.scheduler.replay import layout_of
from twostroke.simulation.requests import read_recording


@dataclass(frozen=True, slots=True)
class SizeComparison:
    """One size as planned and as measured."""

    figure: str
    planned: int
    measured: int

    @property
    def error(self) -> float:
        """Relative error: planned / measured - 1.

        >>> SizeComparison("num_blocks", 90, 100).error
        -0.1
        """
        return round(self.planned / self.measured - 1, 6)


class ObservedStep(NamedTuple):
    """One step of a log."""

    cost: StepCost
    seconds: float
    """Seconds from its decision to its result."""
    has_prefill: bool


@dataclass(frozen=True, slots=True)
class FloorComparison:
    """Steps of one kind, and their least possible times."""

    kind: str
    num_steps: int
    median_s: float
    median_floor_s: float
    share: float
    """Sum of the floors over sum of the times: 1 is the machine at its limits."""
    nearest: float
    """Floor over time of the step nearest to its floor, at most 1."""


@dataclass(frozen=True, slots=True)
class PlanComparison:
    """A plan compared with one run."""

    sizes: tuple[SizeComparison, ...]
    """Sizes; exact if the engine ran with the planned settings."""
    planned: dict[str, Any]
    """Planned times as in figures(); empty without calibrated steps."""
    measured: dict[str, Any]
    beside_floors: tuple[FloorComparison, ...]
    """Steps and their floors; only without calibrated steps, and for a log of the plan's machine."""
    why_not: str
    """Reason why times are not compared; empty where they are."""


def observed_step_costs(events: Sequence[Event]) -> list[ObservedStep]:
    """Return the work of each step of a log, and its seconds."""
    decided: dict[tuple[str, int], StepScheduled] = {}
    seen: list[ObservedStep] = []
    for event in events:
        if isinstance(event, StepScheduled):
            decided[event.process, event.batch.step] = event
        elif isinstance(event, StepCommitted):
            begin = decided.pop((event.process, event.step), None)
            if begin is not None and begin.cost is not None and event.time_s > begin.time_s:
                seen.append(ObservedStep(begin.cost, event.time_s - begin.time_s, begin.batch.num_prefill_tokens > 0))
    return seen


def observed_run(events: Sequence[Event]) -> ObservedRun:
    """Return what a log shows of its machine.

    Raises:
        InvalidParameter: the log is not one of a single engine.
    """
    steps = tuple((step.cost, step.seconds) for step in observed_step_costs(events))
    measured = [event.shares for event in events if isinstance(event, ExpertsMeasured)]
    return ObservedRun(read_recording(events).started.machine, steps, measured[-1] if measured else ())


def beside_floors(seen: Sequence[ObservedStep], limits: MachineLimits) -> tuple[FloorComparison, ...]:
    """Compare the steps of a log with their floors: decode-only steps, and steps with prefill."""
    kinds = {"decode steps": False, "steps with prefill": True}
    found: list[FloorComparison] = []
    for kind, has_prefill in kinds.items():
        pairs = [(step.seconds, limits.floor_s(step.cost)) for step in seen if step.has_prefill == has_prefill]
        if pairs:
            seconds, floors = zip(*pairs, strict=True)
            nearest = max(floor / taken for taken, floor in pairs)
            found.append(
                FloorComparison(kind, len(pairs), median(seconds), median(floors), sum(floors) / sum(seconds), nearest)
            )
    return tuple(found)


def compare(plan: Plan, events: Sequence[Event]) -> PlanComparison:
    """Compare a plan with the log of one engine.

    If the plan was made with `observed_run(events)`, no floor exceeds a step.

    Raises:
        InvalidParameter: the log is of another model, or none that can be replayed.
    """
    memory, started = plan.memory, read_recording(events).started
    planned = f"{memory.model} ({memory.architecture}, {memory.num_parameters} parameters"
    if not started.model.startswith(planned):
        limit = f"is of another model, {started.model}; planned was {planned})"
        raise InvalidParameter("measured", f"the log of {started.process}", limit, "Plan the model that ran.")
    layout = layout_of(started.layout)
    why_not = machine_mismatch(plan.machine.limits, started.machine)
    predicted: dict[str, Any] = {}
    measured: dict[str, Any] = {}
    floors: tuple[FloorComparison, ...] = ()
    if plan.is_predicted and not why_not:
        replayed = replay_log(events, (), plan.step_times)
        predicted, measured = figures(replayed.back_test.run), figures(replayed.measured)
    elif not why_not:
        floors = beside_floors(observed_step_costs(events), plan.machine.limits)
        if not floors:
            why_not = "no finished step of the log has a cost"
    return PlanComparison(
        sizes=(
            SizeComparison("kv_bytes_per_block", memory.layout.bytes_per_block, layout.bytes_per_block),
            SizeComparison("num_blocks", memory.num_blocks, started.num_blocks),
            SizeComparison("max_model_len", memory.max_model_len, started.max_model_len),
            SizeComparison("max_num_seqs", memory.max_num_seqs, started.scheduler["max_num_seqs"]),
        ),
        planned=predicted,
        measured=measured,
        beside_floors=floors,
        why_not=why_not,
    )

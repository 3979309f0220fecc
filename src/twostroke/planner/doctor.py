"""`twostroke doctor`: the constraint that binds an engine, the settings that relieve it, and their predicted effects.

    signals       figures of the last run in the history                                    (signals.py)
    constraint    what the time goes into: nothing, arithmetic, KV, slots, long prompts …   (constraint.py)
    levers        the settings that relieve each constraint                                 (levers.py)
    back-test     the history's requests in simulated time, unchanged; if it is far off, nothing is concluded
    prediction    every lever in simulated time; those that bring less than 10 % are dropped        (simulation/)
    faults        problems at any load, one rule for each                                   (faults.py)

The doctor reads events only and does not affect serving.

A log file that several starts have written to holds several runs, of which the last counts. A start begins another
run if a process of the same name, or an engine that is one process, has started before. A process that died is
restarted in the same run; the process that restarts it records the death (`EngineLost`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf
from typing import Any

from twostroke.cost.step_fit import fit_log
from twostroke.cost.step_model import StepTimeModel
from twostroke.errors import InvalidParameter
from twostroke.events import EngineLost, EngineStarted, Event
from twostroke.explain.names import ENGINE, place_of
from twostroke.measure.from_log import run_from_log
from twostroke.planner.back_test import refusal
from twostroke.planner.constraint import Binding, constraint_of
from twostroke.planner.faults import Fault, faults_of
from twostroke.planner.levers import MIN_LEVER_GAIN, Lever, levers_of
from twostroke.planner.read_signals import signals_of
from twostroke.planner.replay import check_predictable, figures, measured_steps, predict, since
from twostroke.planner.signals import Signals
from twostroke.served_run import Run
from twostroke.simulation.after_gap import after_gap
from twostroke.simulation.complete import check_usable
from twostroke.simulation.pools import SimulatedPools
from twostroke.simulation.requests import RecordedRun, read_recording
from twostroke.simulation.settings import WhatIf


def last_run(events: Sequence[Event]) -> tuple[Sequence[Event], int]:
    """Return the events of the last run, and how many runs there are."""
    begin, num_runs, begun = 0, 1, set[str]()
    for i, event in enumerate(events):
        if isinstance(event, EngineStarted):
            name = _name(event.process)
            if name in begun:
                begin, num_runs, begun = i, num_runs + 1, set[str]()
            begun.add(name)
        elif isinstance(event, EngineLost):
            begun.discard(_name(event.process))
    return events[begin:], num_runs


def _name(process: str) -> str:
    """Return the name that starts once in a run: a pool process's, or the place of a single-process engine."""
    place = place_of(process)
    return place if place == ENGINE else process


_MAX_TTFT_FACTOR = 1.5
"""Largest acceptable factor on the TTFT; a limit that costs more is too tight for the load."""
_MAX_SIMULATED_STEPS = 6000
"""Steps simulated for all predictions of a diagnosis together: about a second, for a history of any length."""
_FEW = 24
"""Fewest requests that make a load for predictions."""
_SLOWEST, _MEDIAN = "ttft_p99", "ttft_p50"
"""TTFT figures: a lever is judged by the first; it may also help the second alone."""
_COSTS = (_MEDIAN, "tpot_p50")
"""Figures that a lever may make worse."""
REFUSED = "no setting is advised"
"""Prefix of a remark that refuses a conclusion."""
_DELAYS_ADMISSION = (Binding.KV, Binding.SLOTS, Binding.LINK)
"""Constraints that delay the first token; the others delay later tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Results of a diagnosis."""

    constraint: Binding
    evidence: tuple[str, ...]
    levers: tuple[Lever, ...]
    """Levers predicted to bring 10 % or more: first those that change no output, then the others, best first."""
    to_measure: tuple[Lever, ...]
    """Levers whose gain cannot be derived from a log."""
    faults: tuple[Fault, ...]
    signals: Signals
    example: str
    """Request that shows the constraint best, for `twostroke explain`."""
    has_predictions: bool = False
    """Whether there was a lever whose effect could be predicted."""
    remark: str = ""
    """Reason for missing predictions, or the part of the history that was used; empty: all of it."""


def diagnose(
    events: Sequence[Event], step_times: StepTimeModel | None = None, link_bytes_per_s: float | None = None
) -> Diagnosis:
    """Diagnose a history.

    Args:
        events: events of a log, or a dump of the flight recorder.
        step_times: calibrated step times; None: fitted to the steps of the history.
        link_bytes_per_s: bandwidth from this machine to another; None: not known, and two pools are not predicted.

    Raises:
        InvalidParameter: the history lacks its beginning, times or other events, or the bandwidth is not positive.
    """
    if link_bytes_per_s is not None:
        SimulatedPools(prefill=1, decode=1, link_bytes_per_s=link_bytes_per_s)  # checked before anything is tried
    check_usable(events)
    events, num_runs = last_run(events)
    signals = signals_of(events)
    constraint, evidence = constraint_of(signals)
    named = levers_of(constraint, signals, link_bytes_per_s)
    candidates = tuple(lever for lever in named if lever.settings)
    levers, remark = _predict_levers(candidates, events, step_times, signals) if candidates else ((), "")
    of_runs = f"the log has {num_runs:,} runs; this is the last one" if num_runs > 1 else ""
    return Diagnosis(
        constraint=constraint,
        evidence=evidence,
        levers=levers,
        to_measure=tuple(lever for lever in named if not lever.settings),
        faults=faults_of(signals, constraint),
        signals=signals,
        example=(signals.longest_ttft if constraint in _DELAYS_ADMISSION else signals.longest_itl)[1],
        has_predictions=bool(candidates),
        remark="; ".join(filter(None, (remark, of_runs))),
    )


def _predict_levers(
    candidates: tuple[Lever, ...], events: Sequence[Event], step_times: StepTimeModel | None, signals: Signals
) -> tuple[tuple[Lever, ...], str]:
    """Return the levers that help, and a remark on how they were tried, or why not."""
    try:
        _check_alone(signals)
        known = after_gap(events)
        recording, measured = read_recording(known), run_from_log(known)
        check_predictable(recording.started)
        model = step_times or fit_log(measured_steps(events), recording.started.process)
    except InvalidParameter as error:  # a pool engine or too few steps: diagnose without predictions
        why = f"the log {error.limit}. {error.remedy}".rstrip() if error.name == "event_log" else str(error)
        return (), f"{REFUSED}, as nothing can be predicted: {why}"
    num_all = len(recording.requests)
    recording, measured = _latest(recording, measured, signals.num_steps * (1 + len(candidates)))
    before = figures(predict(recording, model, WhatIf()).run)
    judged = {"output_tok_s", *(lever.metric for lever in candidates)}
    refused = refusal(before, figures(measured), judged)
    if refused:
        return (), f"{REFUSED}: {refused}"
    knows_median = not refusal(before, figures(measured), (_MEDIAN,))
    predicted = [_predicted(lever, before, recording, model, knows_median) for lever in candidates]
    levers = [lever for lever in _best_of_each_name(predicted) if lever.gain >= MIN_LEVER_GAIN]
    remarks = [f"no setting that relieves it is predicted to bring {MIN_LEVER_GAIN - 1:.0%}"] if not levers else []
    if len(recording.requests) < num_all:
        remarks.append(f"predicted by the last {len(recording.requests):,} of {num_all:,} requests")
    return tuple(sorted(levers, key=lambda lever: (not lever.is_exact, -lever.gain))), "; ".join(remarks)


def _check_alone(signals: Signals) -> None:
    if signals.has_pools or signals.num_processes > 1:
        limit = "is that of an engine in a pool; only a single engine can be simulated from its log"
        raise InvalidParameter("event_log", "these events", limit)


def _predicted(
    lever: Lever, before: dict[str, float], recording: RecordedRun, model: StepTimeModel, knows_median: bool
) -> Lever:
    """Return the lever with its figures in simulated time, and those of the history.

    A lever judged by the TTFT of the slowest requests also counts where it helps the median alone: the slowest may
    have the longest prompts, which no setting makes shorter. It is then reported and judged by the median, unless
    another figure gets worse by a larger factor.

    Args:
        lever: lever to try.
        before: predicted figures without it.
        recording: requests of the history.
        model: step times.
        knows_median: whether the median TTFT without the lever is predicted well enough to judge by it.
    """
    after = figures(predict(recording, model, WhatIf(settings=lever.settings)).run)
    found = _with_figures(lever, before, after)
    if lever.metric != _SLOWEST or found.gain >= MIN_LEVER_GAIN or not knows_median:
        return found
    by_median = _with_figures(replace(lever, metric=_MEDIAN), before, after)
    pays = all(then <= by_median.gain * now for now, then in by_median.costs.values())
    return by_median if by_median.gain >= MIN_LEVER_GAIN and pays else found


def _with_figures(lever: Lever, before: dict[str, float], after: dict[str, Any]) -> Lever:
    metric = lever.metric
    # without a step with both prefill and decode, no decode waits for a prompt: its gap is that of all tokens
    reached = after[metric] if after[metric] is not None else after["itl_p50"]
    names = (*_COSTS, _SLOWEST) if metric == _MEDIAN else _COSTS
    costs = {name: (before[name], after[name]) for name in names if before[name] and after[name] and name != metric}
    return replace(lever, before=before[metric], after=reached, costs=costs)


def _latest(recording: RecordedRun, measured: Run, num_steps: int) -> tuple[RecordedRun, Run]:
    """Return the last requests, as many as the limit of simulated steps allows.

    They begin where no request waits, if possible, because the simulation begins with an empty engine.
    """
    requests = recording.requests
    count = max(_FEW, len(requests) * _MAX_SIMULATED_STEPS // max(num_steps, 1))
    if count >= len(requests):
        return recording, measured
    first = len(requests) - count
    is_empty_at = _empty_queue(measured)
    times_s = [one.arrival.arrival_time_s for one in requests]
    calm_s = [time_s for time_s in times_s[max(0, first - count) : first + 1] if is_empty_at(time_s)]
    begin_s = calm_s[-1] if calm_s else times_s[first]
    return replace(recording, requests=since(requests, begin_s)), _run_since(measured, begin_s)


def _empty_queue(run: Run) -> Callable[[float], bool]:
    """Return a function that says whether no request waits at a given time."""
    served = sorted(run.requests, key=lambda one: one.times.arrival_s)
    arrivals_s = [one.times.arrival_s for one in served]
    scheduled_s = (one.times.scheduled_s for one in served)
    until_s = list(accumulate((inf if one is None else one for one in scheduled_s), max))

    def is_empty_at(time_s: float) -> bool:
        before = bisect_left(arrivals_s, time_s)
        return before == 0 or until_s[before - 1] <= time_s

    return is_empty_at


def _run_since(run: Run, begin_s: float) -> Run:
    """Return the requests that arrived since a time; latencies are differences, so their times need no shift."""
    requests = tuple(one for one in run.requests if one.times.arrival_s >= begin_s - 1e-9)
    steps = tuple(step for step in run.steps if step.end_s > begin_s)
    return Run(requests, steps, run.duration_s - begin_s)


def _best_of_each_name(levers: Sequence[Lever]) -> list[Lever]:
    """Keep, among levers of one name, the one that gains most and whose cost is acceptable."""
    sizes: dict[str, list[Lever]] = {}
    for lever in levers:
        sizes.setdefault(lever.name, []).append(lever)
    return [
        max(same, key=lambda lever: (lever.ttft_cost <= _MAX_TTFT_FACTOR, lever.gain))
        if any(lever.ttft_cost <= _MAX_TTFT_FACTOR for lever in same)
        else min(same, key=lambda lever: lever.ttft_cost)
        for same in sizes.values()
    ]

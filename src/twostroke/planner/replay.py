"""Predictions from a recorded run: replay of its decisions, back-test, and simulation with other settings.

decided again   a fresh scheduler gets the log's inputs: every batch must be the same, block by block
back-test       the same requests in simulated time with the log's settings, compared with the measurement. Its error
                is the possible error of any other prediction; beyond a limit no prediction is made
what if         the same requests in simulated time with other settings
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from twostroke.config.scheduler import SchedulerConfig
from twostroke.cost.step_fit import TimedStep, fit_log, quality_of
from twostroke.cost.step_model import FitQuality, StepTimeModel, scaled
from twostroke.errors import InvalidParameter
from twostroke.events import EngineStarted, Event, MeasurementBegan
from twostroke.measure.from_log import run_from_log
from twostroke.measure.summary import summarize
from twostroke.planner.back_test import refusal, too_few
from twostroke.scheduler.replay import DecisionDifference, replay
from twostroke.served_run import Run
from twostroke.simulation.complete import check_complete
from twostroke.simulation.observed import observed_steps
from twostroke.simulation.pools import KVHandovers, PoolSimulation
from twostroke.simulation.requests import RecordedRun, SimulatedRequest, read_recording, sped_up
from twostroke.simulation.settings import WhatIf, check_rate_factor, rehash_for_block_size
from twostroke.simulation.simulate import simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """One simulated run."""

    what_if: WhatIf
    run: Run
    wall_s: float
    """Real seconds that the simulation took."""
    hand_overs: KVHandovers | None = None
    """Transfers between pools; None without pools."""

    @property
    def speed(self) -> float:
        """Simulated seconds per real second."""
        return self.run.duration_s / self.wall_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """Results of a replay."""

    difference: DecisionDifference | None
    """First batch that was decided differently; None: all batches are the same."""
    num_steps: int
    measured: Run
    step_times: StepTimeModel
    fitted_here: bool
    """Whether step times were fitted to this log; otherwise they were given."""
    step_quality: FitQuality
    """Error of the step times against the steps of the log."""
    back_test: Predicted
    what_ifs: tuple[Predicted, ...]
    """Predictions; empty where they are refused."""
    unfinished: int
    refusal: str = ""
    """Reason why no what-if was answered: figure, limit and remedy. Empty: not refused."""


def replay_log(
    events: Sequence[Event], what_ifs: Sequence[WhatIf] = (), step_times: StepTimeModel | None = None
) -> ReplayResult:
    """Replay a log of one engine, and predict it with other settings.

    Args:
        events: whole log of one run.
        what_ifs: other settings, one prediction each.
        step_times: calibrated step times; None: fitted to the steps of the log.

    Raises:
        InvalidParameter: the log has a gap, no steps, or is of a pool; or settings are out of range or have no effect.
    """
    check_complete(events)
    recording = read_recording(events)
    check_predictable(recording.started)
    measured, steps = run_from_log(events), measured_steps(events)
    for what_if in what_ifs:
        check_rate_factor(what_if, recording.requests, measured.duration_s)
        what_if.apply(recording.started)  # check before anything is predicted
    model = step_times or fit_log(steps, recording.started.process)
    back_test = predict(recording, model, WhatIf())
    refused = too_few(len(measured.requests)) or refusal(figures(back_test.run), figures(measured))
    return ReplayResult(
        difference=replay(events),
        num_steps=len(observed_steps(events)),
        measured=measured,
        step_times=model,
        fitted_here=step_times is None,
        step_quality=quality_of(model, steps),
        back_test=back_test,
        what_ifs=() if refused else tuple(predict(recording, model, what_if) for what_if in what_ifs),
        unfinished=recording.unfinished,
        refusal=refused,
    )


def check_predictable(started: EngineStarted) -> None:
    """Raise if the engine of a log drafted."""
    if started.speculation is not None:
        limit = "is of an engine that drafts; acceptance cannot be simulated"
        raise InvalidParameter("event_log", started.process, limit)


def since(requests: Iterable[SimulatedRequest], begin_s: float) -> tuple[SimulatedRequest, ...]:
    """Return the requests that arrive from `begin_s` on, which becomes 0 s."""
    return tuple(
        replace(one, arrival=replace(one.arrival, arrival_time_s=one.arrival.arrival_time_s - begin_s))
        for one in requests
        if one.arrival.arrival_time_s >= begin_s
    )


def measured_steps(events: Sequence[Event]) -> list[TimedStep]:
    """Return the steps of the last run of a log, without warm-up steps, which ran on a machine in another state."""
    found: list[Event] = []
    for event in events:
        if isinstance(event, EngineStarted):
            found = []
        elif isinstance(event, MeasurementBegan):
            found = [one for one in found[:1] if isinstance(one, EngineStarted)]
        found.append(event)
    return observed_steps(found)


def predict(
    recording: RecordedRun, step_times: StepTimeModel, what_if: WhatIf, ended: Callable[[], object] | None = None
) -> Predicted:
    """Simulate a recorded run with other settings; `ended` is called after each request."""
    started, pools = what_if.apply(recording.started), what_if.pools
    before, after = recording.started.layout["block_size"], started.layout["block_size"]
    requests = rehash_for_block_size(sped_up(recording.requests, what_if.request_rate_factor), before, after)
    began_s = time.perf_counter()
    # the step budget starts with unscaled step times and adapts to the simulated ones
    if SchedulerConfig(**started.scheduler).has_slo:
        started = replace(started, step_times=started.step_times or step_times)
    step_times = scaled(step_times, what_if.step_time_factor)
    if pools is None:
        run, hand_overs = simulate(started, requests, step_times, ended), None
    else:
        simulation = PoolSimulation(started, step_times, pools, ended)
        run, hand_overs = simulation.run(requests), simulation.hand_overs
    return Predicted(what_if=what_if, run=run, wall_s=time.perf_counter() - began_s, hand_overs=hand_overs)


def figures(run: Run) -> dict[str, Any]:
    """Return the figures of a measured or predicted run that are compared."""
    summary = summarize(run)
    latency = summary["latency"]
    return {
        **{f"{name}_{q}": latency[f"{name}_s"].get(q) for name in ("ttft", "tpot", "itl") for q in ("p50", "p99")},
        "itl_max": max((gap for request in run.requests for gap in request.times.itl_s), default=None),
        "itl_beside_prompts": _mean_beside_prompts(run),
        "output_tok_s": summary["throughput"]["output_tok_s"],
        "requests_per_s": summary["throughput"]["requests_per_s"],
        "duration_s": summary["duration_s"],
        "num_steps": summary["steps"],
        "num_preemptions": summary["num_preemptions"],
        "num_cached_tokens": summary["num_cached_tokens"],
    }


def _mean_beside_prompts(run: Run) -> float | None:
    """Return the mean gap before a token whose step also computed prompts; None: there is no such gap."""
    ends = {step.end_s for step in run.steps if step.num_prefill_tokens}
    gaps = [
        later - earlier
        for request in run.requests
        for earlier, later in itertools.pairwise(request.times.token_times_s)
        if later in ends and later > earlier
    ]
    return sum(gaps) / len(gaps) if gaps else None

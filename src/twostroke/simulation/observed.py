"""Executed steps and their durations, as input of fits and back-tests."""

from __future__ import annotations

from collections.abc import Iterable

from twostroke.cost.step_cost import Layers
from twostroke.cost.step_fit import TimedStep
from twostroke.events import EngineStarted, Event, StepCommitted, StepScheduled
from twostroke.scheduler.replay import layers_of


class ObservedSteps:
    """Collector of the steps in a stream of events; an `EventLog`.

    A step lasts from the previous result to its own, or from its own decision if the engine was idle. The engine's
    work between two steps is included, as waiting requests wait for it too.

        decided    result  decided    result                    decided    result
           |--------|---------|---------|          idle            |---------|
           |  step  |       step        |                          |  step   |
    """

    def __init__(self) -> None:
        self.steps: list[TimedStep] = []
        self.started: EngineStarted | None = None
        """Start event of the engine that ran the steps."""
        self._layers = Layers(())
        self._decided: dict[int, StepScheduled] = {}
        self._last_s = 0.0

    def append(self, event: Event) -> None:
        match event:
            case EngineStarted():
                self.started, self._layers = event, layers_of(event)
                self._decided.clear()
                self._last_s = event.time_s
            case StepScheduled() if not event.batch.is_empty:
                if not self._decided and self._idle_since_last(event):
                    self._last_s = event.time_s
                self._decided[event.batch.step] = event
            case StepCommitted():
                self._committed(event)
            case _:
                pass

    def take(self) -> list[TimedStep]:
        """Return the steps observed since the last call."""
        steps, self.steps = self.steps, []
        return steps

    def _idle_since_last(self, event: StepScheduled) -> bool:
        """Return whether all requests in the batch were just admitted, so that none ran before."""
        return len(event.batch.admitted) >= event.batch.num_running

    def _committed(self, event: StepCommitted) -> None:
        decided = self._decided.pop(event.step, None)
        if decided is None:
            return
        seconds = event.time_s - self._last_s - event.draft_time_s
        self._last_s = event.time_s
        self.steps.append(TimedStep(self._layers.work_of(decided.batch), seconds))


def observed_steps(events: Iterable[Event]) -> list[TimedStep]:
    """Return all steps of a log."""
    observed = ObservedSteps()
    for event in events:
        observed.append(event)
    return observed.steps

"""Steps that ran, with how long they took: what fits and back-tests are made of."""

from __future__ import annotations

from collections.abc import Iterable

from twostroke.cost.step_cost import Layers
from twostroke.cost.step_fit import TimedStep
from twostroke.events import EngineStarted, Event, StepCommitted, StepScheduled
from twostroke.scheduler.replay import layers_of


class ObservedSteps:
    """Hears events, and keeps the steps.

    A step takes as long as the engine gives nobody else anything: from the result before it, or from its decision where
    the engine had nothing to do. What the engine does between two steps counts as well, as it does for who waits.

        decided    result  decided    result                    decided    result
           |--------|---------|---------|          idle            |---------|
           |  step  |       step        |                          |  step   |
    """

    def __init__(self) -> None:
        self.steps: list[TimedStep] = []
        self.started: EngineStarted | None = None
        """How the engine began that ran them."""
        self._layers = Layers(())
        self._decided: dict[int, StepScheduled] = {}
        self._last_s = 0.0

    def append(self, event: Event) -> None:
        """Hears one event; see EventLog."""
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
        """Those since the last call."""
        steps, self.steps = self.steps, []
        return steps

    def _idle_since_last(self, event: StepScheduled) -> bool:
        """Everybody in the batch has just been admitted: before, nobody ran."""
        return len(event.batch.admitted) >= event.batch.num_running

    def _committed(self, event: StepCommitted) -> None:
        decided = self._decided.pop(event.step, None)
        if decided is None:
            return
        seconds = event.time_s - self._last_s - event.draft_time_s
        self._last_s = event.time_s
        self.steps.append(TimedStep(self._layers.work_of(decided.batch), seconds))


def observed_steps(events: Iterable[Event]) -> list[TimedStep]:
    """All steps of a log."""
    observed = ObservedSteps()
    for event in events:
        observed.append(event)
    return observed.steps

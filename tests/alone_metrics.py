"""The metrics of an engine that is alone, fed by its events."""

from __future__ import annotations

from twostroke.events import Event
from twostroke.explain.run_state import RunState
from twostroke.metrics.engine_metrics import EngineMetrics


class AloneMetrics(EngineMetrics):
    """Counts an engine's events, in their order."""

    def __init__(self, model_name: str, engine: str = "0") -> None:
        super().__init__(model_name, engine)
        self._run = RunState()

    def observe(self, event: Event) -> None:
        """Count one event."""
        self.count(event, self._run.take(event))

"""FleetMetrics: the metrics of every process of an engine, and of nobody twice."""

from __future__ import annotations

from collections.abc import Callable

from twostroke.events import Event, RequestFinishedByCaller
from twostroke.explain.names import ENGINE, GATEWAY, place_of
from twostroke.metrics.engine_metrics import EngineMetrics
from twostroke.metrics.journeys import Journeys


class FleetMetrics:
    """Gives each event to whoever counts its process; processes that came one after the other are counted as one.

    Args:
        model_name: what clients call the model.
        appeared: hears of a process that is new.
    """

    def __init__(self, model_name: str, appeared: Callable[[EngineMetrics], object]) -> None:
        self._model_name = model_name
        self._appeared = appeared
        self._journeys = Journeys()
        self._by_place: dict[str, EngineMetrics] = {}

    def of(self, place: str) -> EngineMetrics:
        """Those of one place, which is a label of theirs: "prefill-0"; an engine that is one process is "0"."""
        if place not in self._by_place:
            label = "0" if place == ENGINE else place
            self._by_place[place] = EngineMetrics(self._model_name, label, self._journeys)
            self._appeared(self._by_place[place])
        return self._by_place[place]

    def observe(self, event: Event) -> None:
        """Counts one event; those of one process come in order."""
        place = place_of(event.process)
        if place != GATEWAY:
            self.of(place).observe(event)
        elif isinstance(event, RequestFinishedByCaller):
            self._journeys.ended_from_outside(event)

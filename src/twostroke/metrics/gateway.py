"""What the gateway of pools counts, beside the events of its workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from twostroke.explain.names import GATEWAY
from twostroke.metrics import families
from twostroke.metrics.exposition import PREFIX
from twostroke.metrics.instruments import Number, exposed


class Resumes(Protocol):
    """Whoever keeps sequences running (cluster/dispatcher.py)."""

    num_resumed: int
    num_fenced: int


class GatewayMetrics(Collector):
    """Its counters, read when they are scraped; nothing while there is no gateway.

    Args:
        model_name: what clients call the model.
    """

    def __init__(self, model_name: str) -> None:
        self._labels = {"model_name": model_name, "engine": GATEWAY}
        self._followed: Resumes | None = None

    def follow(self, dispatcher: Resumes) -> None:
        """From now on these numbers are told."""
        self._followed = dispatcher

    def collect(self) -> Iterator[Metric]:
        """For Prometheus."""
        if self._followed is None:
            return
        for family, value in (
            (families.SEQUENCES_RESUMED, self._followed.num_resumed),
            (families.UPDATES_FENCED, self._followed.num_fenced),
        ):
            number = Number(family)
            number.set(value)
            yield exposed(number, f"{PREFIX}:{family.name}", self._labels)

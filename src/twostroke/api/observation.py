"""Observability of the engine: metrics, live view, flight recorder and traces, all from the event log."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Never

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from twostroke.api.live_feed import LiveFeed
from twostroke.api.prompt_texts import PromptTexts
from twostroke.config.server import ServerConfig
from twostroke.engine.clock import monotonic_clock
from twostroke.errors import InvalidParameter
from twostroke.event_codec import LazyEvents, PackedEvent, unpack
from twostroke.events import Event, RequestArrived
from twostroke.explain.names import ENGINE
from twostroke.explain.recorder import FlightRecorder
from twostroke.live.state import LiveState
from twostroke.log import get_logger
from twostroke.metrics import families
from twostroke.metrics.engine_metrics import FleetMetrics
from twostroke.metrics.exposition import PREFIX, Compat, EngineCollector, GatewayMetrics, TenantKV, exposition
from twostroke.metrics.instruments import Number, to_metric
from twostroke.metrics.otlp import request_tracer

log = get_logger(__name__)

MAX_FIELD_NAMES = 100
"""Maximum number of unknown fields that are counted under their own names."""


class Observation:
    """`PackedEventLog` that feeds /metrics, the page, timelines and dumps.

    Metrics and the page's state are folded on demand.

    Args:
        config: settings of the server.
        model_name: name of the model for clients.
        now_s: the engine's clock.
        has_pools: whether the engine is several processes, which appear as they start.

    Raises:
        InvalidParameter: traces are enabled without OpenTelemetry installed, or dumps cannot be written.
    """

    def __init__(self, config: ServerConfig, model_name: str, now_s: float, *, has_pools: bool = False) -> None:
        self.recorder = FlightRecorder(minutes=config.flight_recorder_minutes)
        self.answers = ResponseCounts(model_name)
        self._folder = config.flight_recorder_dir or Path(tempfile.gettempdir())
        _check_folder(self._folder)
        compat = frozenset(Compat(name) for name in config.metrics_compat)
        engines = EngineCollector(compat=compat)
        self.metrics = FleetMetrics(model_name, engines.add)
        if not has_pools:
            self.metrics.of(ENGINE)  # so that its metrics exist from the start
        self.live = LiveState(self.metrics)
        self._unread: LazyEvents[Never] = LazyEvents(self._fold)
        self.feed = LiveFeed(self.live, model_name, monotonic_clock, self._unread.catch_up)
        self.texts = PromptTexts(config.flight_recorder_minutes, monotonic_clock) if config.live_text else None
        self.gateway = GatewayMetrics(model_name)
        self._collectors = engines, self.gateway, self.answers
        self._tenants = TenantKV(self.live)
        self.tracer = None
        if config.otlp_traces_endpoint is not None:
            offset_ns = time.time_ns() - round(now_s * 1e9)
            self.tracer = request_tracer(config.otlp_traces_endpoint, model=model_name, epoch_offset_ns=offset_ns)

    def append(self, packed: PackedEvent) -> None:
        """Append one event; events come in order."""
        self.recorder.append(packed)
        self._unread.append(packed)
        if self.texts is not None or self.tracer is not None:
            self._forward_now(unpack(packed))

    def _fold(self, event: Event) -> None:
        self.live.observe(event, self.metrics.observe(event))

    def _forward_now(self, event: Event) -> None:
        """Pass an event on to prompt texts and traces, which need it immediately."""
        if self.texts is not None and isinstance(event, RequestArrived):
            self.texts.has_arrived(event.request_id)
        if self.tracer is not None:
            self.tracer.append(event)

    def exposition(self, viewer: str = "") -> bytes:
        """Return the metrics as text in Prometheus's format.

        Args:
            viewer: tenant that scrapes, which sees no other tenant's name; "" sees all names.
        """
        self._unread.catch_up()
        return exposition(*self._collectors, self._tenants.collector_for(viewer))

    def dump(self, why: str) -> None:
        """Write the last minutes of events to a file and log its path. It never raises, because it is called in
        failures."""
        name = datetime.now(UTC).strftime("twostroke-flight-%Y%m%dT%H%M%S.jsonl")
        path = self._folder / name
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            num_events = self.recorder.dump(path)
        except OSError as error:
            log.error("%s; the flight recorder could not be written to %s: %s", why, path, error)
            return
        log.error("%s; the last %d events are in %s (twostroke explain ID --event-log FILE)", why, num_events, path)

    def close(self) -> None:
        """Send pending traces."""
        if self.tracer is not None:
            self.tracer.close()


class ResponseCounts(Collector):
    """Counters of the HTTP side, which the engine's events do not cover."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._answers: Counter[tuple[str, ...]] = Counter()
        self._ignored: Counter[tuple[str, ...]] = Counter()
        """Counts by labels."""

    def answered(self, route: str, status: int) -> None:
        """Count a response that has begun."""
        self._answers[route, str(status)] += 1

    def ignored(self, field: str) -> None:
        """Count an unknown field; the first hundred names are counted separately."""
        num_names = len(self._ignored.keys() - {(families.OTHER_LABEL,)})
        is_known = (field,) in self._ignored or num_names < MAX_FIELD_NAMES
        self._ignored[(field if is_known else families.OTHER_LABEL,)] += 1

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics for Prometheus."""
        for family, counts in ((families.HTTP_RESPONSES, self._answers), (families.IGNORED_PARAMS, self._ignored)):
            number = Number(family)
            for labels, count in counts.items():
                number.set(float(count), *labels)
            yield to_metric(number, f"{PREFIX}:{family.name}", {"model_name": self._model_name})


def _check_folder(folder: Path) -> None:
    """Raise InvalidParameter if dumps cannot be written. Called at start, not first when a dump is needed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        limit = f"dumps cannot be written to it ({error.strerror})"
        raise InvalidParameter("flight_recorder_dir", str(folder), limit, "Give another folder.") from error

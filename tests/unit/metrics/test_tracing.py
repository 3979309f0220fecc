"""Spans as an exporter gets them, in memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from explain_loads import random_load, times_of
from factories import make_layout
from fakes import FakeEngine
from pool_log import PoolLog, died_and_resumed
from twostroke.config.scheduler import SchedulerConfig
from twostroke.events import EngineStarted, Event, EventRing
from twostroke.explain.names import name_of
from twostroke.explain.timeline import timeline_of
from twostroke.metrics.tracing import RequestTracer

TRACE_ID, PARENT_ID = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
CALLER = {"traceparent": f"00-{TRACE_ID:032x}-{PARENT_ID:016x}-01"}
OFFSET_NS = 1_700_000_000_000_000_000


class Traced:
    """A tracer and what came out of it."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self._reader = InMemoryMetricReader()
        spans = TracerProvider()
        spans.add_span_processor(SimpleSpanProcessor(self._exporter))
        self._durations = MeterProvider(metric_readers=[self._reader])
        self.tracer = RequestTracer(spans, self._durations, model="some-model", epoch_offset_ns=OFFSET_NS)

    def hear(self, events: list[Event]) -> None:
        for event in events:
            self.tracer.append(event)

    def spans(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    def requests(self) -> list[ReadableSpan]:
        return [span for span in self.spans() if span.kind is SpanKind.SERVER]

    def children_of(self, parent: ReadableSpan) -> list[ReadableSpan]:
        return [s for s in self.spans() if s.parent is not None and s.parent.span_id == parent.context.span_id]

    def durations(self) -> dict[str, HistogramDataPoint]:
        data = self._reader.get_metrics_data()
        assert data is not None
        return {
            metric.name: point
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            for point in metric.data.data_points
            if isinstance(point, HistogramDataPoint)
        }

    def close(self) -> None:
        self._durations.shutdown()


@pytest.fixture
def traced() -> Iterator[Traced]:
    traced = Traced()
    yield traced
    traced.close()


def short_run(*sequence_ids: str) -> list[Event]:
    """Run prompts of ten tokens, in chunks of eight, with three output tokens."""
    log = EventRing(1000)
    settings = SchedulerConfig(max_num_batched_tokens=8)
    engine = FakeEngine(make_layout(block_size=4), 64, max_model_len=64, scheduler_config=settings, log=log)
    for sequence_id in sequence_ids:
        engine.submit(sequence_id, list(range(10)), 3)
    engine.run()
    return list(log)


def test_one_span_under_the_callers_with_the_timeline_beneath(traced: Traced) -> None:
    traced.tracer.begin("mine", "chat", CALLER, {"gen_ai.request.max_tokens": 3})
    traced.hear(short_run("mine#0.0"))
    (span,) = traced.requests()
    assert span.name == "chat some-model"
    assert span.parent is not None
    assert (span.context.trace_id, span.parent.span_id) == (TRACE_ID, PARENT_ID)
    assert (span.start_time, span.end_time) == (OFFSET_NS, OFFSET_NS + 4_000_000_000)
    attributes = dict(span.attributes or {})
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.request.max_tokens"] == 3
    assert attributes["gen_ai.response.id"] == "mine"
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert (attributes["gen_ai.usage.input_tokens"], attributes["gen_ai.usage.output_tokens"]) == (10, 3)
    assert attributes["gen_ai.latency.time_to_first_token"] == 2.0
    assert attributes["gen_ai.latency.time_in_model_prefill"] == 2.0
    assert attributes["gen_ai.latency.time_in_model_decode"] == 2.0
    children = traced.children_of(span)
    assert [child.name for child in children] == ["prefill", "prefill", "decode"]
    assert [dict(child.attributes or {})["twostroke.reason"] for child in children][1:] == [
        "chunk 2 of 2, 2 tokens",
        "2 steps, 2 tokens",
    ]
    assert children[0].start_time == span.start_time
    assert children[-1].end_time == span.end_time
    assert all(a.end_time == b.start_time for a, b in itertools.pairwise(children))


def test_sequences_have_spans_of_their_own(traced: Traced) -> None:
    traced.tracer.begin("mine", "text_completion", {}, {})
    traced.hear(short_run("mine#0.0", "mine#0.1"))
    (span,) = traced.requests()
    assert span.parent is None
    sequences = traced.children_of(span)
    assert [dict(s.attributes or {})["twostroke.sequence_id"] for s in sequences] == ["mine#0.0", "mine#0.1"]
    assert all(traced.children_of(sequence) for sequence in sequences)
    assert dict(span.attributes or {})["gen_ai.usage.output_tokens"] == 6


def test_only_who_was_announced_is_traced(traced: Traced) -> None:
    traced.tracer.begin("mine", "chat", {}, {})
    traced.hear(short_run("mine#0.0", "other#1.0"))
    assert [dict(span.attributes or {})["gen_ai.response.id"] for span in traced.requests()] == ["mine"]
    traced.hear(short_run("mine#0.0"))
    assert len(traced.requests()) == 1, "the next one of this name has to be announced again"


def test_durations_by_the_conventions_names(traced: Traced) -> None:
    traced.tracer.begin("mine", "chat", {}, {})
    traced.hear(short_run("mine#0.0"))
    points = traced.durations()
    assert {name: (point.count, point.sum) for name, point in points.items()} == {
        "gen_ai.server.request.duration": (1, 4.0),
        "gen_ai.server.time_to_first_token": (1, 2.0),
        "gen_ai.server.time_per_output_token": (1, 1.0),
    }
    assert dict(points["gen_ai.server.time_to_first_token"].attributes or {}) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "twostroke",
        "gen_ai.request.model": "some-model",
        "gen_ai.response.model": "some-model",
    }
    assert tuple(points["gen_ai.server.time_to_first_token"].explicit_bounds)[:2] == (0.001, 0.005)


def test_an_engine_that_dies_is_an_error_of_the_span(traced: Traced) -> None:
    traced.tracer.begin("mine", "chat", {}, {})
    events = short_run("mine#0.0")
    traced.hear(events[:5])
    started = events[0]
    assert isinstance(started, EngineStarted)
    traced.hear([started])
    (span,) = traced.requests()
    assert span.status.status_code is StatusCode.ERROR
    assert dict(span.attributes or {})["error.type"] == "engine_error"


def test_one_span_tree_for_all_attempts_in_all_processes(traced: Traced) -> None:
    traced.tracer.begin("mine", "chat", {}, {})
    log = PoolLog()
    died_and_resumed(log, "mine#0.0")
    traced.hear(log.events)
    (span,) = traced.requests()
    children = traced.children_of(span)
    names = ["prefill", "transfer", "recompute", "resumed elsewhere", "recompute", "decode"]
    assert [child.name for child in children] == names
    assert all(a.end_time == b.start_time for a, b in itertools.pairwise(children))
    assert dict(children[1].attributes or {})["twostroke.process"] == "decode-0.1"
    attributes = dict(span.attributes or {})
    assert (attributes["gen_ai.usage.input_tokens"], attributes["gen_ai.usage.output_tokens"]) == (10, 4)
    assert span.status.status_code is not StatusCode.ERROR


@pytest.mark.parametrize("seed", range(5))
def test_random_loads_are_spanned_without_a_gap(seed: int, traced: Traced) -> None:
    events = random_load(seed)
    everybody = times_of(events)
    for sequence_id in everybody:
        traced.tracer.begin(name_of(sequence_id), "chat", {}, {})
    traced.hear(events)
    requests = {str(dict(span.attributes or {})["gen_ai.response.id"]): span for span in traced.requests()}
    assert set(requests) == {name_of(sequence_id) for sequence_id in everybody}
    for name, span in requests.items():
        (lane,) = timeline_of(events, name).lanes
        children = traced.children_of(span)
        assert [child.name for child in children] == [str(segment.label) for segment in lane.segments]
        length_ns = sum((child.end_time or 0) - (child.start_time or 0) for child in children)
        assert length_ns == (span.end_time or 0) - (span.start_time or 0)

"""OpenTelemetry: one span per request, with its timeline as child spans, in the trace of the caller.

    POST /v1/chat/completions                         the caller's span, from its `traceparent`
    └── chat some-model                               our span: arrival to the last token
        ├── waited for slots                          the segments of the request's timeline, each with its reason
        ├── prefill                                   chunk 1 of 2
        ├── prefill                                   chunk 2 of 2
        └── decode

A request with several sequences has an intermediate span for each. Spans are created when a request has ended, with
the times of the event log; there is no work per token.

Needs the extra `otel`; imported only if traces are sent (otlp.py). Attribute and metric names are those of
OpenTelemetry's semantic conventions for generative AI (in development); `gen_ai.latency.*` are vLLM's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from opentelemetry.context import Context
from opentelemetry.metrics import MeterProvider
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, TracerProvider, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from twostroke.events import Event, RequestArrived
from twostroke.explain.lane_reader import LaneReader
from twostroke.explain.names import name_of, request_of, sequence_of
from twostroke.explain.segments import Label, Lane, Segment
from twostroke.request import FinishReason

SCOPE = "twostroke"
PROVIDER_NAME = "twostroke"

_PREFILLS = (Label.PREFILL, Label.RECOMPUTE)
_DECODES = (Label.DECODE, Label.STALLED)


@dataclass(frozen=True, slots=True)
class _Caller:
    """Facts about a request that only the HTTP side knows."""

    operation: str
    context: Context
    attributes: Mapping[str, AttributeValue]


@dataclass(slots=True)
class _OpenRequest:
    """Request with sequences that have not ended."""

    caller: _Caller
    sequence_ids: set[str] = field(default_factory=set[str])
    """Ids of sequences that have arrived in some process; one that continues elsewhere arrives again."""
    lanes: list[Lane] = field(default_factory=list[Lane])
    """Timelines of the sequences that have ended."""


class RequestTracer:
    """Tracer of requests; an `EventLog`.

    Args:
        spans: receives the spans.
        durations: receives the `gen_ai.server.*` histograms; None: they are not recorded.
        model: the model's name as clients know it.
        epoch_offset_ns: nanoseconds to add to the engine's clock to get Unix time.
        on_close: functions that flush what has not been sent.
    """

    def __init__(
        self,
        spans: TracerProvider,
        durations: MeterProvider | None,
        *,
        model: str,
        epoch_offset_ns: int,
        on_close: Sequence[Callable[[], None]] = (),
    ) -> None:
        self._tracer = spans.get_tracer(SCOPE)
        self._durations = None if durations is None else _Durations(durations)
        self._model = model
        self._epoch_offset_ns = epoch_offset_ns
        self._on_close = tuple(on_close)
        self._callers: dict[str, _Caller] = {}
        self._open: dict[str, _OpenRequest] = {}
        self._reader = LaneReader(lambda sequence_id: name_of(sequence_id) in self._callers)

    def begin(
        self, request_id: str, operation: str, headers: Mapping[str, str], attributes: Mapping[str, AttributeValue]
    ) -> None:
        """Trace a request that is about to be submitted.

        Args:
            request_id: the request's id in the engine.
            operation: "chat", "text_completion", …
            headers: headers of the HTTP request, names in lower case; `traceparent` and `tracestate` are read.
            attributes: span attributes such as `gen_ai.request.*`.
        """
        context = TraceContextTextMapPropagator().extract(dict(headers))
        self._callers[request_id] = _Caller(operation, context, attributes)

    def append(self, event: Event) -> None:
        """Process the next event; send the spans of requests that it ends."""
        if isinstance(event, RequestArrived):
            caller = self._callers.get(name_of(event.request_id))
            if caller is not None:
                request = self._open.setdefault(request_of(event.request_id), _OpenRequest(caller))
                request.sequence_ids.add(sequence_of(event.request_id))
        for lane in self._reader.take(event):
            request = self._open[request_of(lane.sequence_id)]
            request.lanes.append(lane)
            if len(request.lanes) == len(request.sequence_ids):
                self._end(lane.sequence_id)

    def close(self) -> None:
        """Send the remaining spans; may wait for the network."""
        for close in self._on_close:
            close()

    def _end(self, sequence_id: str) -> None:
        request = self._open.pop(request_of(sequence_id))
        self._callers.pop(name_of(sequence_id), None)
        lanes = sorted(request.lanes, key=lambda lane: lane.sequence_id)
        common = self._common_attributes(request.caller.operation)
        if self._durations is not None:
            for lane in lanes:
                self._durations.record(lane, common)
        begin_s, end_s = min(lane.begin_s for lane in lanes), max(lane.end_s for lane in lanes)
        span = self._tracer.start_span(
            f"{request.caller.operation} {self._model}",
            context=request.caller.context,
            kind=SpanKind.SERVER,
            start_time=self._epoch_ns(begin_s),
            attributes={**common, **request.caller.attributes, **_usage(name_of(sequence_id), lanes)},
        )
        if any(lane.finish_reason is FinishReason.ERROR for lane in lanes):
            span.set_attribute("error.type", "engine_error")
            span.set_status(Status(StatusCode.ERROR, "a sequence ended with an engine error"))
        for lane in lanes:
            self._lane(lane, span, is_alone=len(lanes) == 1)
        span.end(end_time=self._epoch_ns(end_s))

    def _lane(self, lane: Lane, parent: Span, *, is_alone: bool) -> None:
        if is_alone:
            for segment in lane.segments:
                self._segment(segment, parent)
            return
        span = self._tracer.start_span(
            "sequence",
            context=set_span_in_context(parent),
            start_time=self._epoch_ns(lane.begin_s),
            attributes={
                "twostroke.sequence_id": lane.sequence_id,
                "gen_ai.usage.output_tokens": lane.num_output_tokens,
            },
        )
        for segment in lane.segments:
            self._segment(segment, span)
        span.end(end_time=self._epoch_ns(lane.end_s))

    def _segment(self, segment: Segment, parent: Span) -> None:
        attributes: dict[str, AttributeValue] = {
            "twostroke.reason": segment.reason,
            "twostroke.num_steps": segment.num_steps,
            "twostroke.num_tokens": segment.num_tokens,
            "twostroke.because_of": [culprit.request_id for culprit in segment.because_of],
        }
        if segment.process:
            attributes["twostroke.process"] = segment.process
        span = self._tracer.start_span(
            str(segment.label),
            context=set_span_in_context(parent),
            start_time=self._epoch_ns(segment.start_s),
            attributes=attributes,
        )
        span.end(end_time=self._epoch_ns(segment.end_s))

    def _common_attributes(self, operation: str) -> dict[str, AttributeValue]:
        return {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": PROVIDER_NAME,
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
        }

    def _epoch_ns(self, time_s: float) -> int:
        return round(time_s * 1e9) + self._epoch_offset_ns


class _Durations:
    """Histograms of the semantic conventions for servers, with one observation per sequence."""

    def __init__(self, provider: MeterProvider) -> None:
        meter = provider.get_meter(SCOPE)
        per_token = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5]
        first = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0]
        whole = [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92]
        self._duration = meter.create_histogram(
            "gen_ai.server.request.duration",
            unit="s",
            description="Time from the arrival to the last token.",
            explicit_bucket_boundaries_advisory=whole,
        )
        self._per_token = meter.create_histogram(
            "gen_ai.server.time_per_output_token",
            unit="s",
            description="(duration - time to first token) / (tokens - 1).",
            explicit_bucket_boundaries_advisory=per_token,
        )
        self._first_token = meter.create_histogram(
            "gen_ai.server.time_to_first_token",
            unit="s",
            description="Time from the arrival to the first token.",
            explicit_bucket_boundaries_advisory=first,
        )

    def record(self, lane: Lane, attributes: Mapping[str, AttributeValue]) -> None:
        """Observe a sequence that has ended."""
        if lane.ttft_s is None:
            return
        told = dict(attributes)
        if lane.finish_reason is FinishReason.ERROR:
            told["error.type"] = "engine_error"
        self._duration.record(lane.duration_s, told)
        self._first_token.record(lane.ttft_s, told)
        if lane.num_output_tokens > 1:
            self._per_token.record((lane.duration_s - lane.ttft_s) / (lane.num_output_tokens - 1), told)


def _usage(name: str, lanes: list[Lane]) -> dict[str, AttributeValue]:
    """Return attributes for tokens and times under the conventions' and vLLM's names; times of the first sequence, in
    seconds."""
    first = lanes[0]
    attributes: dict[str, AttributeValue] = {
        "gen_ai.response.id": name,
        "gen_ai.response.finish_reasons": [str(lane.finish_reason) for lane in lanes],
        "gen_ai.usage.input_tokens": first.num_prompt_tokens or 0,
        "gen_ai.usage.output_tokens": sum(lane.num_output_tokens for lane in lanes),
        "gen_ai.usage.cache_read.input_tokens": max(lane.num_cached_tokens or 0 for lane in lanes),
        "gen_ai.latency.e2e": max(lane.end_s for lane in lanes) - first.begin_s,
        "gen_ai.latency.time_in_model_prefill": _time_in(first, _PREFILLS),
        "gen_ai.latency.time_in_model_decode": _time_in(first, _DECODES),
        "gen_ai.latency.time_in_queue": first.duration_s - _time_in(first, (*_PREFILLS, *_DECODES, Label.END)),
    }
    if first.ttft_s is not None:
        attributes["gen_ai.latency.time_to_first_token"] = first.ttft_s
        attributes["gen_ai.response.time_to_first_chunk"] = first.ttft_s
    return attributes


def _time_in(lane: Lane, labels: tuple[Label, ...]) -> float:
    return sum(segment.duration_s for segment in lane.segments if segment.label in labels)

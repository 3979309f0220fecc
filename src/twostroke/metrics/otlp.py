"""Export of traces to a collector, if the extra `otel` is installed and an endpoint is set."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.errors import InvalidParameter

if TYPE_CHECKING:
    from twostroke.metrics.tracing import RequestTracer

_TRACES = "/v1/traces"
"""Path of traces below a collector's base URL, from the OTLP specification."""


def request_tracer(endpoint: str, *, model: str, epoch_offset_ns: int) -> RequestTracer:
    """Return a tracer that sends spans and durations to `endpoint` by OTLP over HTTP, in the background.

    Args:
        endpoint: URL of the collector, such as http://localhost:4318, or its URL for traces, such as
            http://localhost:4318/v1/traces. Metrics go to the path /v1/metrics beside it.
        model: the model's name as clients know it.
        epoch_offset_ns: see RequestTracer.

    Raises:
        InvalidParameter: the packages of the extra are not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        from twostroke.metrics.tracing import RequestTracer
    except ImportError as error:
        raise InvalidParameter(
            "otlp_traces_endpoint",
            endpoint,
            f"needs OpenTelemetry, which is not installed ({error})",
            "pip install 'twostroke[otel]', or leave it out.",
        ) from error
    resource = Resource.create({"service.name": "twostroke"})
    base = endpoint.rstrip("/").removesuffix(_TRACES).rstrip("/")
    spans = TracerProvider(resource=resource)
    spans.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=f"{base}{_TRACES}")))
    reader = PeriodicExportingMetricReader(OTLPMetricExporter(endpoint=f"{base}/v1/metrics"))
    durations = MeterProvider(metric_readers=[reader], resource=resource)
    return RequestTracer(
        spans,
        durations,
        model=model,
        epoch_offset_ns=epoch_offset_ns,
        on_close=(spans.shutdown, durations.shutdown),
    )

"""OpenTelemetry: gauges, and a span for each finding, by OTLP to the endpoint in the environment.

The OTEL_* variables (endpoint, headers, service name) are this process's own: it inherits what `gpumon run` was given.
"""

from __future__ import annotations

import os
from urllib.parse import urlsplit

from opentelemetry.metrics import _Gauge as Gauge
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, MetricExporter, MetricExportResult
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Tracer

from gpumon.analysis.answer import line
from gpumon.analysis.types import Finding
from gpumon.export.run_figures import Figures
from gpumon.export.trackers import Unusable
from gpumon_agent import wire
from gpumon_agent._version import __version__

_GRPC_PORT = 4317
_BYTES = "By"  # UCUM, as in OpenTelemetry's conventions


def open_run(used: wire.Tracker, folder: str, name: str) -> _Run:
    common = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    if not common and not os.environ.get("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"):
        raise Unusable("the script sets its endpoint itself: set OTEL_EXPORTER_OTLP_ENDPOINT for gpumon run")
    resource = Resource.create({"gpumon.job": name})
    traces = bool(common or os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"))
    return _Run(_metrics(), _spans() if traces else None, resource)


def _speaks_grpc(signal: str) -> bool:
    """Without a protocol in the environment: by the port."""
    protocol = os.environ.get(f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    if protocol:
        return protocol == "grpc"
    where = os.environ.get(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT") or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    return urlsplit(where if "://" in where else f"//{where}").port == _GRPC_PORT


def _metrics() -> MetricExporter:
    if _speaks_grpc("METRICS"):
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as ByGrpc

        return ByGrpc()
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as ByHttp

    return ByHttp()


def _spans() -> SpanExporter:
    if _speaks_grpc("TRACES"):
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as ByGrpc

        return ByGrpc()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as ByHttp

    return ByHttp()


class _Run:
    def __init__(self, metrics: MetricExporter, spans: SpanExporter | None, resource: Resource) -> None:
        self._exporter, self._taken = metrics, True
        self._reader = InMemoryMetricReader()  # not the periodic one: it keeps an export's failure to itself
        self._meter = MeterProvider([self._reader], resource).get_meter("gpumon", __version__)
        self._gauges: dict[str, Gauge] = {}
        self._traces = None
        if spans is not None:
            self._traces = TracerProvider(resource=resource)
            self._traces.add_span_processor(BatchSpanProcessor(spans))

    def log(self, figures: Figures) -> None:
        for value in figures.values:
            where = {"gpumon.device": value.device}
            if value.rank is not None:
                where["gpumon.rank"] = str(value.rank)
            self._set(f"gpumon.{value.name}", value.bytes, where, _BYTES)
        self._set("gpumon.step", figures.step, {})
        if figures.answer is not None and figures.state is not None:
            self._set("gpumon.state", figures.state, {})
        gathered = self._reader.get_metrics_data()
        if gathered is not None:
            self._taken = self._exporter.export(gathered) is MetricExportResult.SUCCESS
        for found in figures.opened:
            self._event(
                "gpumon.finding",
                {
                    "code": found.code,
                    "severity": found.severity,
                    "title": found.title,
                    "where": found.where,
                    "remedy": found.remedy,
                    "step": figures.step,
                    "answer": line(figures.answer) if figures.answer is not None else None,
                },
            )

    def finish(self, summary: dict[str, int | str], findings: tuple[Finding, ...]) -> None:
        self._event("gpumon.summary", {name.rpartition("/")[2]: value for name, value in summary.items()})
        if self._traces is not None:
            self._traces.shutdown()
        self._exporter.shutdown()
        if not self._taken:
            raise Unusable("the endpoint did not take the last figures")

    def _set(self, name: str, value: int, where: dict[str, str], unit: str = "1") -> None:
        gauge = self._gauges.get(name)
        if gauge is None:
            gauge = self._gauges[name] = self._meter.create_gauge(name, unit)
        gauge.set(value, where)

    def _event(self, name: str, about: dict[str, int | str | None]) -> None:
        if self._traces is not None:
            tracer: Tracer = self._traces.get_tracer("gpumon", __version__)
            known = {f"gpumon.{key}": value for key, value in about.items() if value is not None}
            tracer.start_span(name, attributes=known).end()

"""Export of spans to an OpenTelemetry collector. Only this module imports OpenTelemetry, and only when it is enabled.

`PURVEYOR_OTEL_ENDPOINT` or one of the standard variables (`OTEL_EXPORTER_OTLP_ENDPOINT`,
`OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`, `OTEL_TRACES_EXPORTER`) enables it; `OTEL_SDK_DISABLED` disables it. All other
`OTEL_*` variables (headers, sampling, batching) have their standard meaning.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from purveyor import __version__
from purveyor.model import tracing
from purveyor.model.errors import SetupError
from purveyor.model.tracing import Carrier, Value

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import SpanContext

_PATH: Final = "/v1/traces"
_STANDARD: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_PREFIX: Final = "purveyor."
_END_MILLISECONDS: Final = 5000
_KINDS: Final = {
    "accept": "SERVER",
    "ask": "SERVER",
    "dispatch": "CONSUMER",
    "deliver": "SERVER",
    "acknowledge": "SERVER",
    "push": "CLIENT",
    "stage": "CONSUMER",
    "prefill": "CONSUMER",
    "replay": "CONSUMER",
    "catch-up": "CONSUMER",
}
"""The OpenTelemetry kind of a span by its name."""


def is_enabled(endpoint: str | None) -> bool:
    """Return whether settings or environment enable the export of spans."""
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    chosen = os.environ.get("OTEL_TRACES_EXPORTER", "")
    if chosen:
        return chosen == "otlp"
    return endpoint is not None or any(os.environ.get(name) for name in _STANDARD)


@contextlib.contextmanager
def export_traces(endpoint: str | None, component: str, exporter: "SpanExporter | None" = None) -> Iterator[None]:
    """Send the spans of this process to a collector until the end of the block, if that is enabled."""
    if exporter is None and not is_enabled(endpoint):
        yield
        return
    provider = _provider(component, exporter or _exporter(endpoint))
    tracing.install_tracer(_OpenTelemetry(provider))
    try:
        yield
    finally:
        tracing.install_tracer(None)
        provider.force_flush(_END_MILLISECONDS)
        provider.shutdown()


def _exporter(endpoint: str | None) -> "SpanExporter":
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
    except ImportError:
        raise SetupError(
            "traces are enabled, but the OpenTelemetry exporter is not installed",
            fix="pip install 'purveyor[telemetry]', or unset PURVEYOR_OTEL_ENDPOINT and OTEL_EXPORTER_OTLP_ENDPOINT",
        ) from None
    if endpoint is None:
        return OTLPSpanExporter()
    return OTLPSpanExporter(endpoint=endpoint if endpoint.endswith(_PATH) else endpoint.rstrip("/") + _PATH)


def _provider(component: str, exporter: "SpanExporter") -> Any:
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415 - only when enabled
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

    name = os.environ.get("OTEL_SERVICE_NAME", f"purveyor-{component}")
    resource = Resource.create({"service.name": name, "service.version": __version__})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


class _OpenTelemetry:
    """Opens Purveyor's spans as OpenTelemetry spans."""

    def __init__(self, provider: Any) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415

        self._tracer = provider.get_tracer("purveyor", __version__)
        self._form = TraceContextTextMapPropagator()

    @contextlib.contextmanager
    def span(
        self, name: str, parent: Carrier, links: Sequence[Carrier], attributes: Mapping[str, Value]
    ) -> Iterator[Carrier]:
        with self._tracer.start_as_current_span(
            name, context=self._form.extract(parent) if parent else None, **self._about(name, links, attributes)
        ):
            onward: dict[str, str] = {}
            self._form.inject(onward)
            yield onward

    def record(
        self, name: str, seconds: float, parent: Carrier, links: Sequence[Carrier], attributes: Mapping[str, Value]
    ) -> None:
        began = time.time_ns() - int(seconds * 1e9)
        above = self._form.extract(parent) if parent else None
        self._tracer.start_span(name, above, start_time=began, **self._about(name, links, attributes)).end()

    def link(self, links: Sequence[Carrier]) -> None:
        from opentelemetry import trace  # noqa: PLC0415 - only when enabled

        here = trace.get_current_span()
        for context in self._contexts(links):
            here.add_link(context)

    def _contexts(self, links: Sequence[Carrier]) -> "list[SpanContext]":
        from opentelemetry import trace  # noqa: PLC0415 - only when enabled

        return [trace.get_current_span(self._form.extract(link)).get_span_context() for link in links]

    def _about(self, name: str, links: Sequence[Carrier], attributes: Mapping[str, Value]) -> dict[str, Any]:
        from opentelemetry import trace  # noqa: PLC0415 - only when enabled

        return {
            "kind": trace.SpanKind[_KINDS.get(name, "INTERNAL")],
            "links": [trace.Link(context) for context in self._contexts(links)],
            "attributes": {_PREFIX + key: value for key, value in attributes.items()},
        }

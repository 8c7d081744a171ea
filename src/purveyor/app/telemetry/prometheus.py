"""The metrics page for Prometheus, and a small HTTP server for processes that have no HTTP API.

Only this module uses prometheus-client. The server answers `GET /metrics` and nothing else, on its own thread. If its
port is taken, it retries until the port is free and does not stop the process: so a standby on the same machine gets
the port when it takes over.
"""

import contextlib
import http.server
import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import accumulate
from types import MappingProxyType
from typing import Final, assert_never

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from purveyor import __version__
from purveyor.app.telemetry import metric_catalogue
from purveyor.model.metrics import (
    INSTRUMENTS,
    MIGRATION_WAITS,
    Histogram,
    HistogramValues,
    Instrument,
    Labels,
    MetricInfo,
    MetricKind,
    WaitTracker,
)

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class MetricValues:
    """A metric with its values by labels."""

    metric: MetricInfo
    values: dict[Labels, float] = field(default_factory=dict)

    def add(self, value: float, *labels: str) -> None:
        """Set the value for these labels."""
        self.values[labels] = value


PROCESS_LABEL: Final = "process"
"""The label of series that come from another process."""


def render(
    looked_up: Iterable[MetricValues] = (),
    others: Mapping[str, bytes] = MappingProxyType({}),
    own_name: str | None = None,
) -> bytes:
    """Return the page: the given values, the counters of this process, and process statistics.

    `others` are the pages of other processes by name. Their series get the label `process`, and with `own_name` those
    of this process as well: any of several processes that share a port may answer, and no series may depend on which.
    """
    registry = CollectorRegistry()
    if own_name is None:
        registry.register(_StaticCollector([*_build_info(), *_waits(MIGRATION_WAITS), *looked_up], INSTRUMENTS))
        ProcessCollector(registry=registry)
    else:
        registry.register(_StaticCollector([*_build_info(), *looked_up], ()))
        others = {**others, own_name: render()}
    if not others:
        return generate_latest(registry)
    families = {family.name: family for family in registry.collect()}
    for process, page in others.items():
        for family in _parse(process, page):
            known = families.setdefault(family.name, family)
            if known is not family:
                known.samples.extend(family.samples)
    return generate_latest(_Families(families.values()))


def _parse(process: str, page: bytes) -> list[Metric]:
    """Return the metrics of a page with the label `process`; none if the page is damaged."""
    try:
        families = [*text_string_to_metric_families(page.decode())]
    except ValueError as error:
        _log.warning("the metrics of %s cannot be read: %s", process, error)
        return []
    for family in families:
        family.samples = [
            sample._replace(labels={**sample.labels, PROCESS_LABEL: process}) for sample in family.samples
        ]
    return families


class _Families(Collector):
    """Returns metrics that were collected before."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = tuple(families)

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def _build_info() -> Iterator[MetricValues]:
    yield MetricValues(metric_catalogue.BUILD, {(__version__,): 1})


def _waits(waits: WaitTracker) -> Iterator[MetricValues]:
    found = waits.values()
    yield MetricValues(metric_catalogue.WAITING, {(queue,): waited.now for queue, waited in found.items()})
    yield MetricValues(metric_catalogue.WAITED, {(queue,): waited.ever for queue, waited in found.items()})
    yield MetricValues(metric_catalogue.WAITED_SECONDS, {(queue,): waited.seconds for queue, waited in found.items()})
    yield MetricValues(metric_catalogue.BUFFERED, {(queue,): waited.held for queue, waited in found.items()})


class _StaticCollector(Collector):
    """Returns values that were read before: collecting does no I/O."""

    def __init__(self, readings: Sequence[MetricValues], instruments: Sequence[Instrument]) -> None:
        self._readings = readings
        self._meters = instruments

    def collect(self) -> Iterator[Metric]:
        for reading in self._readings:
            yield _simple_family(reading.metric, reading.values)
        for instrument in self._meters:
            if isinstance(instrument, Histogram):
                yield _histogram_family(instrument.info, instrument.bounds, instrument.values())
            else:
                yield _simple_family(instrument.info, instrument.values())


def _simple_family(metric: MetricInfo, values: Mapping[Labels, float]) -> Metric:
    match metric.kind:
        case MetricKind.COUNTER:
            family: Metric = CounterMetricFamily(metric.name.removesuffix("_total"), metric.help, labels=metric.labels)
        case MetricKind.GAUGE:
            family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
        case MetricKind.HISTOGRAM:
            raise AssertionError(metric.name)
        case _:
            assert_never(metric.kind)
    for labels, value in sorted(values.items()):
        family.add_sample(metric.name, dict(zip(metric.labels, labels, strict=True)), value)
    return family


def _histogram_family(metric: MetricInfo, bounds: Sequence[float], values: Mapping[Labels, HistogramValues]) -> Metric:
    family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
    for labels, spread in sorted(values.items()):
        counts = accumulate(spread.counts)
        buckets = [(str(bound), count) for bound, count in zip((*bounds, "+Inf"), counts, strict=True)]
        family.add_metric(labels, buckets, spread.total)
    return family


PATH: Final = "/metrics"
_BIND_RETRY_SECONDS: Final = 1.0
_REQUEST_TIMEOUT_SECONDS: Final = 5.0

Read = Callable[[], Iterable[MetricValues]]


def _nothing() -> Iterable[MetricValues]:
    return ()


@contextlib.contextmanager
def serve_metrics(port: int | None, read: Read = _nothing, *, host: str = "127.0.0.1") -> Iterator[str | None]:
    """Serve metrics until the end of the block; without a port, do nothing. The server thread calls `read`.

    Port 0 is a free port that only this machine can reach; the block then gets the URL of the page.
    """
    if port is None:
        yield None
        return
    server = None if port else _Server(("127.0.0.1", 0), read)
    over = threading.Event()
    thread = threading.Thread(target=_serve, args=(server, host, port, read, over), name="metrics", daemon=True)
    thread.start()
    try:
        yield None if server is None else f"http://127.0.0.1:{server.server_port}{PATH}"
    finally:
        over.set()
        thread.join(_REQUEST_TIMEOUT_SECONDS)


def _serve(server: "_Server | None", host: str, port: int, read: Read, over: threading.Event) -> None:
    server = server or _bind(host, port, read, over)
    if server is None:
        return
    with server:
        while not over.is_set():
            server.handle_request()


def _bind(host: str, port: int, read: Read, over: threading.Event) -> "_Server | None":
    warned = False
    while not over.is_set():
        try:
            return _Server((host, port), read)
        except OSError as error:
            if not warned:
                _log.warning("cannot serve metrics at %s port %d yet: %s", host, port, error.strerror)
                warned = True
        over.wait(_BIND_RETRY_SECONDS)
    return None


_Request = socket.socket | tuple[bytes, socket.socket]


def _disconnect(request: _Request) -> None:
    if isinstance(request, socket.socket):
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)


class _Server(http.server.HTTPServer):
    """Serves one request at a time."""

    timeout = 0.2

    def __init__(self, where: tuple[str, int], read: Read) -> None:
        self.read = read
        self.address_family = socket.AF_INET6 if ":" in where[0] else socket.AF_INET
        super().__init__(where, _Handler)

    def finish_request(self, request: _Request, client_address: object) -> None:
        """Answer one request. Disconnect a client that takes too long: other clients wait behind it."""
        deadline = threading.Timer(_REQUEST_TIMEOUT_SECONDS, _disconnect, (request,))
        deadline.daemon = True
        deadline.start()
        try:
            super().finish_request(request, client_address)
        finally:
            deadline.cancel()

    def handle_error(self, request: object, client_address: object) -> None:
        """Log a failed request at debug level only: clients may disconnect."""
        _log.debug("a request for metrics was not answered", exc_info=True)


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = _REQUEST_TIMEOUT_SECONDS
    server: _Server

    def do_GET(self) -> None:
        """Answer `/metrics` with the page, and any other path with 404."""
        if self.path.partition("?")[0] != PATH:
            self.send_error(HTTPStatus.NOT_FOUND, f"there is only {PATH}")
            return
        page = render(self.server.read())
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is the library's
        """Log no line per request."""

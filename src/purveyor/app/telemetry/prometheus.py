"""Figures as the page that Prometheus reads. Only here prometheus-client is known."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final, assert_never

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from purveyor import __version__
from purveyor.app.telemetry import metric_catalogue
from purveyor.model.metric_types import Figure, Histogram, Kind, Labels, Meter, Spread, Waits
from purveyor.model.metrics import METERS, MIGRATION_WAITS

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST


@dataclass(slots=True)
class Reading:
    """A figure with its values, as somebody looked it up."""

    figure: Figure
    values: dict[Labels, float] = field(default_factory=dict)

    def add(self, value: float, *labels: str) -> None:
        """One value."""
        self.values[labels] = value


def render(looked_up: Iterable[Reading] = ()) -> bytes:
    """The page: what was looked up, what the parts count, and what the system says about the process."""
    registry = CollectorRegistry()
    registry.register(_Once([*_about_us(), *_waits(MIGRATION_WAITS), *looked_up], METERS))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


def _about_us() -> Iterator[Reading]:
    yield Reading(metric_catalogue.BUILD, {(__version__,): 1})


def _waits(waits: Waits) -> Iterator[Reading]:
    found = waits.values()
    yield Reading(metric_catalogue.WAITING, {(queue,): waited.now for queue, waited in found.items()})
    yield Reading(metric_catalogue.WAITED, {(queue,): waited.ever for queue, waited in found.items()})
    yield Reading(metric_catalogue.WAITED_SECONDS, {(queue,): waited.seconds for queue, waited in found.items()})
    yield Reading(metric_catalogue.BUFFERED, {(queue,): waited.held for queue, waited in found.items()})


class _Once(Collector):
    """Tells what was read already: collecting asks nobody."""

    def __init__(self, readings: Sequence[Reading], meters: Sequence[Meter]) -> None:
        self._readings = readings
        self._meters = meters

    def collect(self) -> Iterator[Metric]:
        for reading in self._readings:
            yield _plain(reading.figure, reading.values)
        for meter in self._meters:
            if isinstance(meter, Histogram):
                yield _spread(meter.figure, meter.bounds, meter.values())
            else:
                yield _plain(meter.figure, meter.values())


def _plain(figure: Figure, values: Mapping[Labels, float]) -> Metric:
    match figure.kind:
        case Kind.COUNTER:
            family: Metric = CounterMetricFamily(figure.name.removesuffix("_total"), figure.help, labels=figure.labels)
        case Kind.GAUGE:
            family = GaugeMetricFamily(figure.name, figure.help, labels=figure.labels)
        case Kind.HISTOGRAM:
            raise AssertionError(figure.name)
        case _:
            assert_never(figure.kind)
    for labels, value in sorted(values.items()):
        family.add_sample(figure.name, dict(zip(figure.labels, labels, strict=True)), value)
    return family


def _spread(figure: Figure, bounds: Sequence[float], values: Mapping[Labels, Spread]) -> Metric:
    family = HistogramMetricFamily(figure.name, figure.help, labels=figure.labels)
    for labels, spread in sorted(values.items()):
        counts = accumulate(spread.counts)
        buckets = [(str(bound), count) for bound, count in zip((*bounds, "+Inf"), counts, strict=True)]
        family.add_metric(labels, buckets, spread.total)
    return family

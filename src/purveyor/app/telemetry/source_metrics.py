"""Metrics of the sources of this process that follow a directory, from their status."""

from collections.abc import Sequence

from purveyor.app.telemetry import metric_catalogue
from purveyor.app.telemetry.prometheus import MetricValues
from purveyor.sources.ldap.source_status import SourceActivity, SourceStatus


def read_source_metrics(statuses: Sequence[SourceStatus]) -> list[MetricValues]:
    """Return the current values. A source that stands by has only `purveyor_source_up`, as 0."""
    up, entries, records, lag, waiting = (
        MetricValues(metric)
        for metric in (
            metric_catalogue.SOURCE_UP,
            metric_catalogue.SOURCE_ENTRIES,
            metric_catalogue.SOURCE_RECORDS,
            metric_catalogue.SOURCE_LAG,
            metric_catalogue.SOURCE_WAITING,
        )
    )
    for status in statuses:
        name = status.directory.source
        up.add(status.is_active, name)
        records.add(status.records, name)
        if not status.is_active:
            continue
        waiting.add(status.waiting, name)
        if status.entries is not None:
            entries.add(status.entries, name)
        if status.lag_seconds is not None and status.activity is SourceActivity.FOLLOWING:
            lag.add(status.lag_seconds, name)
    return [up, entries, records, lag, waiting]

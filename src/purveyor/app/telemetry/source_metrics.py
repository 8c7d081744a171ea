"""Metrics of the sources of this process that follow a directory, from their status."""

from collections.abc import Sequence

from purveyor.app.telemetry import metric_catalogue
from purveyor.app.telemetry.prometheus import MetricValues
from purveyor.sources.ldap.source_status import SourceActivity, SourceStatus


def read_source_metrics(statuses: Sequence[SourceStatus]) -> list[MetricValues]:
    """Return the current values. A source that does not read its directory says nothing about the content of it."""
    up, entries, records, lag, waiting, info, changed, failed = (
        MetricValues(metric)
        for metric in (
            metric_catalogue.SOURCE_UP,
            metric_catalogue.SOURCE_ENTRIES,
            metric_catalogue.SOURCE_RECORDS,
            metric_catalogue.SOURCE_LAG,
            metric_catalogue.SOURCE_WAITING,
            metric_catalogue.SOURCE_INFO,
            metric_catalogue.SOURCE_LAST_CHANGE,
            metric_catalogue.SOURCE_LAST_ERROR,
        )
    )
    for status in statuses:
        directory = status.directory
        name = directory.source
        up.add(status.is_active, name)
        records.add(status.records, name)
        info.add(1, name, directory.uri, directory.base, status.mode or directory.mode.value)
        if status.error_at is not None:
            failed.add(status.error_at.timestamp(), name)
        if not status.is_active:
            continue
        if status.last_change is not None:
            changed.add(status.last_change.timestamp(), name)
        waiting.add(status.waiting, name)
        if status.entries is not None:
            entries.add(status.entries, name)
        if status.lag_seconds is not None and status.activity is SourceActivity.FOLLOWING:
            lag.add(status.lag_seconds, name)
    return [up, entries, records, lag, waiting, info, changed, failed]

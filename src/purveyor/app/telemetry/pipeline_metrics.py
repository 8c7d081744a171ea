"""Metrics of pipeline parts: a reporter that records each status and passes it on to the terminal reporter.

The pipeline calls its reporter ten times a second and does not know about metrics.
"""

import threading
from collections.abc import Sequence

from purveyor.app.telemetry import metric_catalogue
from purveyor.app.telemetry.prometheus import MetricValues
from purveyor.model.metrics import BATCH_SECONDS, BATCHES
from purveyor.pipeline.part_status import PartStatus, State
from purveyor.pipeline.service import Reporter


class PipelineMetrics:
    """The metrics of the parts, from their last status."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._parts: Sequence[PartStatus] = ()
        self._batches: dict[str, int] = {}
        self._lock = threading.Lock()

    def report_step(self, event: str, text: str) -> None:
        """Pass an event of the pipeline on."""
        self._reporter.report_step(event, text)

    def report_parts(self, parts: Sequence[PartStatus]) -> None:
        """Record the status of the parts, and pass it on."""
        with self._lock:
            self._parts = tuple(parts)
            for part in parts:
                self._note_batch(part)
        self._reporter.report_parts(parts)

    def _note_batch(self, part: PartStatus) -> None:
        number = part.progress.batch
        if number is None:
            return
        before = self._batches.get(part.name)
        # The first batch number may belong to an earlier run.
        if before is not None and number > before:
            BATCHES.add(part.name, by=number - before)
            if part.progress.batch_ms is not None:
                BATCH_SECONDS.add(part.progress.batch_ms / 1000, part.name)
        self._batches[part.name] = number

    def read(self) -> list[MetricValues]:
        """Return the current values."""
        with self._lock:
            parts = self._parts
        up, position, lag, rate, batch, restarts = (
            MetricValues(metric)
            for metric in (
                metric_catalogue.PART_UP,
                metric_catalogue.PART_POSITION,
                metric_catalogue.PART_LAG,
                metric_catalogue.PART_RATE,
                metric_catalogue.PART_BATCH,
                metric_catalogue.PART_RESTARTS,
            )
        )
        for part in parts:
            progress = part.progress
            up.add(part.state is State.RUNNING, part.name)
            restarts.add(part.restarts, part.name)
            if progress.position is not None:
                position.add(progress.position, part.name)
            if progress.lag is not None:
                lag.add(progress.lag, part.name)
            if progress.batch_ms is not None:
                batch.add(progress.batch_ms / 1000, part.name)
                rate.add(progress.rows_per_second, part.name)
        return [up, position, lag, rate, batch, restarts]

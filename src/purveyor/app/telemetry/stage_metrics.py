"""Metrics of an application with transactional stages: its outbox and its failing messages.

async with stages, watch_stages(stages) as metrics:
    with serve_metrics(9100, metrics.read):
        ...
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator
from typing import Final

from purveyor.app.telemetry import metric_catalogue
from purveyor.app.telemetry.prometheus import MetricValues
from purveyor.model.metrics import Labels
from purveyor.stages.application import Stages
from purveyor.stages.stage_status import DatabaseStatus, read_database_status

_log = logging.getLogger(__name__)
_READ_INTERVAL_SECONDS: Final = 5.0


class StageMetrics:
    """The last status of an application's database. `watch_stages` reads it periodically, not at each scrape."""

    def __init__(self, app: str) -> None:
        self._app = app
        self._found: DatabaseStatus | None = None
        self._lock = threading.Lock()

    def set_status(self, found: DatabaseStatus | None) -> None:
        """Set the status; None: the database did not answer."""
        with self._lock:
            self._found = found

    def read(self) -> list[MetricValues]:
        """Return the current values."""
        with self._lock:
            found = self._found
        up = MetricValues(metric_catalogue.DATABASE_UP, {(self._app,): float(found is not None)})
        if found is None:
            return [up]
        outbox: dict[Labels, float] = {
            (self._app, "unsent"): float(found.unsent),
            (self._app, "held"): float(sum(found.held.values())),
        }
        return [
            up,
            MetricValues(metric_catalogue.OUTBOX, outbox),
            MetricValues(metric_catalogue.STAGE_FAILING, {(self._app,): float(len(found.failing))}),
        ]


@contextlib.asynccontextmanager
async def watch_stages(stages: Stages, every_seconds: float = _READ_INTERVAL_SECONDS) -> AsyncIterator[StageMetrics]:
    """Read the status of an application's database every few seconds until the end of the block."""
    metrics = StageMetrics(stages.app)
    watching = asyncio.create_task(_watch(stages, metrics, every_seconds))
    try:
        yield metrics
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _watch(stages: Stages, metrics: StageMetrics, every_seconds: float) -> None:
    while True:
        try:
            metrics.set_status(await read_database_status(stages.store))
        except Exception as error:  # noqa: BLE001 - any driver error: `purveyor_database_up` reports it
            _log.debug("the database of %s does not answer: %s", stages.app, error)
            metrics.set_status(None)
        await asyncio.sleep(every_seconds)

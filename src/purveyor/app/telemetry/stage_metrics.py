"""The figures of an application with transactional stages: what waits in its outbox, and what fails.

async with stages, watched(stages) as figures:
with exporting(9100, figures.read):
...
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator
from typing import Final

from purveyor.app.telemetry import metric_catalogue
from purveyor.app.telemetry.prometheus import Reading
from purveyor.model.metric_types import Labels
from purveyor.stages.application import Stages
from purveyor.stages.stage_status import DatabaseStatus, ask_database

_log = logging.getLogger(__name__)
_EVERY_SECONDS: Final = 5.0


class StageFigures:
    """What the database of an application said last; looked at now and then, not when Prometheus asks."""

    def __init__(self, app: str) -> None:
        self._app = app
        self._found: DatabaseStatus | None = None
        self._lock = threading.Lock()

    def note(self, found: DatabaseStatus | None) -> None:
        """What was found; None: the database did not answer."""
        with self._lock:
            self._found = found

    def read(self) -> list[Reading]:
        """The figures now."""
        with self._lock:
            found = self._found
        up = Reading(metric_catalogue.DATABASE_UP, {(self._app,): float(found is not None)})
        if found is None:
            return [up]
        outbox: dict[Labels, float] = {
            (self._app, "unsent"): float(found.unsent),
            (self._app, "held"): float(sum(found.held.values())),
        }
        return [
            up,
            Reading(metric_catalogue.OUTBOX, outbox),
            Reading(metric_catalogue.STAGE_FAILING, {(self._app,): float(len(found.failing))}),
        ]


@contextlib.asynccontextmanager
async def watched(stages: Stages, every_seconds: float = _EVERY_SECONDS) -> AsyncIterator[StageFigures]:
    """Look at the database of an application every few seconds, as long as the block lasts."""
    figures = StageFigures(stages.app)
    watching = asyncio.create_task(_watch(stages, figures, every_seconds))
    try:
        yield figures
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _watch(stages: Stages, figures: StageFigures, every_seconds: float) -> None:
    while True:
        try:
            figures.note(await ask_database(stages.store))
        except Exception as error:  # noqa: BLE001 - whatever a driver raises: a figure says that it is away
            _log.debug("the database of %s does not answer: %s", stages.app, error)
            figures.note(None)
        await asyncio.sleep(every_seconds)

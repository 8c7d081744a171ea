"""The degraded parts in the deployment of an API process, for `GET /readyz`.

Requests within seconds share one reading. A probe must get its answer soon, so a reading that takes long continues in
the background, and the answer has the result of the last one.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Final

from purveyor.app.doctor.conditions import Condition, judge
from purveyor.app.doctor.machine_checks import Weight
from purveyor.app.doctor.observation import observe
from purveyor.app.telemetry.queue_metrics import RegistrySnapshots
from purveyor.model.errors import PermissionDenied, PurveyorError
from purveyor.queues.backlog import FirstSeen
from purveyor.queues.catalogue import DEFAULT_GROUP
from purveyor.queues.client import Queues

_FRESH_SECONDS: Final = 2.0
_WAIT_SECONDS: Final = 0.5
_TIMEOUT_SECONDS: Final = 10.0
_log = logging.getLogger(__name__)


class Readiness:
    """Observes the deployment with the connection of an API process."""

    def __init__(
        self,
        queues: Queues,
        registry: RegistrySnapshots,
        *,
        group: str = DEFAULT_GROUP,
        archive_seconds: float = 0.0,
    ) -> None:
        self._queues = queues
        self._registry = registry
        self._group = group
        self._archive_seconds = archive_seconds
        self._first_seen: FirstSeen = {}
        self._found: Sequence[Condition] = ()
        self._found_at = float("-inf")
        self._reading: asyncio.Task[None] | None = None

    async def degraded(self) -> Sequence[Condition]:
        """Return what is wrong, as of the last reading."""
        if self._reading is None and time.monotonic() - self._found_at > _FRESH_SECONDS:
            self._reading = asyncio.create_task(self._refresh())
        if self._reading is not None:
            await asyncio.wait([self._reading], timeout=_WAIT_SECONDS)
        return self._found

    async def close(self) -> None:
        """End a reading that is under way."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def _refresh(self) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                self._found = await self._read()
        except (PurveyorError, TimeoutError) as error:
            _log.debug("cannot read what is degraded: %s", error)
        finally:
            self._found_at, self._reading = time.monotonic(), None

    async def _read(self) -> Sequence[Condition]:
        try:
            usages = await self._queues.streams.usage()
            seen = await observe(self._queues, await self._registry.read(), usages, self._first_seen)
        except PermissionDenied:  # a user with fewer rights: the API works, and cannot see the rest
            return ()
        conditions = judge(seen, group=self._group, archive_seconds=self._archive_seconds)
        return [each for each in conditions if each.weight is Weight.WRONG]

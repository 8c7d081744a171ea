"""The cleanup of inbox and outbox: removes rows that no longer matter, in small batches, by one instance at a time.

It removes a row of the outbox a while after the relay sent it: until then a replay can send it again. It removes a row
of the inbox a while after its message was processed, and only at or below the sequence up to which the broker delivers
nothing again: the inbox knows a message as long as the broker can deliver it.
"""

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Final

from purveyor.stages.source import Source
from purveyor.stages.sql_statements import CleanupBatch
from purveyor.stages.sql_store import SqlStore, now_ms
from purveyor.stages.stage_options import Timing

log = logging.getLogger("purveyor.stages")

_BATCH_ROWS: Final = 2000
_PAUSE_SECONDS: Final = 0.05


class Cleanup:
    """Removes old rows of inbox and outbox at an interval."""

    def __init__(self, store: SqlStore, sources: Mapping[str, Source], timing: Timing) -> None:
        """Take the `sources` by the stages whose inbox they fill."""
        self._store = store
        self._sources = sources
        self._timing = timing

    async def run(self) -> None:
        """Clean up at the interval of `Timing.upkeep`, until cancelled."""
        while True:
            await asyncio.sleep(self._timing.upkeep.total_seconds())
            try:
                await self.run_once()
            except Exception as error:  # noqa: BLE001 - the next round may succeed
                log.warning("the cleanup of inbox and outbox failed: %s", error)

    async def run_once(self) -> tuple[int, int]:
        """Remove all old rows, unless another instance does; return the number of removed rows of outbox and inbox."""
        lock = await self._store.leader_lock("upkeep")
        outbox = inbox = 0
        try:
            if not await lock.try_acquire():
                return 0, 0
            statements, now, connection = self._store.statements, now_ms(), lock.connection
            batch = CleanupBatch(now - _ms(self._timing.outbox_kept), _BATCH_ROWS)
            while (removed := await statements.clean_outbox(connection, batch)).rows:
                outbox += removed.rows
                batch = replace(batch, begin=removed.up_to)
                await asyncio.sleep(_PAUSE_SECONDS)
            for stage, source in self._sources.items():
                floor = await source.ack_floor()
                batch = CleanupBatch(now - _ms(self._timing.inbox_kept), _BATCH_ROWS)
                while (removed := await statements.clean_inbox(connection, stage, floor, batch)).rows:
                    inbox += removed.rows
                    batch = replace(batch, begin=removed.up_to)
                    await asyncio.sleep(_PAUSE_SECONDS)
        finally:
            with contextlib.suppress(Exception):
                await lock.close()
        return outbox, inbox


def _ms(duration: timedelta) -> int:
    return duration // timedelta(milliseconds=1)

"""Upkeep of inbox and outbox: what nobody can ask for any more goes, in small portions, by one instance at a time.

A row of the outbox goes when it was sent long ago: until then a replay can send it again. A row of the inbox goes when
its message was processed long ago, and lies at or below the sequence up to which the broker will deliver nothing again:
however long a message was on its way, it is known as long as it can come.
"""

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Final

from purveyor.stages.source import Source
from purveyor.stages.sql_store import SqlStore, now_ms
from purveyor.stages.statement_protocol import Portion
from purveyor.stages.timeouts import Timing

log = logging.getLogger("purveyor.stages")

_PORTION: Final = 2000
_PAUSE_SECONDS: Final = 0.05


class Upkeep:
    """See the module."""

    def __init__(self, store: SqlStore, sources: Mapping[str, Source], timing: Timing) -> None:
        """`sources` by the stages whose inbox they fill."""
        self._store = store
        self._sources = sources
        self._timing = timing

    async def run(self) -> None:
        """Now and then, until cancelled."""
        while True:
            await asyncio.sleep(self._timing.upkeep.total_seconds())
            try:
                await self.once()
            except Exception as error:  # noqa: BLE001 - the next time may be better
                log.warning("the upkeep of inbox and outbox failed: %s", error)

    async def once(self) -> tuple[int, int]:
        """All that can go, unless another instance is at it; how many rows of outbox and inbox went."""
        seat = await self._store.seat("upkeep")
        outbox = inbox = 0
        try:
            if not await seat.take():
                return 0, 0
            ask, now, connection = self._store.statements, now_ms(), seat.connection
            portion = Portion(now - _ms(self._timing.outbox_kept), _PORTION)
            while (gone := await ask.clean_outbox(connection, portion)).rows:
                outbox += gone.rows
                portion = replace(portion, begin=gone.up_to)
                await asyncio.sleep(_PAUSE_SECONDS)
            for stage, source in self._sources.items():
                floor = await source.floor()
                portion = Portion(now - _ms(self._timing.inbox_kept), _PORTION)
                while (gone := await ask.clean_inbox(connection, stage, floor, portion)).rows:
                    inbox += gone.rows
                    portion = replace(portion, begin=gone.up_to)
                    await asyncio.sleep(_PAUSE_SECONDS)
        finally:
            with contextlib.suppress(Exception):
                await seat.close()
        return outbox, inbox


def _ms(duration: timedelta) -> int:
    return duration // timedelta(milliseconds=1)

"""Reading a queue through its migration: messages come from wherever they are now, and nobody has to be told.

A reader that finds nothing looks whether the stream is sealed, and brings the migration forward if it is. One whose
durable is not there (any more, or yet) reads a sealed work queue by the durable that all share, and otherwise waits.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator

from purveyor.jetstream.consumers import Consumers
from purveyor.jetstream.messages import Message
from purveyor.jetstream.puller import Puller, PullOptions
from purveyor.jetstream.streams import Streams
from purveyor.model.errors import NotFound, Unavailable, UnknownConsumer, UnknownStream, UnreadableRecord
from purveyor.queues.migration.drain import shared_durable
from purveyor.queues.migration.migrator import Migrations, queue_of
from purveyor.queues.migration.record import QueueStatus

_log = logging.getLogger("purveyor.migration")
_LOOK_SECONDS = 1.0
_AGAIN_SECONDS = 0.1


class Reading:
    """Pulls for one process; for streams that are no queues just as `Puller` does."""

    def __init__(self, puller: Puller, streams: Streams, consumers: Consumers, migrations: Migrations) -> None:
        self._puller = puller
        self._streams = streams
        self._consumers = consumers
        self._migrations = migrations
        self._looked_at: dict[str, float] = {}
        self._sealed: set[str] = set()

    async def fetch(self, stream: str, consumer: str, count: int, *, wait_seconds: float) -> list[Message]:
        """See `Puller.fetch`; while the queue is migrated, what can be read of it."""
        deadline = time.monotonic() + wait_seconds
        while True:
            left = max(deadline - time.monotonic(), 0)
            try:
                durable = await self._durable(stream, consumer)
                if durable is not None:
                    got = await self._puller.fetch(stream, durable, count, wait_seconds=left)
                    if not got:
                        await self._look(stream)
                    return got
            except NotFound:
                if not await self._migrated(stream, consumer):
                    raise
            await self._look(stream)
            if time.monotonic() + _AGAIN_SECONDS > deadline:
                return []
            await asyncio.sleep(_AGAIN_SECONDS)

    async def pull(self, stream: str, consumer: str, options: PullOptions | None) -> AsyncGenerator[Message]:
        """See `Puller.pull`; goes on over a migration."""
        while True:
            try:
                durable = await self._durable(stream, consumer)
                if durable is not None:
                    messages = self._puller.pull(stream, durable, options, on_idle=lambda: self._look(stream))
                    async with contextlib.aclosing(messages):
                        async for message in messages:
                            yield message
            except NotFound:
                if not await self._migrated(stream, consumer):
                    raise
            await self._look(stream)
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _durable(self, stream: str, consumer: str) -> str | None:
        """Where to read: its own durable if that is there, else the one that is shared; None if there is neither now.

        UnknownConsumer or UnknownStream if the queue is not being migrated.
        """
        try:
            await self._consumers.info(stream, consumer)
        except UnknownConsumer:
            if queue_of(stream) is None:
                raise
            shared = await shared_durable(self._streams, self._consumers, stream)
            if shared is None and not await self._migrated(stream, consumer):
                raise
            return shared
        return consumer

    async def _migrated(self, stream: str, consumer: str) -> bool:
        """Whether what was not found is, or was until this moment, away for a migration."""
        queue = queue_of(stream)
        if queue is None:
            return False
        try:
            migrated = await self._migrations.under_way(queue) is not None
        except UnreadableRecord:  # a newer program migrates it, and completes that
            return True
        if migrated:
            self._sealed.add(stream)
            return True
        try:
            await self._consumers.info(stream, consumer)
        except (UnknownConsumer, UnknownStream):
            return False
        return True

    async def _look(self, stream: str) -> None:
        """Bring a migration of the queue forward, if there is one; at most once a second."""
        queue = queue_of(stream)
        now = time.monotonic()
        if queue is None or now - self._looked_at.get(stream, 0) < _LOOK_SECONDS:
            return
        self._looked_at[stream] = now
        with contextlib.suppress(Unavailable, UnreadableRecord):  # the next look tells; others complete it
            if stream not in self._sealed:
                if not await self._is_away(stream) or await self._migrations.under_way(queue) is None:
                    return
                self._sealed.add(stream)
            if await self._migrations.advance(queue) is QueueStatus.READY:
                self._sealed.discard(stream)
                _log.info("Stream migration completed, resuming normal operation")

    async def _is_away(self, stream: str) -> bool:
        """Sealed or gone: for its migration, or because somebody wants it so."""
        try:
            return (await self._streams.info(stream)).config.sealed
        except UnknownStream:
            return True

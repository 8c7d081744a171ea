"""`Queues`: a JetStream client that creates Purveyor's queues (`ensure`) and reads them while they are migrated.

`MigrationAwarePuller` reads a queue also while it is migrated; its callers notice no more than a pause. A reader that
receives nothing checks whether the stream is sealed, and advances the migration if it is. A reader whose durable does
not exist (any more, or yet) reads a sealed work queue with the durable that all readers share, and otherwise waits.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator

from purveyor.jetstream.address import Address
from purveyor.jetstream.client import JetStream, resolve_address
from purveyor.jetstream.connection import Connection
from purveyor.jetstream.consumers import Consumers
from purveyor.jetstream.messages import Message
from purveyor.jetstream.puller import Puller, PullOptions
from purveyor.jetstream.streams import Streams
from purveyor.model.errors import (
    NotFound,
    Unavailable,
    UnknownConsumer,
    UnknownStream,
    UnreadableRecord,
)
from purveyor.queues.catalogue import Queue
from purveyor.queues.ensure import Ensured, Ensurer
from purveyor.queues.migration.drain import find_shared_durable
from purveyor.queues.migration.events import MigrationOptions
from purveyor.queues.migration.migrator import Migrator
from purveyor.queues.migration.record import queue_of

_POLL_INTERVAL_SECONDS = 1.0
_RETRY_SECONDS = 0.1


class MigrationAwarePuller:
    """The puller of one process; for streams that are no queues it does what `Puller` does."""

    def __init__(self, puller: Puller, streams: Streams, consumers: Consumers, migrations: Migrator) -> None:
        self._puller = puller
        self._streams = streams
        self._consumers = consumers
        self._migrations = migrations
        self._advanced_at: dict[str, float] = {}
        self._sealed: set[str] = set()

    async def fetch(self, stream: str, consumer: str, count: int, *, wait_seconds: float) -> list[Message]:
        """Fetch as `Puller.fetch` does; during a migration, fetch what can be read."""
        deadline = time.monotonic() + wait_seconds
        while True:
            left = max(deadline - time.monotonic(), 0)
            try:
                durable = await self._durable(stream, consumer)
                if durable is not None:
                    got = await self._puller.fetch(stream, durable, count, wait_seconds=left)
                    if not got:
                        await self._advance(stream)
                    return got
            except NotFound:
                if not await self._is_migrated(stream, consumer):
                    raise
            await self._advance(stream)
            if time.monotonic() + _RETRY_SECONDS > deadline:
                return []
            await asyncio.sleep(_RETRY_SECONDS)

    async def pull(self, stream: str, consumer: str, options: PullOptions | None) -> AsyncGenerator[Message]:
        """Pull as `Puller.pull` does, without end, also through a migration."""
        while True:
            try:
                durable = await self._durable(stream, consumer)
                if durable is not None:
                    messages = self._puller.pull(stream, durable, options, on_idle=lambda: self._advance(stream))
                    async with contextlib.aclosing(messages):
                        async for message in messages:
                            yield message
            except NotFound:
                if not await self._is_migrated(stream, consumer):
                    raise
            await self._advance(stream)
            await asyncio.sleep(_RETRY_SECONDS)

    async def _durable(self, stream: str, consumer: str) -> str | None:
        """Return the durable to read with: the reader's own, else the shared one; None if neither exists now.

        UnknownConsumer or UnknownStream if the queue is not being migrated.
        """
        try:
            await self._consumers.info(stream, consumer)
        except UnknownConsumer:
            if queue_of(stream) is None:
                raise
            shared = await find_shared_durable(self._streams, self._consumers, stream)
            if shared is None and not await self._is_migrated(stream, consumer):
                raise
            return shared
        return consumer

    async def _is_migrated(self, stream: str, consumer: str) -> bool:
        """Return whether the missing stream or durable is, or was until now, missing because of a migration."""
        queue = queue_of(stream)
        if queue is None:
            return False
        try:
            is_running = await self._migrations.find_running(queue) is not None
        except UnreadableRecord:  # a newer program runs and completes its migration
            return True
        if is_running:
            self._sealed.add(stream)
            return True
        try:
            await self._consumers.info(stream, consumer)
        except (UnknownConsumer, UnknownStream):
            return False
        return True

    async def _advance(self, stream: str) -> None:
        """Advance the migration of the queue, if there is one; at most once a second."""
        queue = queue_of(stream)
        now = time.monotonic()
        if queue is None or now - self._advanced_at.get(stream, 0) < _POLL_INTERVAL_SECONDS:
            return
        self._advanced_at[stream] = now
        with contextlib.suppress(Unavailable, UnreadableRecord):  # the next poll, or another instance, completes it
            if stream not in self._sealed:
                if not await self._is_unavailable(stream) or await self._migrations.find_running(queue) is None:
                    return
                self._sealed.add(stream)
            if await self._migrations.resume_if_ready(queue):
                self._sealed.discard(stream)

    async def _is_unavailable(self, stream: str) -> bool:
        """Return whether the stream is sealed or missing: by a migration, or by an operator."""
        try:
            return (await self._streams.info(stream)).config.sealed
        except UnknownStream:
            return True


class Queues(JetStream):
    """Purveyor's queues on one connection: a JetStream client with `ensure` and `migrations`."""

    def __init__(self, connection: Connection, migration_options: MigrationOptions | None = None) -> None:
        super().__init__(connection)
        self.migrations = Migrator(self._api, self._services, migration_options)
        self._ensurer = Ensurer(self.streams, self.consumers, self.migrations)
        self._aware_puller = MigrationAwarePuller(self._puller, self.streams, self.consumers, self.migrations)

    async def ensure(self, queue: Queue, *, replicas: int = 1, migrate: bool = False) -> Ensured:
        """Create or update the stream of a queue and the durables of its readers; see `Ensurer.ensure`."""
        return await self._ensurer.ensure(queue, replicas=replicas, migrate=migrate)

    async def fetch(self, stream: str, consumer: str, count: int = 1, *, wait_seconds: float = 5) -> list[Message]:
        """Return up to `count` messages of a consumer, also while the queue is migrated."""
        return await self._aware_puller.fetch(stream, consumer, count, wait_seconds=wait_seconds)

    def pull(self, stream: str, consumer: str, options: PullOptions | None = None) -> AsyncGenerator[Message]:
        """Yield messages of a consumer without end, also while the queue is migrated."""
        return self._aware_puller.pull(stream, consumer, options)


@contextlib.asynccontextmanager
async def connect(
    address: Address | str | None = None,
    *,
    name: str = "purveyor",
    patience_seconds: float = 60,
    migration_options: MigrationOptions | None = None,
) -> AsyncIterator[Queues]:
    """Connect for the length of a block; without an address, to the server that `jetstream.connect` finds.

    `patience_seconds` is how long a call waits for a lost server before it fails. It is shorter than the two minutes in
    which the server recognises a repeated message. `migration_options` say how this client migrates queues.

        async with connect("nats://127.0.0.1:4222") as queues:
            await queues.ensure(LDIF)
    """
    connection = await Connection.open(resolve_address(address), name=name, patience_seconds=patience_seconds)
    async with Queues(connection, migration_options) as queues:
        yield queues

"""`Queues`: a JetStream client that creates Purveyor's queues (`ensure`) and reads them while they are migrated.

The writer and the readers of a queue call `ensure(queue)` when they start, in any order, from many processes. The rules
(what differs, what can change in place) are pure functions in `migration.plan`; `Ensurer` acts on them until nothing
differs.

`MigrationAwarePuller` reads a queue also while it is migrated; its callers notice no more than a pause. A reader that
receives nothing checks whether the stream is sealed, and advances the migration if it is. A reader whose durable does
not exist (any more, or yet) reads a sealed work queue with the durable that all readers share, and otherwise waits.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from purveyor.jetstream.address import Address
from purveyor.jetstream.client import JetStream, resolve_address
from purveyor.jetstream.config import Retention, StreamConfig
from purveyor.jetstream.connection import Connection
from purveyor.jetstream.consumers import Consumers
from purveyor.jetstream.maintenance import STREAM_PREFIX
from purveyor.jetstream.messages import Message
from purveyor.jetstream.puller import Puller, PullOptions
from purveyor.jetstream.streams import Streams
from purveyor.model.errors import (
    AlreadyExists,
    MigrationNeeded,
    NotFound,
    PermissionDenied,
    Unavailable,
    UnknownConsumer,
    UnknownStream,
    UnreadableRecord,
)
from purveyor.queues.catalogue import Queue, Reader
from purveyor.queues.migration.drain import find_shared_durable
from purveyor.queues.migration.events import MigrationOptions
from purveyor.queues.migration.migrator import Migrator
from purveyor.queues.migration.plan import Difference, consumer_differences, stream_differences
from purveyor.queues.migration.record import QueueStatus, queue_of

_ATTEMPTS = 20
_GUIDE = "docs/guides/migration.md"
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


class Action(Enum):
    """What `ensure` did."""

    CREATED = "created"
    UPDATED = "updated"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Ensured:
    """The result: the status, the action, and the differences before it (or those that remain)."""

    queue: str
    status: QueueStatus
    action: Action = Action.NOTHING
    differences: tuple[Difference, ...] = ()

    def require_ready(self) -> "Ensured":
        """Return the result if the queue is READY; raise MigrationNeeded otherwise."""
        if self.status is QueueStatus.SEALED_FOR_MIGRATION:
            raise MigrationNeeded(
                f"queue {self.queue!r} is sealed for migration",
                fix=f"wait until its readers have drained it; `purveyor queues list` shows more; see {_GUIDE}",
            )
        return self.require_usable()

    def require_usable(self) -> "Ensured":
        """Return the result if the queue is READY or being migrated: then readers drain it, and writers wait.

        Raise MigrationNeeded if the queue needs a migration and this program may not begin one.
        """
        if self.status is QueueStatus.NEEDS_MIGRATION:
            why = "; ".join(map(str, self.differences))
            raise MigrationNeeded(
                f"Stream '{STREAM_PREFIX}{self.queue}' update failed but migration not enabled. See {_GUIDE}. "
                f"Error: {why}",
                fix=f"run `purveyor queues plan {self.queue}`, or set PURVEYOR_MIGRATE=true",
            )
        return self


class Ensurer:
    """Brings queues to their declaration."""

    def __init__(self, streams: Streams, consumers: Consumers, migrations: Migrator) -> None:
        self._streams = streams
        self._consumers = consumers
        self._migrations = migrations

    async def ensure(self, queue: Queue, *, replicas: int = 1, migrate: bool = False) -> Ensured:
        """Create or update the stream and its durables, or return that it needs a migration; with `migrate`, begin it.

        When the status is READY every durable exists, so no reader loses a message that is written from now on. A
        running migration is advanced in any case: every instance can complete it.
        """
        wanted = queue.config(replicas=replicas).validated()
        created = False
        for attempt in range(_ATTEMPTS):
            # A stream that is missing during a migration must not be created as if it were new: check that first.
            try:
                running = await self._migrations.find_running(queue.name)
            except UnreadableRecord as error:
                return await self._use_unchanged(queue, wanted, error)
            if running is not None:
                status = await self._join_migration(queue, replicas)
                if status is not QueueStatus.READY:
                    return Ensured(queue.name, status)
            try:
                found = await self._converge(queue, wanted, created=created)
                in_place = all(difference.in_place for difference in found.differences)
                if found.status is QueueStatus.READY or not migrate or in_place:
                    return found  # an operator sealed a queue that is sealed and matches its declaration
                status = await self._migrations.begin(queue, replicas=replicas)
                if status is not QueueStatus.READY:
                    return dataclasses.replace(found, status=status)
            except UnknownStream:
                if await self._migrations.find_running(queue.name) is None:
                    created = await self._create(wanted) or created
            except (AlreadyExists, UnknownConsumer):
                pass  # another instance was quicker: check again
            await asyncio.sleep(0.01 * attempt)
        raise MigrationNeeded(
            f"queue {queue.name!r}: its stream changes faster than it can be set up",
            fix="are two versions with different catalogues running?",
        )

    async def _join_migration(self, queue: Queue, replicas: int) -> QueueStatus:
        try:
            return await self._migrations.begin(queue, replicas=replicas)
        except PermissionDenied:  # other users may
            return QueueStatus.SEALED_FOR_MIGRATION

    async def _use_unchanged(self, queue: Queue, wanted: StreamConfig, error: UnreadableRecord) -> Ensured:
        """Use a queue that a newer program migrates or has migrated, if it matches its declaration; never change it."""
        try:
            actual = (await self._streams.info(queue.stream)).config
        except UnknownStream:
            raise error from None
        if actual.sealed:
            return Ensured(queue.name, QueueStatus.SEALED_FOR_MIGRATION)
        readers = [await self._reader_differences(queue, reader) for reader in queue.readers]
        if stream_differences(actual, wanted) or any(found is None or found for found in readers):
            raise error
        return Ensured(queue.name, QueueStatus.READY)

    async def _create(self, wanted: StreamConfig) -> bool:
        """Create the stream; an interest stream first with limits retention.

        An interest stream without consumers keeps nothing: a message that is written between the creation of the stream
        and of its durables would be lost. It gets interest retention (in place) when the durables exist.
        """
        first = wanted
        if wanted.retention is Retention.INTEREST:
            first = dataclasses.replace(wanted, retention=Retention.LIMITS)
        try:
            await self._streams.add(first)
        except AlreadyExists:
            return False
        return True

    async def _converge(self, queue: Queue, wanted: StreamConfig, *, created: bool) -> Ensured:
        actual = (await self._streams.info(queue.stream)).config
        differences = stream_differences(actual, wanted)
        if actual.sealed:
            return Ensured(queue.name, QueueStatus.SEALED_FOR_MIGRATION, differences=differences)
        readers = [(reader, await self._reader_differences(queue, reader)) for reader in queue.readers]
        differences += tuple(difference for _, found in readers for difference in found or ())
        if not all(difference.in_place for difference in differences):
            return Ensured(queue.name, QueueStatus.NEEDS_MIGRATION, differences=differences)
        changed = False
        for reader, found in readers:  # durables before the stream: interest retention drops messages without a reader
            if found is None:
                await self._consumers.add(queue.stream, reader.consumer())
                changed = True
            elif found:
                await self._consumers.update(queue.stream, reader.durable, _consumer_changes(reader, found))
                changed = True
        stream_changes = {d.field: d.wanted for d in differences if d.what == "stream"}
        if stream_changes:
            await self._streams.update(queue.stream, stream_changes)
            changed = True
        action = Action.CREATED if created else Action.UPDATED if changed else Action.NOTHING
        return Ensured(queue.name, QueueStatus.READY, action, () if created else differences)

    async def _reader_differences(self, queue: Queue, reader: Reader) -> tuple[Difference, ...] | None:
        """Return how a durable differs; None if it does not exist yet."""
        try:
            actual = (await self._consumers.info(queue.stream, reader.durable)).config
        except UnknownConsumer:
            return None
        return consumer_differences(actual, reader.consumer())


def _consumer_changes(reader: Reader, found: tuple[Difference, ...]) -> dict[str, Any]:
    changes: dict[str, Any] = {d.field: d.wanted for d in found if d.field != "filters"}
    if any(d.field == "filters" for d in found):
        changes |= {"filter_subjects": list(reader.filter_subjects), "filter_subject": ""}
    return changes


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


__all__ = ["Action", "Ensured", "Ensurer", "MigrationAwarePuller", "QueueStatus", "Queues", "connect"]

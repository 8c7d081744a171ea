"""`ensure`: create the stream and the durables of a queue, or bring them to their declaration.

The writer and the readers of a queue call `ensure(queue)` when they start, in any order, from many processes. The rules
(what differs, what can change in place) are pure functions in `migration.plan`; `Ensurer` acts on them until nothing
differs.
"""

import asyncio
import dataclasses
from dataclasses import dataclass
from enum import Enum
from typing import Any

from purveyor.jetstream.config import Retention, StreamConfig
from purveyor.jetstream.consumers import Consumers
from purveyor.jetstream.maintenance import STREAM_PREFIX
from purveyor.jetstream.streams import Streams
from purveyor.model.errors import (
    AlreadyExists,
    MigrationNeeded,
    PermissionDenied,
    UnknownConsumer,
    UnknownStream,
    UnreadableRecord,
)
from purveyor.queues.catalogue import Queue, Reader
from purveyor.queues.migration.migrator import Migrator
from purveyor.queues.migration.plan import Difference, consumer_differences, stream_differences
from purveyor.queues.migration.record import QueueStatus

_ATTEMPTS = 20
_GUIDE = "docs/guides/migration.md"


class Action(Enum):
    """The actions of `ensure`."""

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

"""`ensure(queue)`: what both sides of a queue call when they start, in any order, from many processes at once.

The rules (what differs, what can change in place) are pure functions; `Ensurer` acts on them until nothing differs.
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
from purveyor.queues.config_diff import Difference, consumer_differences, stream_differences
from purveyor.queues.migration.migrator import Migrations
from purveyor.queues.migration.record import QueueStatus

__all__ = ["Action", "Ensured", "Ensurer", "QueueStatus"]

_ATTEMPTS = 20
_GUIDE = "docs/guides/migration.md"


class Action(Enum):
    """What `ensure` did."""

    CREATED = "created"
    UPDATED = "updated"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Ensured:
    """The result: the status, what was done, and what (still, or until now) differed."""

    queue: str
    status: QueueStatus
    action: Action = Action.NOTHING
    differences: tuple[Difference, ...] = ()

    def require_ready(self) -> "Ensured":
        """Itself when READY; MigrationNeeded otherwise."""
        if self.status is QueueStatus.SEALED_FOR_MIGRATION:
            raise MigrationNeeded(
                f"queue {self.queue!r} is sealed for migration",
                fix=f"wait until its readers have drained it; `purveyor queues list` shows more; see {_GUIDE}",
            )
        return self.require_usable()

    def require_usable(self) -> "Ensured":
        """Itself when READY, or when a migration is under way: readers then drain the queue, and writers wait.

        MigrationNeeded if the queue needs one and nobody may begin it.
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

    def __init__(self, streams: Streams, consumers: Consumers, migrations: Migrations) -> None:
        self._streams = streams
        self._consumers = consumers
        self._migrations = migrations

    async def ensure(self, queue: Queue, *, replicas: int = 1, migrate: bool = False) -> Ensured:
        """Create or update the stream and its durables, or say that it needs migration; with `migrate`, begin that.

        When it returns READY every durable exists, so nothing written from now on is lost for its reader. A migration
        that is under way is brought forward in any case: whoever looks can complete it.
        """
        wanted = queue.config(replicas=replicas).checked()
        created = False
        for attempt in range(_ATTEMPTS):
            # Gone in the middle of a migration it must not be made as if it were new: first what is under way.
            try:
                under_way = await self._migrations.under_way(queue.name)
            except UnreadableRecord as error:
                return await self._left_alone(queue, wanted, error)
            if under_way is not None:
                status = await self._take_part(queue, replicas)
                if status is not QueueStatus.READY:
                    return Ensured(queue.name, status)
            try:
                found = await self._converge(queue, wanted, created=created)
                hard = not all(difference.in_place for difference in found.differences)
                if found.status is QueueStatus.READY or not migrate or not hard:
                    return found  # a queue that is sealed and as declared, somebody sealed on purpose
                status = await self._migrations.begin(queue, replicas=replicas)
                if status is not QueueStatus.READY:
                    return dataclasses.replace(found, status=status)
            except UnknownStream:
                if await self._migrations.under_way(queue.name) is None:
                    created = await self._create(wanted) or created
            except (AlreadyExists, UnknownConsumer):
                pass  # somebody else was quicker: look again
            await asyncio.sleep(0.01 * attempt)
        raise MigrationNeeded(
            f"queue {queue.name!r}: its stream changes faster than it can be set up",
            fix="are two versions with different catalogues running?",
        )

    async def _take_part(self, queue: Queue, replicas: int) -> QueueStatus:
        try:
            return await self._migrations.begin(queue, replicas=replicas)
        except PermissionDenied:  # others may
            return QueueStatus.SEALED_FOR_MIGRATION

    async def _left_alone(self, queue: Queue, wanted: StreamConfig, error: UnreadableRecord) -> Ensured:
        """A queue that a newer program migrates or has migrated: used if it is as declared, and not changed."""
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
        """Make the stream; an interest stream first with limits retention.

        An interest stream without consumers keeps nothing: a message written between its creation and that of its
        durables would be gone. It becomes an interest stream (in place) once they are there.
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
        for reader, found in readers:  # durables before the stream: interest retention drops what nobody waits for
            if found is None:
                await self._consumers.add(queue.stream, reader.consumer())
                changed = True
            elif found:
                await self._consumers.update(queue.stream, reader.durable, _consumer_changes(reader, found))
                changed = True
        of_stream = {d.field: d.wanted for d in differences if d.what == "stream"}
        if of_stream:
            await self._streams.update(queue.stream, of_stream)
            changed = True
        action = Action.CREATED if created else Action.UPDATED if changed else Action.NOTHING
        return Ensured(queue.name, QueueStatus.READY, action, () if created else differences)

    async def _reader_differences(self, queue: Queue, reader: Reader) -> tuple[Difference, ...] | None:
        """None when the durable does not exist yet."""
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

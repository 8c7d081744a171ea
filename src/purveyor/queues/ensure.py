"""`ensure(queue)`: what both sides of a queue call when they start, in any order, from many processes at once.

The rules (what differs, what can change in place) are pure functions; `Ensurer` acts on them until nothing differs.
"""

import asyncio
import dataclasses
from dataclasses import dataclass
from enum import Enum
from typing import Any

from purveyor.model.errors import AlreadyExists, MigrationNeeded, UnknownConsumer, UnknownStream
from purveyor.queues.catalogue import Queue, Reader
from purveyor.queues.config import ConsumerConfig, Retention, StreamConfig
from purveyor.queues.consumers import Consumers
from purveyor.queues.streams import Streams

# What the catalogue decides. Limits and everything else an operator has set on the live stream stay as they are.
_STREAM_FIELDS = ("subjects", "retention", "storage", "num_replicas", "allow_direct", "allow_atomic")
_CONSUMER_FIELDS = ("deliver_policy", "ack_policy", "ack_wait", "max_ack_pending", "filters")
_FIXED_CONSUMER_FIELDS = ("deliver_policy", "ack_policy")
_ATTEMPTS = 20


class QueueStatus(Enum):
    """Whether a queue can be used."""

    READY = "ready"
    NEEDS_MIGRATION = "needs migration"
    """It is there in a shape that cannot change in place; nothing was touched."""
    SEALED_FOR_MIGRATION = "sealed for migration"
    """A migration is under way: readers drain it, writers wait."""


class Action(Enum):
    """What `ensure` did."""

    CREATED = "created"
    UPDATED = "updated"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Difference:
    """A setting that is not as declared, and whether it can be changed where it is."""

    what: str
    field: str
    actual: object
    wanted: object
    in_place: bool

    def __str__(self) -> str:
        return f"{self.what} {self.field}: {_show(self.actual)} -> {_show(self.wanted)}"


@dataclass(frozen=True, slots=True)
class Ensured:
    """The result: the status, what was done, and what (still, or until now) differed."""

    queue: str
    status: QueueStatus
    action: Action = Action.NOTHING
    differences: tuple[Difference, ...] = ()

    def require_ready(self) -> "Ensured":
        """Itself when READY; MigrationNeeded otherwise."""
        if self.status is not QueueStatus.READY:
            why = "; ".join(map(str, self.differences or ("the stream is sealed",)))
            raise MigrationNeeded(
                f"queue {self.queue!r}: {self.status.value} ({why})", fix="see the guide to queue migration"
            )
        return self


def stream_differences(actual: StreamConfig, wanted: StreamConfig) -> tuple[Difference, ...]:
    """How a live stream differs from its declaration. Pure.

    Between limits and interest the retention can change in place; to or from a work queue, and the storage, it cannot.
    """
    found = []
    for field in _STREAM_FIELDS:
        have, want = getattr(actual, field), getattr(wanted, field)
        if field == "subjects":
            have, want = tuple(sorted(have)), tuple(sorted(want))
        if have != want:
            in_place = field != "storage" and not (field == "retention" and Retention.WORK_QUEUE in (have, want))
            found.append(Difference("stream", field, have, want, in_place))
    return tuple(found)


def consumer_differences(actual: ConsumerConfig, wanted: ConsumerConfig) -> tuple[Difference, ...]:
    """How a live durable differs from its declaration. Pure."""
    name = f"consumer {wanted.durable_name}"
    return tuple(
        Difference(name, field, getattr(actual, field), getattr(wanted, field), field not in _FIXED_CONSUMER_FIELDS)
        for field in _CONSUMER_FIELDS
        if getattr(actual, field) != getattr(wanted, field)
    )


class Ensurer:
    """Brings queues to their declaration."""

    def __init__(self, streams: Streams, consumers: Consumers) -> None:
        self._streams = streams
        self._consumers = consumers

    async def ensure(self, queue: Queue, *, replicas: int = 1) -> Ensured:
        """Create or update the stream and its durables, or say that it needs migration.

        When it returns READY every durable exists, so nothing written from now on is lost for its reader.
        """
        wanted = queue.config(replicas=replicas).checked()
        created = False
        for attempt in range(_ATTEMPTS):
            try:
                return await self._converge(queue, wanted, created=created)
            except UnknownStream:
                created = await self._create(wanted) or created
            except (AlreadyExists, UnknownConsumer):
                pass  # somebody else was quicker: look again
            await asyncio.sleep(0.01 * attempt)
        raise MigrationNeeded(
            f"queue {queue.name!r}: its stream changes faster than it can be set up",
            fix="are two versions with different catalogues running?",
        )

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


def _show(value: object) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)

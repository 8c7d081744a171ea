"""The record of a migration in the bucket `migrations`: written before the stream is touched, read by every instance.

It holds the settings that sealing destroys and the settings of the new stream, so that any instance can finish, with or
without the catalogue. It does not hold how far the migration is: the stream itself shows that (it exists, is sealed, is
empty, is gone, or is another one), and so it is never out of date.
"""

import dataclasses
from dataclasses import dataclass
from enum import Enum

from purveyor.jetstream.api import Json
from purveyor.jetstream.maintenance import MIGRATION_RECORD, STREAM_PREFIX
from purveyor.model.errors import InvalidInput
from purveyor.model.json_fields import VERSION
from purveyor.queues.migration.plan import Strategy

CONTINUES = "purveyor.continues"
"""The metadata key of a stream with the creation times of the streams that it continues, newest last."""
_MOST_CONTINUED = 8


class QueueStatus(Enum):
    """Whether a queue can be used."""

    READY = "ready"
    NEEDS_MIGRATION = "needs migration"
    """Its stream has settings that cannot change in place; nothing was touched."""
    SEALED_FOR_MIGRATION = "sealed for migration"
    """A migration is running: readers drain the queue, writers wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveLocation:
    """The directory of a snapshot on one machine."""

    host: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One migration of one queue. The field names are those of the stored JSON."""

    queue: str
    stream: str
    strategy: Strategy
    created: str
    """When the old stream was created: distinguishes it from the new one."""
    target: Json
    """All settings of the new stream."""
    durables: tuple[Json, ...]
    """The settings of the durables that the new stream has from its beginning on."""
    keepers: tuple[str, ...] = ()
    """Durables that hold their newest message for good: the migration does not wait for them."""
    last_sequence: int | None = None
    """The last sequence of the old stream; None until the stream is sealed."""
    archive: ArchiveLocation | None = None
    done: bool = False

    @property
    def subjects(self) -> tuple[str, ...]:
        """The subjects of the queue."""
        return tuple(self.target.get("subjects") or ())

    def with_durables(self, durables: tuple[Json, ...]) -> "Record":
        """Return the record with the durables of another instance; known ones stay unchanged."""
        known = {each["durable_name"] for each in self.durables}
        more = tuple(each for each in durables if each["durable_name"] not in known)
        return dataclasses.replace(self, durables=(*self.durables, *more)) if more else self

    def encode(self) -> bytes:
        """Encode it for the bucket."""
        return MIGRATION_RECORD.dump(dataclasses.asdict(self) | {"strategy": self.strategy.value})

    @classmethod
    def decode(cls, data: bytes) -> "Record":
        """Decode it from the bucket; UnreadableRecord if it is damaged or a newer program wrote it."""
        return MIGRATION_RECORD.read(data, cls._build)

    @classmethod
    def _build(cls, given: Json) -> "Record":
        fields = {name: value for name, value in MIGRATION_RECORD.check(given).items() if name != VERSION}
        try:
            archive = fields.pop("archive", None)
            return cls(
                **fields
                | {
                    "strategy": Strategy(fields["strategy"]),
                    "durables": tuple(fields["durables"]),
                    "keepers": tuple(fields["keepers"]),
                    "archive": ArchiveLocation(**archive) if archive else None,
                }
            )
        except (ValueError, TypeError, KeyError) as error:
            raise InvalidInput(repr(error)) from error


def continue_metadata(metadata: dict[str, str] | None, created: str) -> dict[str, str]:
    """Return the metadata of a stream that continues the one created at `created`.

    >>> continue_metadata({"a": "b"}, "2026-01-01T00:00:00Z")
    {'a': 'b', 'purveyor.continues': '2026-01-01T00:00:00Z'}
    """
    before = dict(metadata or {})
    earlier = [each for each in before.get(CONTINUES, "").split() if each != created]
    return before | {CONTINUES: " ".join([*earlier, created][-_MOST_CONTINUED:])}


def lease_key(queue: str) -> str:
    """Return the key of the lease: which instance works on the migration of a queue."""
    return f"lease.{queue}"


def deletion_key(stream: str) -> str:
    """Return the key whose write deletes the stream. It is one token, because the server copies it as one token."""
    return f"delete.{stream}"


def position_key(queue: str, durable: str) -> str:
    """Return the key of the sequence that a reader by position has reached in the sealed stream."""
    return f"position.{queue}.{durable}"


def queue_of(stream: str) -> str | None:
    """Return the queue that a stream belongs to; None for a stream that is no queue.

    >>> queue_of("stream:incoming"), queue_of("ORDERS")
    ('incoming', None)
    """
    return stream.removeprefix(STREAM_PREFIX) if stream.startswith(STREAM_PREFIX) else None

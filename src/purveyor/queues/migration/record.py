"""The record of a migration, in the bucket `migrations`: written before the stream is touched, read by whoever comes.

It holds what sealing would destroy (the settings before) and what the new stream is to be, so that any instance can
finish, with the catalogue or without. How far it is stands nowhere: the stream itself shows it (there, sealed, empty,
gone, or another one), and what shows cannot be out of date.
"""

import dataclasses
from dataclasses import dataclass
from enum import Enum

from purveyor.jetstream.codec import Json
from purveyor.jetstream.maintenance import MIGRATION_RECORD
from purveyor.model.errors import InvalidInput
from purveyor.model.stored_record import VERSION
from purveyor.queues.migration.plan import Strategy

CONTINUES = "purveyor.continues"
"""The key in a stream's metadata with the creation times of the streams that it goes on from, newest last."""
_MOST_CONTINUED = 8


class QueueStatus(Enum):
    """Whether a queue can be used."""

    READY = "ready"
    NEEDS_MIGRATION = "needs migration"
    """It is there in a shape that cannot change in place; nothing was touched."""
    SEALED_FOR_MIGRATION = "sealed for migration"
    """A migration is under way: readers drain it, writers wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """Where a snapshot lies: a directory of one machine."""

    host: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One migration of one queue."""

    queue: str
    stream: str
    strategy: Strategy
    created: str
    """When the old stream was made: what tells it from the new one."""
    target: Json
    """The settings of the new stream, all of them."""
    durables: tuple[Json, ...]
    """The settings of the durables that the new stream has from its beginning on."""
    keepers: tuple[str, ...] = ()
    """Durables that hold their newest message for good: nobody waits for them."""
    last_sequence: int | None = None
    """The last sequence of the old stream, from when it was sealed on."""
    archive: Archive | None = None
    done: bool = False

    @property
    def subjects(self) -> tuple[str, ...]:
        """What the queue takes."""
        return tuple(self.target.get("subjects") or ())

    def joined(self, durables: tuple[Json, ...]) -> "Record":
        """With the durables of one more instance; those that are known stay as they are."""
        known = {each["durable_name"] for each in self.durables}
        more = tuple(each for each in durables if each["durable_name"] not in known)
        return dataclasses.replace(self, durables=(*self.durables, *more)) if more else self

    def encode(self) -> bytes:
        """As it lies in the bucket."""
        return MIGRATION_RECORD.dump(dataclasses.asdict(self) | {"strategy": self.strategy.value})

    @classmethod
    def decode(cls, data: bytes) -> "Record":
        """From the bucket; UnreadableRecord for what is none, or is that of a newer program."""
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
                    "archive": Archive(**archive) if archive else None,
                }
            )
        except (ValueError, TypeError, KeyError) as error:
            raise InvalidInput(repr(error)) from error


def continued(metadata: dict[str, str] | None, created: str) -> dict[str, str]:
    """The metadata of a stream that goes on from the one made at `created`.

    >>> continued({"a": "b"}, "2026-01-01T00:00:00Z")
    {'a': 'b', 'purveyor.continues': '2026-01-01T00:00:00Z'}
    """
    before = dict(metadata or {})
    earlier = [each for each in before.get(CONTINUES, "").split() if each != created]
    return before | {CONTINUES: " ".join([*earlier, created][-_MOST_CONTINUED:])}


def lease_key(queue: str) -> str:
    """Return the key of the lease: which instance works on the migration of a queue."""
    return f"lease.{queue}"


def deletion_key(stream: str) -> str:
    """Return the key whose write deletes the stream. It is one token, because the server carries it over as one."""
    return f"delete.{stream}"


def position_key(queue: str, durable: str) -> str:
    """Return the key of the place that a reader by position has reached in the sealed stream."""
    return f"position.{queue}.{durable}"

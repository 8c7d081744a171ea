"""Read whether a stream is sealed or deleted for a while, because its configuration is being migrated.

A migration writes a record into the bucket `migrations` before it touches the stream. A writer whose message is refused
reads that record: while the migration runs, the writer waits, as it waits for a lost server. This module knows of the
record only what a writer needs; `purveyor.queues.migration` writes it.

Only streams whose names begin with `stream:` are migrated; for any other stream no request is sent. The rules are pure
functions over the stored record: the asynchronous client uses them here, the bulk path in `bulk.publish.session`.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from purveyor.model.errors import NotFound, PermissionDenied, UnreadableRecord
from purveyor.model.json_fields import Json, Kind
from purveyor.model.name_rules import subject_matches

if TYPE_CHECKING:  # an executor that only writes in bulk does not load the asynchronous client
    from purveyor.jetstream.streams import Streams

STREAM_PREFIX: Final = "stream:"
"""The beginning of the name of a stream that can be migrated."""
BUCKET: Final = "migrations"
RECORDS_STREAM: Final = f"KV_{BUCKET}"
"""The stream behind the bucket."""
MIGRATION_RECORD: Final = Kind(
    "record of a migration",
    (
        "queue",
        "stream",
        "strategy",
        "created",
        "target",
        "durables",
        "keepers",
        "last_sequence",
        "archive",
        "done",
    ),
)


def key_subject(key: str) -> str:
    """Return the subject of a key of the bucket."""
    return f"$KV.{BUCKET}.{key}"


def record_key(queue: str) -> str:
    """Return the key of the record of a queue's migration; `*` for those of all queues."""
    return f"record.{queue}"


def record_subject(stream: str) -> str | None:
    """Return the subject of the record of a stream's migration; None for a stream that cannot be migrated."""
    return key_subject(record_key(stream.removeprefix(STREAM_PREFIX))) if stream.startswith(STREAM_PREFIX) else None


ALL_RECORDS: Final = key_subject(record_key("*"))


@dataclass(frozen=True, slots=True)
class MaintenanceNotice:
    """The part of a migration record that a writer needs."""

    stream: str
    subjects: tuple[str, ...]
    done: bool

    @classmethod
    def decode(cls, data: bytes) -> "MaintenanceNotice":
        """Read a migration record; raise UnreadableRecord if a newer version of Purveyor wrote it."""
        return MIGRATION_RECORD.read(data, cls._build)

    @classmethod
    def _build(cls, given: Json) -> "MaintenanceNotice":
        MIGRATION_RECORD.check_version(given)
        target = given.get("target") or {}
        return cls(str(given.get("stream")), tuple(target.get("subjects") or ()), bool(given.get("done")))

    def holds_back(self, subject: str) -> bool:
        """Return whether messages on a subject wait for this migration."""
        return not self.done and any(subject_matches(each, subject) for each in self.subjects)


def is_migration_running(record: bytes) -> bool:
    """Return whether a stored migration record (empty: none) says that the migration runs.

    Return True for a record that this version does not understand: the stream refuses messages for some reason.
    """
    try:
        return bool(record) and not MaintenanceNotice.decode(record).done
    except UnreadableRecord:
        return True


def find_held_stream(record: bytes, subject: str) -> str | None:
    """Return the stream of a migration record, if that migration holds back messages on a subject."""
    try:
        notice = MaintenanceNotice.decode(record) if record else None
    except UnreadableRecord:
        return None
    return notice.stream if notice is not None and notice.holds_back(subject) else None


async def is_under_maintenance(streams: "Streams", stream: str) -> bool:
    """Return whether a stream is being migrated; True for a client that may not read the record."""
    subject = record_subject(stream)
    if subject is None:
        return False
    try:
        return is_migration_running((await streams.get_last(RECORDS_STREAM, subject)).data)
    except NotFound:
        return False
    except PermissionDenied:
        return True


async def find_stream_under_maintenance(streams: "Streams", subject: str) -> str | None:
    """Return the stream that takes a subject once its migration is over; None if no migration holds it back."""
    try:
        for key in await streams.subjects(RECORDS_STREAM, ALL_RECORDS):
            stream = find_held_stream((await streams.get_last(RECORDS_STREAM, key)).data, subject)
            if stream is not None:
                return stream
    except (NotFound, PermissionDenied):
        return None
    return None

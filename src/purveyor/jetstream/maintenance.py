"""Read whether a stream is sealed or removed for a while, because its configuration is being migrated.

A migration writes a record into the bucket `migrations` before it touches the stream. A writer whose message is refused
reads that record: while the migration runs, the writer waits, as it waits for a lost server. This module knows of the
record only what a writer needs; `purveyor.queues.migration` writes it.

Only streams whose names begin with `stream:` are migrated; for any other stream the server is not asked.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from purveyor.model.errors import NotFound, PermissionDenied, UnreadableRecord
from purveyor.model.json_fields import Json
from purveyor.model.name_rules import subject_matches
from purveyor.model.stored_record import Kind

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
    """What a writer needs to know of a migration."""

    stream: str
    subjects: tuple[str, ...]
    done: bool

    @classmethod
    def decode(cls, data: bytes) -> "MaintenanceNotice":
        """Read it from the record of a migration; UnreadableRecord if a newer program wrote that."""
        return MIGRATION_RECORD.read(data, cls._build)

    @classmethod
    def _build(cls, given: Json) -> "MaintenanceNotice":
        MIGRATION_RECORD.check_version(given)
        target = given.get("target") or {}
        return cls(str(given.get("stream")), tuple(target.get("subjects") or ()), bool(given.get("done")))

    def holds_back(self, subject: str) -> bool:
        """Return whether messages on a subject wait for this migration."""
        return not self.done and any(subject_matches(each, subject) for each in self.subjects)


async def is_under_maintenance(streams: "Streams", stream: str) -> bool:
    """Return whether a stream is being migrated.

    A client that may not read the record, or does not understand it, takes a stream that refuses for one that is.
    """
    subject = record_subject(stream)
    if subject is None:
        return False
    try:
        data = (await streams.get_last(RECORDS_STREAM, subject)).data
        return bool(data) and not MaintenanceNotice.decode(data).done
    except NotFound:
        return False
    except (PermissionDenied, UnreadableRecord):
        return True


async def find_stream_under_maintenance(streams: "Streams", subject: str) -> str | None:
    """Return the stream that takes a subject once its migration is over; None if no migration holds it back."""
    try:
        for key in await streams.subjects(RECORDS_STREAM, ALL_RECORDS):
            data = (await streams.get_last(RECORDS_STREAM, key)).data
            notice = _notice(data)
            if notice is not None and notice.holds_back(subject):
                return notice.stream
    except (NotFound, PermissionDenied):
        return None
    return None


def _notice(data: bytes) -> MaintenanceNotice | None:
    try:
        return MaintenanceNotice.decode(data) if data else None
    except UnreadableRecord:
        return None

"""Whether a migration is under way: asked by those who find a stream sealed or gone, and wait if it is."""

from purveyor.model.errors import InvalidInput, NotFound, PermissionDenied
from purveyor.model.names import subject_matches
from purveyor.queues.catalogue import PREFIX
from purveyor.queues.migration.places import STREAM, record_key
from purveyor.queues.migration.places import subject as subject_of
from purveyor.queues.migration.record import Record
from purveyor.queues.streams import Streams


async def find_record(streams: Streams, stream: str) -> Record | None:
    """The record of the last migration of a stream, done or not."""
    if not stream.startswith(PREFIX):
        return None
    try:
        found = await streams.get_last(STREAM, subject_of(record_key(stream.removeprefix(PREFIX))))
        return Record.decode(found.data) if found.data else None
    except (NotFound, InvalidInput):
        return None


async def under_way(streams: Streams, stream: str) -> bool:
    """Whether a stream is being migrated. Who may not ask takes a sealed queue for one that is."""
    try:
        record = await find_record(streams, stream)
    except PermissionDenied:
        return stream.startswith(PREFIX)
    return record is not None and not record.done


async def stream_of(streams: Streams, subject: str) -> str | None:
    """The stream that takes a subject, by the records of migrations under way: for when no stream does."""
    try:
        keys = await streams.subjects(STREAM, subject_of(record_key("*")))
    except (NotFound, PermissionDenied):
        return None
    for key in keys:
        record = await find_record(streams, PREFIX + key.rpartition(".")[2])
        if record is not None and not record.done and any(subject_matches(each, subject) for each in record.subjects):
            return record.stream
    return None

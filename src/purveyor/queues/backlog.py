"""The backlog of the readers of a queue: how many messages, and since when the oldest of them waits.

The oldest stored message does not say that: a durable that keeps its newest message in the queue, such as the receipts
of the transform or of an outbox, holds it there while nothing waits.

Not every program may read messages of internal queues: the API may not. It knows the oldest message of a stream from
the listing. Where that one is kept, it knows only since when a reader has not moved (`FirstSeen`), which is later than
the oldest message or the same.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final, TypeAlias

from purveyor.jetstream.config import ConsumerInfo
from purveyor.jetstream.streams import StreamUsage
from purveyor.model.errors import PermissionDenied, UnknownMessage, UnknownStream
from purveyor.queues.catalogue import LDIF, PREFILL, incoming, keeps_newest
from purveyor.queues.client import Queues

_READ_BY_DURABLES: Final = frozenset({LDIF.stream, incoming().stream, PREFILL.stream})
FirstSeen: TypeAlias = dict[tuple[str, str], tuple[int, datetime]]
"""For each reader that is behind, by stream and durable: its position, and when this program first saw it there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """The backlog of one durable of a stream."""

    stream: str
    durable: str
    position: int
    """It has processed every message up to this sequence."""
    pending: int
    oldest: datetime | None
    """When the server stored the oldest of them; None if there is none, or if this program may not read it."""


async def read_backlogs(
    queues: Queues, usages: Iterable[StreamUsage], first_seen: FirstSeen | None = None
) -> list[Backlog]:
    """Return the backlog of each reader of the internal queues that durables read.

    A program that may not read messages of internal queues passes the same `first_seen` each time.
    """
    found: list[Backlog] = []
    for usage in usages:
        if usage.stream not in _READ_BY_DURABLES:
            continue
        try:
            readers = await queues.consumers.list(usage.stream)
        except UnknownStream:  # removed meanwhile
            continue
        found += [await _backlog(queues, usage, reader) for reader in readers if not keeps_newest(reader.name)]
    return found if first_seen is None else [_remember(each, first_seen) for each in found]


async def unread_since(
    queues: Queues, usages: Iterable[StreamUsage], first_seen: FirstSeen | None = None
) -> Mapping[str, datetime]:
    """Return for each stream with unread messages when the server stored the oldest of them.

    `first_seen`: see `read_backlogs`.
    """
    usages = tuple(usages)
    found = {
        usage.stream: usage.oldest
        for usage in usages
        if usage.stream not in _READ_BY_DURABLES and usage.oldest is not None
    }
    for backlog in await read_backlogs(queues, usages, first_seen):
        if backlog.oldest is not None:
            found[backlog.stream] = min(backlog.oldest, found.get(backlog.stream, backlog.oldest))
    return found


async def _backlog(queues: Queues, usage: StreamUsage, reader: ConsumerInfo) -> Backlog:
    pending, position = reader.num_pending + reader.num_ack_pending, reader.ack_floor.stream_seq
    oldest: datetime | None = None
    if pending and usage.first_sequence > position:
        oldest = usage.oldest
    elif pending:
        try:
            oldest = (await queues.streams.get_next(usage.stream, position + 1)).timestamp
        except (UnknownMessage, UnknownStream):  # processed, or deleted, between the requests
            pending = 0
        except PermissionDenied:
            pass
    return Backlog(stream=usage.stream, durable=reader.name, position=position, pending=pending, oldest=oldest)


def _remember(backlog: Backlog, first_seen: FirstSeen) -> Backlog:
    """Note the position of a reader that is behind, and fill in an unknown age from what was noted before."""
    key = backlog.stream, backlog.durable
    if not backlog.pending:
        first_seen.pop(key, None)
        return backlog
    position, since = first_seen.get(key, (None, None))
    if position != backlog.position or since is None:
        since = datetime.now(UTC)
        first_seen[key] = backlog.position, since
    return backlog if backlog.oldest is not None else replace(backlog, oldest=since)

"""Who has which message of a subscription, how often it was tried, and when it is tried again: the head of its queue.

Read from the book of deliveries and the queue itself; nothing is taken, leased or changed by looking.
"""

import contextlib
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from purveyor.delivery import state_codec
from purveyor.delivery.dead_letters.service import Attempt
from purveyor.delivery.failure_history import log
from purveyor.delivery.push.attempt_log import Attempts
from purveyor.delivery.state import Book, Kind
from purveyor.jetstream.direct_get import Wanted, read_page
from purveyor.jetstream.streams import StoredMessage
from purveyor.model.errors import UnknownKey, UnknownStream, UnreadableRecord
from purveyor.queues.catalogue import subscription_queue
from purveyor.queues.client import Queues
from purveyor.queues.registry import ACKNOWLEDGED, Registered

SHOWN = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempted:
    """A message that waits, and what is known about its delivery."""

    message: StoredMessage
    kind: Kind
    deliveries: int
    instance: str | None = None
    until: datetime | None = None
    """When the lease ends, or the pause before it is tried again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The messages that are first in line, and the whole of the book as numbers."""

    messages: tuple[Attempted, ...] = ()
    acknowledged: int = 0
    """The position last acknowledged; 0: none was."""
    leased: int = 0
    failed: int = 0
    """How many messages that wait have been tried in vain."""


async def read(queues: Queues, found: Registered) -> Head:
    """The head of a subscription's queue."""
    kept = await _book(queues, found)
    queue = subscription_queue(found.name)
    messages: list[Attempted] = []
    for kind in Kind:
        done = kept.done(kind)
        wanted = Wanted(subject=f"{found.name}.{kind.value}", from_sequence=done.floor + 1, count=SHOWN)
        try:
            page = await read_page(queues, queue.stream, wanted)
        except UnknownStream:
            break
        messages += [_attempted(kept, each, kind) for each in page.messages if each.sequence not in done]
    return Head(
        messages=tuple(messages[:SHOWN]),
        acknowledged=kept.position,
        leased=sum(len(lease.sequences) for lease in kept.leases),
        failed=len(kept.tries),
    )


async def _book(queues: Queues, found: Registered) -> Book:
    try:
        entry = await (await queues.bucket(ACKNOWLEDGED)).get(found.name)
        kept = state_codec.decode(entry.value)
    except (UnknownKey, UnreadableRecord):  # of the latter the page tells
        return Book(incarnation=found.incarnation)
    return kept if kept.incarnation == found.incarnation else Book(incarnation=found.incarnation)


def _attempted(kept: Book, message: StoredMessage, kind: Kind) -> Attempted:
    lease, wait = kept.lease_of(message.sequence), kept.waits.get(message.sequence)
    until = lease.until if lease is not None else wait.until if wait is not None else None
    return Attempted(
        message=message,
        kind=kind,
        deliveries=kept.deliveries(message.sequence),
        instance=None if lease is None else lease.instance,
        until=None if until is None else datetime.fromtimestamp(until / 1000, UTC),
    )


async def failed(queues: Queues, found: Registered, sequence: int) -> list[Attempt]:
    """The deliveries of a message that came to nothing, the last ones: what the book tells, and what push has noted."""
    told = log((await _book(queues, found)).ends.get(sequence, ()))
    if found.record.definition.push is not None:
        told += await Attempts(queues).log(found.name, found.incarnation, sequence)
    return [_attempt(each) for each in sorted(told, key=lambda each: str(each.get("time")))]


def _attempt(told: dict[str, Any]) -> Attempt:
    at = None
    with contextlib.suppress(ValueError):
        at = datetime.fromisoformat(str(told.get("time")))
    status = told.get("status")
    return Attempt(
        at,
        status if isinstance(status, int) else None,
        str(told["error"]) if told.get("error") else None,
        str(told["excerpt"]) if told.get("excerpt") else None,
    )

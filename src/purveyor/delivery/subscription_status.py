"""How a subscription stands: how far its queue was written and what waits in it. Every surface reads it here."""

import asyncio
from dataclasses import dataclass

from purveyor.delivery.push.push_problems import Trouble, troubles_of
from purveyor.jetstream.headers import POSITION, number
from purveyor.model.ack_ranges import Acknowledged, Expired
from purveyor.model.errors import UnknownMessage, UnknownStream, UnreadableRecord
from purveyor.queues.catalogue import subscription_queue
from purveyor.queues.client import Queues
from purveyor.queues.registry import Registered, Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """A subscription as registered, and its queue."""

    registered: Registered
    position: int | None
    """The newest event that was written to its queue, as far as one is there or was acknowledged."""
    main: int | None
    """How many live events wait in its queue; None when there is no queue."""
    prefill: int | None
    """How many messages of its prefill wait."""
    retry: int | None
    """How many dead letters that were put back wait."""
    expired: Expired
    """What nobody acknowledged in time."""
    trouble: Trouble | None = None
    """Why it is not pushed, though it should be."""
    unreadable: str | None = None
    """Why what was delivered is not known: this program does not understand the record of it, and delivers nothing."""


async def look(queues: Queues, registry: Registry, found: Registered) -> Overview:
    """How one subscription stands."""
    queue = subscription_queue(found.name)
    main, prefill, retry = queue.subjects
    (book, unreadable), newest, waiting, troubles = await asyncio.gather(
        _book(registry, found),
        _newest(queues, queue.stream, main),
        _waiting(queues, queue.stream),
        troubles_of(queues, [found]),
    )
    positions = [position for position in (book.position if book else 0, newest) if position]
    return Overview(
        registered=found,
        position=max(positions, default=None),
        main=None if waiting is None else waiting.get(main, 0),
        prefill=None if waiting is None else waiting.get(prefill, 0),
        retry=None if waiting is None else waiting.get(retry, 0),
        expired=book.expired if book else Expired(),
        trouble=troubles.get(found.name),
        unreadable=unreadable,
    )


async def backlogs(queues: Queues) -> dict[str, int]:
    """How many messages wait in each queue of the server, by the queue's name."""
    return {info.config.name.removeprefix("stream:"): info.state.messages for info in await queues.streams.list()}


async def _book(registry: Registry, found: Registered) -> tuple[Acknowledged | None, str | None]:
    """What was delivered, or why that is not known."""
    try:
        return await registry.book(found), None
    except UnreadableRecord as error:
        return None, error.message


async def _newest(queues: Queues, stream: str, subject: str) -> int | None:
    try:
        message = await queues.streams.get_last(stream, subject)
    except (UnknownMessage, UnknownStream):
        return None
    return number(message.headers, POSITION)


async def _waiting(queues: Queues, stream: str) -> dict[str, int] | None:
    try:
        return await queues.streams.subjects(stream)
    except UnknownStream:
        return None

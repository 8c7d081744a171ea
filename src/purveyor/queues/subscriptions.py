"""The queue of a subscription, made for one incarnation: a queue that a deleted subscription left is never used again.

Delivery makes it when a subscription is added (`make_queue`) and removes it at the end; a writer that finds it missing
while the subscription is still registered makes it again (`make_queue_again`, without an event loop).

The sequences of one name never begin anew, however often its queue is made: whoever still has a message of an earlier
queue in hand, to acknowledge it or to write behind it, can never mean one of the new queue.
"""

import contextlib
import dataclasses
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

from purveyor.jetstream.address import Address
from purveyor.jetstream.codec import to_wire
from purveyor.jetstream.config import INCARNATION, StreamConfig, StreamInfo
from purveyor.model.errors import AlreadyExists, MigrationNeeded, UnknownStream, UnreadableRecord
from purveyor.queues.catalogue import subscription_queue
from purveyor.queues.sequence_floors import QueueEnds, last_sequence

if TYPE_CHECKING:
    from purveyor.queues.client import Queues

_ATTEMPTS: Final = 20
GAP: Final = 1_000_000
"""Between the sequence that was noted of one queue and the first of the next: more than is written to a queue between
the moment that its end is noted and its removal, by those who do not know that it is to be removed."""


async def make_queue(
    queues: "Queues", name: str, incarnation: str, *, still_ours: Callable[[], Awaitable[object]], replicas: int = 1
) -> None:
    """Make the queue of a subscription; done twice it is the same as once.

    A stream that belongs to an earlier incarnation is removed with what it holds. Just before that `still_ours` is
    asked, which raises if the name has gone to another meanwhile: then the stream is that one's. A stream that belongs
    to nobody is taken over if it is empty, and else refused: its messages are somebody's.
    """
    queue = subscription_queue(name, incarnation)
    ends = await QueueEnds.open(queues, replicas=replicas)
    for _ in range(_ATTEMPTS):
        try:
            info = await queues.streams.info(queue.stream)
        except UnknownStream:
            config = _numbered(queue.config(replicas=replicas), await ends.last(name))
            with contextlib.suppress(AlreadyExists):  # somebody else was quicker: look again
                await queues.streams.add(config)
            continue
        owner = owner_of(info)
        if owner == incarnation:
            (await queues.ensure(queue, replicas=replicas)).require_usable()
            return
        if owner is None:
            _refuse_strange(info)
            metadata = {**(info.config.metadata or {}), INCARNATION: incarnation}
            await queues.streams.update(queue.stream, {"metadata": metadata})
            continue
        await still_ours()
        await _note_end(ends, name, info)
        with contextlib.suppress(UnknownStream):
            await queues.streams.remove(queue.stream)
    raise MigrationNeeded(
        f"the queue of subscription {name!r} changes faster than it can be set up",
        fix="is it added and deleted at once?",
    )


async def remove_queue(queues: "Queues", name: str, incarnation: str) -> None:
    """Remove the queue of a subscription, if it is there and belongs to it, having noted where it ends."""
    stream = subscription_queue(name).stream
    ends = await QueueEnds.open(queues)
    with contextlib.suppress(UnreadableRecord):  # then the queue alone tells where it ends
        known = await ends.last(name)
        if known:  # what is acknowledged, and tells so, is removed soon
            await ends.note(name, known)
    with contextlib.suppress(UnknownStream):
        info = await queues.streams.info(stream)
        if owner_of(info) == incarnation:
            await _note_end(ends, name, info)
            await queues.streams.remove(stream)


def make_queue_again(address: Address, name: str, incarnation: str, *, replicas: int = 1) -> None:
    """Make a queue that is missing, synchronously. For writers that found the subscription still registered."""
    from purveyor.jetstream.bulk.net.api_request import ask  # noqa: PLC0415 - it brings Arrow, which the other side does not need

    config = subscription_queue(name, incarnation).config(replicas=replicas)
    config = _numbered(config, last_sequence(address, name))
    with contextlib.suppress(AlreadyExists):
        ask(address, f"STREAM.CREATE.{config.name}", to_wire(config))


def owner_of(info: StreamInfo) -> str | None:
    """The incarnation that a queue was made for."""
    return (info.config.metadata or {}).get(INCARNATION)


async def queue_owner(queues: "Queues", name: str) -> str | None:
    """The incarnation that the queue of a name was made for; None if there is no queue, or it does not tell."""
    try:
        return owner_of(await queues.streams.info(subscription_queue(name).stream))
    except UnknownStream:
        return None


async def _note_end(ends: QueueEnds, name: str, info: StreamInfo) -> None:
    await ends.note(name, max(info.state.last_seq, (info.config.first_seq or 1) - 1, 1))


def _numbered(config: StreamConfig, known: int) -> StreamConfig:
    """With its first sequence well behind all that are known of its name; 1 if none is."""
    return dataclasses.replace(config, first_seq=known + GAP) if known else config


def _refuse_strange(info: StreamInfo) -> None:
    if info.state.messages:
        raise AlreadyExists(
            f"stream {info.config.name!r} holds {info.state.messages} messages and belongs to no subscription",
            fix=f"choose another name, or remove it: `purveyor stream rm {info.config.name}`",
        )

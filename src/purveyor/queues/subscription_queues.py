"""The queue of a subscription, created for one incarnation: a queue that a deleted subscription left is never reused.

Delivery creates it when a subscription is added (`create_queue`) and removes it at the end (`remove_queue`). A writer
that finds it missing while the subscription is still registered creates it again (`restore_queue`).

The sequences of one name never begin again, however often its queue is created: a process that still holds a message of
an earlier queue, to acknowledge it or to write behind it, can never mean a message of the new queue. So the last
sequence of a queue is written under `<name>.sequence` in the bucket of the registry before the queue is removed, and
never deleted. A queue that an operator removed by hand has no such entry; then the delivery state counts, which has the
last delivered sequence (`model.delivery_state.AckSummary`).
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

from purveyor.jetstream.config import INCARNATION, StreamInfo
from purveyor.jetstream.key_value import Bucket, BucketConfig
from purveyor.model.delivery_state import decode_summary
from purveyor.model.errors import (
    AlreadyExists,
    MigrationNeeded,
    UnknownStream,
    UnreadableRecord,
    WrongRevision,
)
from purveyor.model.json_fields import UPGRADE
from purveyor.model.name_rules import check_subscription_name
from purveyor.queues.catalogue import subscription_queue
from purveyor.queues.registry import ACKNOWLEDGED, SUBSCRIPTIONS

if TYPE_CHECKING:
    from purveyor.queues.client import Queues

_ATTEMPTS: Final = 20
SEQUENCE_GAP: Final = 1_000_000
"""Between the stored last sequence of one queue and the first sequence of the next. More than writers that do not know
of the removal write to a queue between the moment that its last sequence is stored and its removal."""


async def create_queue(
    queues: "Queues", name: str, incarnation: str, *, check_owner: Callable[[], Awaitable[object]], replicas: int = 1
) -> None:
    """Create the queue of a subscription; a second call changes nothing.

    A stream of an earlier incarnation is removed with its messages. Just before that `check_owner` is called, which
    raises if the name belongs to another incarnation by now: then the stream belongs to that one. A stream without an
    incarnation is taken over if it is empty, and refused otherwise: its messages belong to another program.
    """
    queue = subscription_queue(name, incarnation)
    floors = await SequenceFloors.open(queues, replicas=replicas)
    for _ in range(_ATTEMPTS):
        try:
            info = await queues.streams.info(queue.stream)
        except UnknownStream:
            await _create_missing(queues, floors, name, incarnation, replicas)
            continue
        owner = owner_of(info)
        if owner == incarnation:
            (await queues.ensure(queue, replicas=replicas)).require_usable()
            return
        if owner is None:
            _refuse_foreign_messages(info)
            metadata = {**(info.config.metadata or {}), INCARNATION: incarnation}
            await queues.streams.update(queue.stream, {"metadata": metadata})
            continue
        await check_owner()
        await _raise_floor(floors, name, info)
        with contextlib.suppress(UnknownStream):
            await queues.streams.remove(queue.stream)
    raise MigrationNeeded(
        f"the queue of subscription {name!r} changes faster than it can be set up",
        fix="is it added and deleted at once?",
    )


async def restore_queue(queues: "Queues", name: str, incarnation: str, *, replicas: int = 1) -> None:
    """Create a missing queue again; keep one that exists. For a writer whose subscription is still registered."""
    floors = await SequenceFloors.open(queues, replicas=replicas)
    await _create_missing(queues, floors, name, incarnation, replicas)


async def remove_queue(queues: "Queues", name: str, incarnation: str) -> None:
    """Store the last sequence of the queue of a subscription, and remove the queue if it belongs to it."""
    stream = subscription_queue(name).stream
    floors = await SequenceFloors.open(queues)
    with contextlib.suppress(UnreadableRecord):  # then only the queue itself has its last sequence
        known = await floors.last(name)
        if known:  # the delivery state, which may be the only source of it, is removed soon
            await floors.raise_to(name, known)
    with contextlib.suppress(UnknownStream):
        info = await queues.streams.info(stream)
        if owner_of(info) == incarnation:
            await _raise_floor(floors, name, info)
            await queues.streams.remove(stream)


def owner_of(info: StreamInfo) -> str | None:
    """Return the incarnation that a queue was created for."""
    return (info.config.metadata or {}).get(INCARNATION)


async def queue_owner(queues: "Queues", name: str) -> str | None:
    """Return the incarnation that the queue of a name was created for; None without a queue, or if it has none."""
    try:
        return owner_of(await queues.streams.info(subscription_queue(name).stream))
    except UnknownStream:
        return None


class SequenceFloors:
    """For each name, the highest sequence of all queues that it ever had."""

    def __init__(self, subscriptions: Bucket, acknowledged: Bucket) -> None:
        self._subscriptions = subscriptions
        self._acknowledged = acknowledged

    @classmethod
    async def open(cls, queues: "Queues", *, replicas: int = 1) -> "SequenceFloors":
        """Open the buckets that have them, and create those that are missing."""
        wanted = (BucketConfig(name=name, replicas=replicas) for name in (SUBSCRIPTIONS, ACKNOWLEDGED))
        return cls(*[await queues.bucket(config) for config in wanted])

    async def raise_to(self, name: str, last: int) -> None:
        """Store the last sequence of a queue that is about to be removed."""
        key = _floor_key(name)
        while True:
            entry = await self._subscriptions.newest(key)
            if entry is not None and _read_floor(entry.value) >= last:
                return
            with contextlib.suppress(WrongRevision):
                await self._subscriptions.update(key, b"%d" % last, entry.revision if entry is not None else 0)

    async def last(self, name: str) -> int:
        """Return the highest known sequence of all queues of a name; 0 if there is none.

        UnreadableRecord if an entry is not understood: a queue created by guess could use a sequence twice.
        """
        floor, state = await asyncio.gather(
            self._subscriptions.newest(_floor_key(name)), self._acknowledged.newest(name)
        )
        found = 0 if floor is None else _read_floor(floor.value)
        if state is None or not state.value:
            return found
        return max(found, decode_summary(state.value).last_sequence)


async def _create_missing(queues: "Queues", floors: SequenceFloors, name: str, incarnation: str, replicas: int) -> None:
    config = subscription_queue(name, incarnation).config(replicas=replicas)
    known = await floors.last(name)
    if known:
        config = dataclasses.replace(config, first_seq=known + SEQUENCE_GAP)
    with contextlib.suppress(AlreadyExists):  # another process was quicker
        await queues.streams.add(config)


async def _raise_floor(floors: SequenceFloors, name: str, info: StreamInfo) -> None:
    await floors.raise_to(name, max(info.state.last_seq, (info.config.first_seq or 1) - 1, 1))


def _floor_key(name: str) -> str:
    return f"{check_subscription_name(name)}.sequence"


def _read_floor(value: bytes) -> int:
    """Parse a stored floor; 0 for none. Version 1 is the number alone; a later version begins with a letter."""
    if not value:
        return 0
    if not value.isdigit():
        raise UnreadableRecord("the last sequence of a removed queue is no number", fix=UPGRADE)
    return int(value)


def _refuse_foreign_messages(info: StreamInfo) -> None:
    if info.state.messages:
        raise AlreadyExists(
            f"stream {info.config.name!r} holds {info.state.messages} messages and belongs to no subscription",
            fix=f"choose another name, or remove it: `purveyor stream rm {info.config.name}`",
        )

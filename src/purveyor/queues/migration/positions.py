"""Readers by position on a sealed work queue: each says how far it is, and what all have passed is acknowledged.

Such a queue gives a message to one consumer, and refuses a purge while it is sealed. So its own consumers are removed
(the messages stay), and a durable that is sent headers only takes their place: what it is given up to the position that
every reader has passed, is acknowledged.
"""

import contextlib

from purveyor.jetstream.config import ConsumerConfig
from purveyor.jetstream.key_value import Bucket, Services
from purveyor.model.errors import AlreadyExists, UnknownKey
from purveyor.queues.migration.drain import BY_POSITION
from purveyor.queues.migration.record import Record, position_key

_AT_ONCE = 1000


async def passed_by_all(bucket: Bucket, record: Record) -> int:
    """The sequence up to which all readers by position have come; 0 if one of them has not begun."""
    names = [each["durable_name"] for each in record.durables if each["durable_name"] not in record.keepers]
    positions = [await position(bucket, record.queue, name) for name in names]
    return min((each or 0 for each in positions), default=0)


async def position(bucket: Bucket, queue: str, durable: str) -> int | None:
    """How far one reader is; None if it reads otherwise, or not yet."""
    try:
        return int((await bucket.get(position_key(queue, durable))).value)
    except (UnknownKey, ValueError):
        return None


async def acknowledge_up_to(services: Services, stream: str, sequence: int) -> None:
    """Let the sealed stream go of everything up to a sequence. Only for the holder of the lease."""
    for consumer in await services.consumers.every(stream):
        if consumer.name != BY_POSITION:
            await services.consumers.remove(stream, consumer.name)
    with contextlib.suppress(AlreadyExists):
        await services.consumers.add(
            stream, ConsumerConfig(durable_name=BY_POSITION, headers_only=True, max_ack_pending=2 * _AT_ONCE)
        )
    while (await services.streams.info(stream)).state.first_seq <= sequence:
        messages = await services.puller.fetch(stream, BY_POSITION, _AT_ONCE, wait_seconds=0.5)
        done = [message for message in messages if message.sequence <= sequence]
        for message in messages[len(done) :]:
            await message.nak()
        for message in done[:-1]:
            await message.ack()
        if not done:
            return  # in the hands of one that was cut off: they come again
        await done[-1].ack(confirm=True)

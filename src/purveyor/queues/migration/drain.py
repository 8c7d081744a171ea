"""Draining a sealed stream: how its readers read it, which messages no reader can process, and when it is empty.

Readers acknowledge, and the server removes acknowledged messages. That is all, with three exceptions:

- On a work queue a second reader cannot have its own durable, so all readers share the one that exists.
- A message that was delivered as often as its consumer allows is never delivered again: it is parked as a dead letter,
  so that every drain ends.
- Readers by position (Spark queries) do not acknowledge. Each of them reports how far it is. A work queue gives a
  message to one consumer, and refuses a purge while it is sealed. So its own consumers are removed (the messages stay),
  and a durable that receives only headers replaces them: it acknowledges everything up to the position that every
  reader has passed.
"""

import contextlib
import time
from dataclasses import dataclass
from datetime import UTC, datetime

from purveyor.jetstream.config import ConsumerConfig, ConsumerInfo, Retention, StreamInfo
from purveyor.jetstream.consumers import Consumers
from purveyor.jetstream.key_value import Bucket, BucketServices
from purveyor.jetstream.publisher import Expect
from purveyor.jetstream.streams import StoredMessage, Streams
from purveyor.model.errors import AlreadyExists, Unavailable, UnknownConsumer, UnknownKey, UnknownMessage
from purveyor.queues.catalogue import DEAD_LETTERS
from purveyor.queues.dead_letters.letter import DeadLetter, fit_letter
from purveyor.queues.migration.record import Record, position_key

SHARED_DURABLE = "migration"
"""The durable that readers of a sealed work queue share if it had none."""
POSITION_DURABLE = "migration-positions"
"""The durable that acknowledges messages on behalf of readers by position; no reader uses it."""
_PARKED_PER_FETCH = 500
_HEADERS_PER_FETCH = 1000
_REMOVE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class StuckMessages:
    """Messages that no consumer will deliver again, and since when they are stuck."""

    first: int
    messages: int
    since: float


def is_stuck(consumers: "list[ConsumerInfo]") -> bool:
    """Return whether the remaining messages will never be delivered again. Pure.

    Without any consumer no reader has tried yet: then no message is given up.
    """
    return bool(consumers) and not any(each.num_pending or each.num_ack_pending for each in consumers)


def track_stuck(before: StuckMessages | None, info: StreamInfo, now: float) -> StuckMessages:
    """Return the messages that are stuck now, and since when. Pure."""
    state = info.state
    if before is not None and (before.first, before.messages) == (state.first_seq, state.messages):
        return before
    return StuckMessages(state.first_seq, state.messages, now)


async def find_shared_durable(streams: Streams, consumers: Consumers, stream: str) -> str | None:
    """Return the durable that all readers of a sealed work queue share, and create it if the queue has none.

    None if the stream is no sealed work queue, or is read by position.
    """
    info = await streams.info(stream)
    if not info.config.sealed or info.config.retention is not Retention.WORK_QUEUE or not info.state.messages:
        return None
    durables = [each.name for each in await consumers.list_complete(stream) if each.config.durable_name]
    if POSITION_DURABLE in durables:
        return None
    if durables:
        return durables[0]
    try:
        await consumers.add(stream, ConsumerConfig(durable_name=SHARED_DURABLE, max_ack_pending=1))
    except AlreadyExists:
        return None  # another reader creates one at this moment: the caller asks again
    return SHARED_DURABLE


@dataclass(frozen=True, slots=True)
class StuckMessageParker:
    """Moves the stuck messages of a sealed stream to the queue of dead letters."""

    services: BucketServices

    async def park(self, stream: str) -> int:
        """Park and remove all remaining messages; return their number. Only the holder of the lease calls it.

        A crash in between parks some of them again: a dead letter of the same message has the same id.
        """
        consumers = self.services.consumers
        attempts = max((each.config.max_deliver for each in await consumers.list_complete(stream)), default=1)
        parked, next_sequence = 0, 1
        while True:
            try:
                message = await self.services.streams.get_next(stream, next_sequence)
            except UnknownMessage:
                break
            await self._park(message, max(attempts, 1))
            parked, next_sequence = parked + 1, message.sequence + 1
        # Without consumers an interest stream drops everything, and a work queue accepts the consumer that removes it.
        for each in await consumers.list_complete(stream):
            await consumers.remove(stream, each.name)
        if (await self.services.streams.info(stream)).state.messages:
            await consumers.add(stream, ConsumerConfig(durable_name=SHARED_DURABLE, headers_only=True))
            await self._remove_all(stream)
        return parked

    async def _remove_all(self, stream: str) -> None:
        give_up = time.monotonic() + _REMOVE_SECONDS
        while (await self.services.streams.info(stream)).state.messages:
            if time.monotonic() > give_up:
                raise Unavailable(f"parked messages of {stream!r} are not removed", fix="try again")
            try:
                for message in await self.services.puller.fetch(
                    stream, SHARED_DURABLE, _PARKED_PER_FETCH, wait_seconds=0.5
                ):
                    await message.ack(confirm=True)
            except UnknownConsumer:
                return

    async def _park(self, message: StoredMessage, attempts: int) -> None:
        now = datetime.now(UTC)
        letter = DeadLetter(
            reason="it could not be processed, and its queue was migrated",
            origin=message.stream,
            subject=message.subject,
            data=message.data,
            failed_first=message.timestamp or now,
            failed_last=now,
            headers=message.headers,
            position=message.sequence,
            attempts=attempts,
        )
        subject, data, headers = fit_letter(letter, self.services.publisher.max_payload)
        expect = Expect(stream=DEAD_LETTERS.stream)
        await self.services.publisher.publish(subject, data, headers=dict(headers), msg_id=letter.id, expect=expect)


async def lowest_reader_position(bucket: Bucket, record: Record) -> int:
    """Return the sequence that all readers by position have passed; 0 if one of them has not begun."""
    names = [each["durable_name"] for each in record.durables if each["durable_name"] not in record.keepers]
    positions = [await _read_position(bucket, record.queue, name) for name in names]
    return min((each or 0 for each in positions), default=0)


async def _read_position(bucket: Bucket, queue: str, durable: str) -> int | None:
    """Return how far one reader is; None if it does not read by position, or has not begun."""
    try:
        return int((await bucket.get(position_key(queue, durable))).value)
    except (UnknownKey, ValueError):
        return None


async def acknowledge_up_to(services: BucketServices, stream: str, sequence: int) -> None:
    """Remove everything up to a sequence from a sealed work queue. Only the holder of the lease calls it."""
    for consumer in await services.consumers.list_complete(stream):
        if consumer.name != POSITION_DURABLE:
            await services.consumers.remove(stream, consumer.name)
    with contextlib.suppress(AlreadyExists):
        config = ConsumerConfig(
            durable_name=POSITION_DURABLE, headers_only=True, max_ack_pending=2 * _HEADERS_PER_FETCH
        )
        await services.consumers.add(stream, config)
    while (await services.streams.info(stream)).state.first_seq <= sequence:
        messages = await services.puller.fetch(stream, POSITION_DURABLE, _HEADERS_PER_FETCH, wait_seconds=0.5)
        passed = [message for message in messages if message.sequence <= sequence]
        for message in messages[len(passed) :]:
            await message.nak()
        for message in passed[:-1]:
            await message.ack()
        if not passed:
            return  # an instance that was cut off has them: they are delivered again
        await passed[-1].ack(confirm=True)

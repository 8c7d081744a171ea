"""The sealed stream while it is drained: who reads it where, what nobody can process, and when it is empty.

Readers acknowledge, and what is acknowledged goes: nothing else has to be done, with two exceptions. On a work queue a
second reader cannot have a durable of its own, so all share the one that is there. And a message that was delivered as
often as its consumer allows is never delivered again: it is parked as a dead letter, so that every drain ends.
"""

import time
from dataclasses import dataclass
from datetime import UTC, datetime

from purveyor.jetstream.config import ConsumerConfig, ConsumerInfo, Retention, StreamInfo
from purveyor.jetstream.consumers import Consumers
from purveyor.jetstream.key_value import Services
from purveyor.jetstream.publisher import Expect
from purveyor.jetstream.streams import StoredMessage, Streams
from purveyor.model.errors import AlreadyExists, Unavailable, UnknownConsumer, UnknownMessage
from purveyor.queues.catalogue import DEAD_LETTERS
from purveyor.queues.dead_letters.letter import DeadLetter, fitted

SHARED = "migration"
"""The durable that readers of a sealed work queue share where none was there."""
BY_POSITION = "migration-positions"
"""The durable by which what readers by position have all passed is acknowledged; it is for nobody else."""
_AT_ONCE = 500


@dataclass(frozen=True, slots=True)
class Stuck:
    """Messages that nobody waits for and nobody has in hand, as they were first seen."""

    first: int
    messages: int
    since: float


def is_stuck(consumers: "list[ConsumerInfo]") -> bool:
    """Whether what is left will never be delivered again. Pure.

    Without any consumer nobody has tried yet: that is no reason to give up a message.
    """
    return bool(consumers) and not any(each.num_pending or each.num_ack_pending for each in consumers)


def seen_stuck(before: Stuck | None, info: StreamInfo, now: float) -> Stuck:
    """What is stuck now, and since when. Pure."""
    state = info.state
    if before is not None and (before.first, before.messages) == (state.first_seq, state.messages):
        return before
    return Stuck(state.first_seq, state.messages, now)


async def shared_durable(streams: Streams, consumers: Consumers, stream: str) -> str | None:
    """The durable by which all read a sealed work queue; None if it is none, or is read by position."""
    info = await streams.info(stream)
    if not info.config.sealed or info.config.retention is not Retention.WORK_QUEUE or not info.state.messages:
        return None
    there = [each.name for each in await consumers.every(stream) if each.config.durable_name]
    if BY_POSITION in there:
        return None
    if there:
        return there[0]
    try:
        await consumers.add(stream, ConsumerConfig(durable_name=SHARED, max_ack_pending=1))
    except AlreadyExists:
        return None  # somebody else makes one at this moment: look again
    return SHARED


@dataclass(frozen=True, slots=True)
class Parking:
    """Takes what is stuck out of a sealed stream into the queue of dead letters."""

    services: Services

    async def park(self, stream: str) -> int:
        """Park all that is left and remove it; how many. Only for the holder of the lease, when all of it is stuck.

        A crash in between parks some again: a dead letter of the same message has the same id.
        """
        attempts = max((each.config.max_deliver for each in await self.services.consumers.every(stream)), default=1)
        parked, at = 0, 1
        while True:
            try:
                message = await self.services.streams.get_next(stream, at)
            except UnknownMessage:
                break
            await self._park(message, max(attempts, 1))
            parked, at = parked + 1, message.sequence + 1
        # Without consumers an interest stream lets go of all at once, and a work queue takes the one that removes them.
        for each in await self.services.consumers.every(stream):
            await self.services.consumers.remove(stream, each.name)
        if (await self.services.streams.info(stream)).state.messages:
            await self.services.consumers.add(stream, ConsumerConfig(durable_name=SHARED, headers_only=True))
            await self._remove_all(stream)
        return parked

    async def _remove_all(self, stream: str) -> None:
        give_up = time.monotonic() + 60
        while (await self.services.streams.info(stream)).state.messages:
            if time.monotonic() > give_up:
                raise Unavailable(f"parked messages of {stream!r} are not removed", fix="try again")
            try:
                for message in await self.services.puller.fetch(stream, SHARED, _AT_ONCE, wait_seconds=0.5):
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
        subject, data, headers = fitted(letter, self.services.publisher.max_payload)
        expect = Expect(stream=DEAD_LETTERS.stream)
        await self.services.publisher.publish(subject, data, headers=dict(headers), msg_id=letter.id, expect=expect)

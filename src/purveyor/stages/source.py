"""The source of a stage's messages: `Source` is the interface, `QueueSource` reads a durable of an endpoint's queue.

The application passes in any other source (such as the queue of a subscription): stages do not import delivery.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Protocol

from purveyor.jetstream.headers import Headers
from purveyor.jetstream.messages import Message
from purveyor.jetstream.puller import CreditPull
from purveyor.queues.client import Queues
from purveyor.stages.flow import message_identity, read_key


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Incoming:
    """A message that a stage holds."""

    id: str
    """The id in the inbox."""
    former_id: str | None = None
    """The id in the inbox of an older version, if that differs."""
    subject: str
    data: bytes
    headers: Headers
    sequence: int
    deliveries: int
    """The number of this delivery; 1 the first time."""
    stored: datetime
    key: str | None = None
    interactive: bool = False
    origin: Any = None
    """The object by which its source acknowledges it."""


class Source(Protocol):
    """Delivers messages, as many as the stage has room for, and takes their outcomes."""

    @property
    def ack_wait(self) -> timedelta:
        """How long a message stays with this process without an acknowledgement or `extend`."""

    def batches(self) -> AsyncGenerator[list[Incoming]]:
        """Yield messages without end."""

    async def grant(self, count: int) -> None:
        """Allow `count` more messages."""

    async def ack(self, messages: Sequence[Incoming]) -> None:
        """Acknowledge messages: they are handled and never delivered again."""

    async def retry(self, message: Incoming, delay: timedelta) -> None:
        """Have a message delivered again after a delay."""

    async def extend(self, messages: Sequence[Incoming]) -> None:
        """Restart the `ack_wait` of messages: the stage still works on them."""

    async def ack_floor(self) -> int:
        """Return the sequence up to which the source delivers nothing again."""

    async def restart(self) -> None:
        """Have everything that is not acknowledged delivered again, in order: its former holder is gone."""


class QueueSource:
    """A durable of the queue of an endpoint."""

    def __init__(self, queues: Queues, stream: str, durable: str, ack_wait: timedelta, *, chunk: int = 1) -> None:
        self.ack_wait = ack_wait
        self._queues = queues
        self._stream = stream
        self._durable = durable
        self._interactive = durable.endswith("-interactive")
        self._pull = CreditPull(queues, stream, durable, chunk=chunk)

    async def batches(self) -> AsyncGenerator[list[Incoming]]:
        """Yield messages without end."""
        async for messages in self._pull.batches():
            yield [self._incoming(message) for message in messages]

    async def grant(self, count: int) -> None:
        """Allow `count` more messages."""
        await self._pull.grant(count)

    async def ack(self, messages: Sequence[Incoming]) -> None:
        """Acknowledge without confirmation: the broker repeats a lost one's message, and the inbox drops it."""
        for message in messages:
            await message.origin.ack()

    async def retry(self, message: Incoming, delay: timedelta) -> None:
        """Have a message delivered again after a delay."""
        await message.origin.nak(delay=delay)

    async def extend(self, messages: Sequence[Incoming]) -> None:
        """Restart the `ack_wait` of messages."""
        for message in messages:
            await message.origin.in_progress()

    async def ack_floor(self) -> int:
        """Return the acknowledgement floor of the durable."""
        info = await self._queues.consumers.info(self._stream, self._durable)
        return info.ack_floor.stream_seq

    async def restart(self) -> None:
        """Reset the durable to the first message. The queue no longer holds the acknowledged ones."""
        await self._queues.consumers.reset(self._stream, self._durable, 1)

    def _incoming(self, message: Message) -> Incoming:
        delivery = message.delivery
        stamp = f"{delivery.timestamp.timestamp():.6f}"
        return Incoming(
            id=message_identity(message.headers, self._stream, message.sequence, stamp),
            subject=message.subject,
            data=message.data,
            headers=message.headers,
            sequence=message.sequence,
            deliveries=delivery.delivered,
            stored=delivery.timestamp,
            key=read_key(message.headers),
            interactive=self._interactive,
            origin=message,
        )

"""Where the messages of a stage come from: `Source` is what a stage needs of it, `QueueSource` a durable of a queue.

Another source (the queue of a subscription) is handed in from outside: stages do not know delivery.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Protocol

from purveyor.jetstream.credit_pull import CreditPull
from purveyor.jetstream.headers import Headers
from purveyor.jetstream.messages import Message
from purveyor.queues.client import Queues
from purveyor.stages.flow import identity, key_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Incoming:
    """A message in the hands of a stage."""

    id: str
    """By which the inbox knows it."""
    former_id: str | None = None
    """By which an inbox of an older version knows it, if that differs."""
    subject: str
    data: bytes
    headers: Headers
    sequence: int
    deliveries: int
    """Which delivery this is; 1 the first time."""
    stored: datetime
    key: str | None = None
    interactive: bool = False
    origin: Any = None
    """What its source needs to answer it."""


class Source(Protocol):
    """Hands out messages, as many as there is room for, and takes the answers."""

    @property
    def patience(self) -> timedelta:
        """How long a message stays ours without a word."""

    def batches(self) -> AsyncGenerator[list[Incoming]]:
        """Messages without end."""

    async def grant(self, count: int) -> None:
        """There is room for so many more."""

    async def done(self, messages: Sequence[Incoming]) -> None:
        """Handled: never again."""

    async def later(self, message: Incoming, delay: timedelta) -> None:
        """Not now: again after a delay."""

    async def working(self, messages: Sequence[Incoming]) -> None:
        """Still at it."""

    async def floor(self) -> int:
        """The sequence up to which nothing will ever come again."""

    async def restart(self) -> None:
        """Have everything that is not done delivered again, in order: whoever held it is gone."""


class QueueSource:
    """A durable of the queue of an endpoint."""

    def __init__(self, queues: Queues, stream: str, durable: str, patience: timedelta, *, chunk: int = 1) -> None:
        self.patience = patience
        self._queues = queues
        self._stream = stream
        self._durable = durable
        self._interactive = durable.endswith("-interactive")
        self._pull = CreditPull(queues, stream, durable, chunk=chunk)

    async def batches(self) -> AsyncGenerator[list[Incoming]]:
        """See `Source`."""
        async for messages in self._pull.batches():
            yield [self._incoming(message) for message in messages]

    async def grant(self, count: int) -> None:
        """See `Source`."""
        await self._pull.grant(count)

    async def done(self, messages: Sequence[Incoming]) -> None:
        """Without confirmation: what is lost comes again, and the inbox knows it."""
        for message in messages:
            await message.origin.ack()

    async def later(self, message: Incoming, delay: timedelta) -> None:
        """See `Source`."""
        await message.origin.nak(delay=delay)

    async def working(self, messages: Sequence[Incoming]) -> None:
        """See `Source`."""
        for message in messages:
            await message.origin.in_progress()

    async def floor(self) -> int:
        """See `Source`."""
        info = await self._queues.consumers.info(self._stream, self._durable)
        return info.ack_floor.stream_seq

    async def restart(self) -> None:
        """See `Source`. What was acknowledged is not in the queue any more."""
        await self._queues.consumers.reset(self._stream, self._durable, 1)

    def _incoming(self, message: Message) -> Incoming:
        told = message.delivery
        return Incoming(
            id=identity(message.headers, self._stream, message.sequence, f"{told.timestamp.timestamp():.6f}"),
            subject=message.subject,
            data=message.data,
            headers=message.headers,
            sequence=message.sequence,
            deliveries=told.delivered,
            stored=told.timestamp,
            key=key_of(message.headers),
            interactive=self._interactive,
            origin=message,
        )

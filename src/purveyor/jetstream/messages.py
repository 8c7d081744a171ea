"""A delivered message and the words to answer it with."""

import json
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum

from purveyor.jetstream.codec import nanoseconds
from purveyor.jetstream.connection import Answer, Connection
from purveyor.jetstream.headers import Headers
from purveyor.model.errors import InvalidInput, NoAnswer, Unavailable

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Ack(Enum):
    """What a consumer can say about a message. The values are what goes over the wire."""

    DONE = b"+ACK"
    """Handled: never deliver it again."""
    LATER = b"-NAK"
    """Not handled now: deliver it again, after a delay if one is given."""
    WORKING = b"+WPI"
    """Still at it: the wait for an acknowledgement begins anew."""
    NEXT = b"+NXT"
    """Handled, and send the next one."""
    NEVER = b"+TERM"
    """Not handled and never will be: do not deliver it again."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """What the server tells with a delivery, in its reply subject."""

    stream: str
    consumer: str
    delivered: int
    """Which attempt this is; 1 the first time."""
    sequence: int
    consumer_sequence: int
    timestamp: datetime
    pending: int
    """How many messages the consumer still has to deliver after this one."""


def parse_delivery(reply: str) -> Delivery | None:
    """Read `$JS.ACK.[domain.account.]stream.consumer.delivered.sequence.consumer_sequence.ns.pending[.random]`.

    >>> parse_delivery("$JS.ACK.ORDERS.NEW.1.7.3.0.12").sequence
    7
    """
    tokens = reply.split(".")
    if not reply.startswith("$JS.ACK.") or len(tokens) < 9:
        return None
    if len(tokens) >= 11:
        tokens = tokens[:2] + tokens[4:]
    stream, consumer, delivered, sequence, consumer_sequence, nanos, pending = tokens[2:9]
    return Delivery(
        stream=stream,
        consumer=consumer,
        delivered=int(delivered),
        sequence=int(sequence),
        consumer_sequence=int(consumer_sequence),
        timestamp=_EPOCH + timedelta(microseconds=int(nanos) // 1000),
        pending=int(pending),
    )


@dataclass(frozen=True, slots=True)
class Message:
    """A message in the hands of a consumer, to be answered with one of the words of `Ack`."""

    subject: str
    data: bytes
    headers: Headers
    delivery: Delivery
    reply: str
    connection: Connection

    @property
    def sequence(self) -> int:
        """Its sequence in the stream."""
        return self.delivery.sequence

    async def ack(self, *, confirm: bool = False) -> None:
        """Handled. With `confirm`, returns only when the server has taken note: it will never come again."""
        await self.answer(Ack.DONE, confirm=confirm)

    async def nak(self, *, delay: timedelta | None = None, confirm: bool = False) -> None:
        """Not now; deliver it again, at once or after a delay."""
        body = b"" if delay is None else b" " + json.dumps({"delay": nanoseconds(delay)}).encode()
        await self.answer(Ack.LATER, body, confirm=confirm)

    async def in_progress(self, *, confirm: bool = False) -> None:
        """Still working: the acknowledgement wait starts again."""
        await self.answer(Ack.WORKING, confirm=confirm)

    async def term(self, reason: str = "", *, confirm: bool = False) -> None:
        """Give it up for good; the reason shows in the server's advisory."""
        if "\r" in reason or "\n" in reason:
            raise InvalidInput("the reason of a term is one line", fix="drop the line breaks")
        await self.answer(Ack.NEVER, b" " + reason.encode() if reason else b"", confirm=confirm)

    async def ack_next(self, *, wait_seconds: float = 5) -> "Message | None":
        """Handled, and the next message in one round trip; None when there is none within the wait."""
        body = json.dumps({"batch": 1, "expires": int(wait_seconds * 1e9)}).encode()
        # The next message arrives under its own subject, so the shared inbox of requests would not know it.
        inbox = self.connection.new_inbox()
        listening = await self.connection.subscribe(inbox)
        try:
            await self.connection.publish(self.reply, Ack.NEXT.value + b" " + body, reply=inbox)
            answer = await listening.next(wait_seconds + 1)
        finally:
            await listening.close()
        return message_from(answer, self.connection) if answer else None

    async def answer(self, word: Ack, detail: bytes = b"", *, confirm: bool = False) -> None:
        """Say one of the words. A confirmed one is repeated until the server is heard or patience ends."""
        if not confirm:
            await self.connection.publish(self.reply, word.value + detail)
            return
        give_up = time.monotonic() + self.connection.patience_seconds
        while True:
            try:
                await self.connection.wait_connected(max(give_up - time.monotonic(), 0.1))
                answer = await self.connection.request(self.reply, word.value + detail)
            except Unavailable:
                if time.monotonic() > give_up:
                    raise
                continue
            if answer.status == 503:
                raise NoAnswer(
                    f"the {word.name} of message {self.sequence} of {self.delivery.stream!r} reached nobody",
                    fix="the consumer may be gone; the message will come again if it is not",
                )
            return


def message_from(answer: Answer, connection: Connection) -> Message | None:
    """A message of a consumer, or None for anything else (status messages of the server)."""
    delivery = parse_delivery(answer.reply)
    if delivery is None:
        return None
    return Message(answer.subject, answer.data, answer.headers, delivery, answer.reply, connection)

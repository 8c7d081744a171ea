"""A delivered message and its acknowledgements."""

import json
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum

from purveyor.jetstream.config import nanoseconds
from purveyor.jetstream.connection import Connection, RawMessage
from purveyor.jetstream.headers import Headers
from purveyor.model.errors import InvalidInput, NoAnswer, Unavailable

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Ack(Enum):
    """The kinds of acknowledgement. The values go over the wire."""

    ACK = b"+ACK"
    """Processed: never deliver it again."""
    NAK = b"-NAK"
    """Not processed: deliver it again, after a delay if one is given."""
    IN_PROGRESS = b"+WPI"
    """Still being processed: the ack wait starts again."""
    NEXT = b"+NXT"
    """Processed; send the next one."""
    TERM = b"+TERM"
    """Not processed and never will be: do not deliver it again."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """The metadata of a delivery, which the server puts into the reply subject."""

    stream: str
    consumer: str
    delivered: int
    """The number of this delivery; 1 for the first."""
    sequence: int
    consumer_sequence: int
    timestamp: datetime
    pending: int
    """The number of messages that the consumer has to deliver after this one."""


def parse_delivery(reply: str) -> Delivery | None:
    """Parse `$JS.ACK.[domain.account.]stream.consumer.delivered.sequence.consumer_sequence.ns.pending[.random]`.

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
    """A message delivered to a consumer, to be acknowledged with one of the kinds of `Ack`."""

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
        """Acknowledge as processed. With `confirm`, wait for the server: it will never deliver the message again."""
        await self.respond(Ack.ACK, confirm=confirm)

    async def nak(self, *, delay: timedelta | None = None, confirm: bool = False) -> None:
        """Ask for another delivery, at once or after a delay."""
        body = b"" if delay is None else b" " + json.dumps({"delay": nanoseconds(delay)}).encode()
        await self.respond(Ack.NAK, body, confirm=confirm)

    async def in_progress(self, *, confirm: bool = False) -> None:
        """Restart the ack wait: the message is still being processed."""
        await self.respond(Ack.IN_PROGRESS, confirm=confirm)

    async def term(self, reason: str = "", *, confirm: bool = False) -> None:
        """Give the message up for good; the server's advisory shows the reason."""
        if "\r" in reason or "\n" in reason:
            raise InvalidInput("the reason of a term must be one line", fix="remove the line breaks")
        await self.respond(Ack.TERM, b" " + reason.encode() if reason else b"", confirm=confirm)

    async def ack_next(self, *, wait_seconds: float = 5) -> "Message | None":
        """Acknowledge, and return the next message in one round trip; None if there is none within the wait."""
        body = json.dumps({"batch": 1, "expires": int(wait_seconds * 1e9)}).encode()
        # The next message arrives on its own subject, so the handlers of requests would not get it.
        inbox = self.connection.new_inbox()
        subscription = await self.connection.subscribe(inbox)
        try:
            await self.connection.publish(self.reply, Ack.NEXT.value + b" " + body, reply=inbox)
            received = await subscription.next(wait_seconds + 1)
        finally:
            await subscription.close()
        return message_from(received, self.connection) if received else None

    async def respond(self, kind: Ack, detail: bytes = b"", *, confirm: bool = False) -> None:
        """Send an acknowledgement. With `confirm`, repeat it until the server replies, up to `patience_seconds`."""
        if not confirm:
            await self.connection.publish(self.reply, kind.value + detail)
            return
        give_up = time.monotonic() + self.connection.patience_seconds
        while True:
            try:
                await self.connection.wait_until_connected(max(give_up - time.monotonic(), 0.1))
                received = await self.connection.request(self.reply, kind.value + detail)
            except Unavailable:
                if time.monotonic() > give_up:
                    raise
                continue
            if received.status == 503:
                raise NoAnswer(
                    f"the {kind.name} of message {self.sequence} of {self.delivery.stream!r} reached no consumer",
                    fix="the consumer may be deleted; if it is not, the message is delivered again",
                )
            return


def message_from(received: RawMessage, connection: Connection) -> Message | None:
    """Return a consumer's message; None for anything else (status messages of the server)."""
    delivery = parse_delivery(received.reply)
    if delivery is None:
        return None
    return Message(received.subject, received.data, received.headers, delivery, received.reply, connection)

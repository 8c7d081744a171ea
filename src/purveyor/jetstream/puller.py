"""Pull messages from a consumer: some at once, an endless loop that survives a lost server, or a pull with credit.

The server's status messages drive it: 100 is a heartbeat, 404 and 408 are the end of a request, 409 a reason why it
ended, 503 means that no server answers for the consumer. A silent request (no message, no heartbeat) is sent again.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from purveyor.jetstream.api import API_PREFIX, NO_RESPONDERS, encode_pull_request
from purveyor.jetstream.connection import Connection, NatsSubscription, RawMessage
from purveyor.jetstream.consumers import Consumers
from purveyor.jetstream.messages import Message, message_from
from purveyor.model.errors import ConfigRefused, InvalidInput, ServerUnavailable, Unavailable, UnknownConsumer
from purveyor.model.name_rules import check_name

if TYPE_CHECKING:
    from purveyor.jetstream.client import JetStream

_HEARTBEAT_SECONDS: Final = 2.0
_SILENCE_SECONDS: Final = 2.5 * _HEARTBEAT_SECONDS
_HEARTBEAT_STATUS: Final = 100
_REQUEST_SECONDS: Final = 30.0
_POLL_SECONDS: Final = 0.5
_PENDING_HEADER: Final = "Nats-Pending-Messages"


@dataclass(frozen=True, slots=True, kw_only=True)
class PullOptions:
    """Options of a pull loop: at most `batch` messages are requested; `max_bytes` limits one request in bytes."""

    batch: int = 100
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise InvalidInput(f"a batch of {self.batch} messages", fix="give 1 or more")


class Puller:
    """Pulls messages over one connection; each loop has its own inbox."""

    def __init__(self, connection: Connection, consumers: Consumers) -> None:
        self._connection = connection
        self._consumers = consumers

    async def fetch(self, stream: str, consumer: str, count: int = 1, *, wait_seconds: float = 5) -> list[Message]:
        """Return up to `count` messages, fewer after `wait_seconds`; 0 does not wait for new messages."""
        PullOptions(batch=count)
        await self._consumers.info(stream, consumer)  # raise for an unknown consumer instead of waiting for nothing
        got: list[Message] = []
        deadline = time.monotonic() + wait_seconds
        request = _Request(self._connection, stream, consumer)
        async with contextlib.aclosing(request):
            await request.open()
            await request.request(count, expires_seconds=wait_seconds)
            while len(got) < count:
                left = deadline - time.monotonic()
                received = await request.next(max(left, 0) + 0.5)
                message = message_from(received, self._connection) if received else None
                if message is not None:
                    got.append(message)
                elif received is None:
                    request.forget_if_lost()
                    break
                elif received.status != _HEARTBEAT_STATUS:
                    raise_for_status(received, stream, consumer)
                    break
        return got

    async def pull(
        self,
        stream: str,
        consumer: str,
        options: PullOptions | None = None,
        *,
        on_idle: Callable[[], Awaitable[None]] | None = None,
    ) -> AsyncGenerator[Message]:
        """Yield messages without end, in the consumer's order; the caller acknowledges each.

        The loop waits for a lost server as long as the caller iterates. It raises UnknownConsumer or UnknownStream when
        the consumer is deleted. Received messages that are not yielded when the loop is closed are nacked. `on_idle` is
        called after half a second without a message.
        """
        options = options or PullOptions()
        await self._consumers.info(stream, consumer)
        request = _Request(self._connection, stream, consumer, max_bytes=options.max_bytes)
        async with contextlib.aclosing(request):
            await request.open()
            while True:
                if request.outstanding <= options.batch // 2:
                    await self._connection.wait_until_connected(float("inf"))
                    await request.request(options.batch - request.outstanding, expires_seconds=_REQUEST_SECONDS)
                received = await request.next(_POLL_SECONDS)
                message = message_from(received, self._connection) if received else None
                if message is not None:
                    yield message
                elif received is None:
                    request.forget_if_lost()
                    if on_idle is not None:
                        await on_idle()
                elif received.status == NO_RESPONDERS:
                    request.outstanding = 0
                    await self._check_consumer_exists(stream, consumer)
                elif received.status != _HEARTBEAT_STATUS:
                    raise_for_status(received, stream, consumer)

    async def _check_consumer_exists(self, stream: str, consumer: str) -> None:
        """Raise if the consumer is deleted; pause if it only has no leader."""
        try:
            await self._consumers.info(stream, consumer)
        except Unavailable:
            return
        await asyncio.sleep(0.1)


class _Request:
    """The open pull requests of one loop and their inbox."""

    def __init__(self, connection: Connection, stream: str, consumer: str, *, max_bytes: int | None = None) -> None:
        self._connection = connection
        check_name(stream, "stream")
        self._subject = f"{API_PREFIX}CONSUMER.MSG.NEXT.{stream}.{check_name(consumer, 'consumer')}"
        self._max_bytes = max_bytes
        self._inbox = connection.new_inbox()
        self._subscription: NatsSubscription | None = None
        self._requested_generation = 0
        self._last_received_at = 0.0
        self.outstanding = 0

    async def open(self) -> None:
        self._subscription = await self._connection.subscribe(self._inbox)

    async def request(self, count: int, *, expires_seconds: float) -> None:
        heartbeat = _HEARTBEAT_SECONDS if expires_seconds > 2 * _HEARTBEAT_SECONDS else None
        body = encode_pull_request(
            count, expires_seconds=expires_seconds, heartbeat_seconds=heartbeat, max_bytes=self._max_bytes
        )
        self.outstanding += count
        self._requested_generation, self._last_received_at = self._connection.generation, time.monotonic()
        await self._connection.publish(self._subject, body, reply=self._inbox)

    async def next(self, timeout_seconds: float) -> RawMessage | None:
        assert self._subscription is not None
        received = await self._subscription.next(timeout_seconds)
        if received is not None:
            self._last_received_at = time.monotonic()
        if received is None or received.status == _HEARTBEAT_STATUS:
            return received
        if received.status:
            self.outstanding = _outstanding_after(received, self.outstanding)
        else:
            self.outstanding = max(self.outstanding - 1, 0)
        return received

    def forget_if_lost(self) -> None:
        """Expect no more messages if the server is lost or missed its heartbeats; raise if it denied the request."""
        self._connection.raise_if_denied(self._subject)
        silent = time.monotonic() - self._last_received_at > _SILENCE_SECONDS
        if silent or self._requested_generation != self._connection.generation:
            self.outstanding = 0

    async def aclose(self) -> None:
        """Unsubscribe, and nack received messages that were not yielded, so that their ack wait need not expire.

        That includes messages that the server sends before it processes the unsubscribe.
        """
        if self._subscription is None:
            return
        await self._subscription.close(in_flight=self.outstanding > 0)
        await _nack_remaining(self._subscription, self._connection)


def _outstanding_after(ended: RawMessage, outstanding: int) -> int:
    """Return how many messages are outstanding after the end of a request; its undelivered ones will not come."""
    undelivered = ended.headers.get(_PENDING_HEADER, (str(outstanding),))[0]
    return max(outstanding - int(undelivered), 0)


async def _nack_remaining(subscription: NatsSubscription, connection: Connection) -> None:
    """Nack the received messages that were not yielded."""
    with contextlib.suppress(ServerUnavailable):
        for received in subscription.drain():
            message = message_from(received, connection)
            if message is not None:
                await message.nak()


def raise_for_status(received: RawMessage, stream: str, consumer: str) -> None:
    """Raise for the end of a request that a new request would meet again; other ends are normal."""
    text = received.block.description.lower()
    if received.status == NO_RESPONDERS:
        raise ServerUnavailable(f"consumer {consumer!r} of {stream!r} does not answer", fix="try again")
    if received.status != 409:
        return
    if "consumer deleted" in text:
        raise UnknownConsumer(f"consumer {consumer!r} of stream {stream!r} was deleted", fix="create it again")
    if "push based" in text or "exceeded max" in text or "bad request" in text:
        raise ConfigRefused(f"pull from {consumer!r} of {stream!r}: {received.block.description}", code=409)


class CreditPull:
    """A pull of one consumer that requests exactly as many messages as the caller has credit for.

    `Puller.pull` requests messages ahead, and their ack wait runs before the caller has them. This class returns every
    message as soon as it arrives, so that the caller can report it as in progress. Iterate over `batches` once, and
    call `grant` from the same event loop.
    """

    def __init__(self, jetstream: "JetStream", stream: str, consumer: str, *, chunk: int = 1) -> None:
        """`chunk` is the credit that must accumulate before another request, unless no request is open."""
        self._jetstream = jetstream
        self._connection = jetstream.connection
        self._stream = check_name(stream, "stream")
        self._consumer = check_name(consumer, "consumer")
        self._chunk = chunk
        self._inbox = jetstream.connection.new_inbox()
        self._subscription: NatsSubscription | None = None
        self._credit = 0
        self._outstanding = 0
        self._requested_generation = 0
        self._last_received_at = 0.0

    async def grant(self, count: int) -> None:
        """Add credit for `count` messages."""
        self._credit += count
        if self._subscription is not None:
            await self._request()

    async def batches(self) -> AsyncGenerator[list[Message]]:
        """Yield messages without end, as they arrive; wait for a lost server.

        Raise UnknownConsumer or UnknownStream when the consumer is deleted. Received messages that are not yielded when
        the loop is closed are nacked.
        """
        await self._jetstream.consumers.info(self._stream, self._consumer)
        self._subscription = await self._connection.subscribe(self._inbox)
        try:
            while True:
                await self._request()
                received = await self._subscription.next(_POLL_SECONDS)
                if received is None:
                    self._forget_if_lost()
                    continue
                self._last_received_at = time.monotonic()
                arrived = [received, *self._subscription.drain()]
                if messages := [message for item in arrived if (message := await self._take(item)) is not None]:
                    yield messages
        finally:
            await self._close()

    async def _request(self) -> None:
        more = self._credit - self._outstanding
        enough = self._outstanding == 0 or more >= self._chunk
        if more > 0 and enough and self._connection.connected:
            self._outstanding += more
            self._requested_generation, self._last_received_at = self._connection.generation, time.monotonic()
            body = encode_pull_request(more, expires_seconds=_REQUEST_SECONDS, heartbeat_seconds=_HEARTBEAT_SECONDS)
            subject = f"{API_PREFIX}CONSUMER.MSG.NEXT.{self._stream}.{self._consumer}"
            with contextlib.suppress(Unavailable):  # requested again after the reconnect
                await self._connection.publish(subject, body, reply=self._inbox)

    async def _take(self, received: RawMessage) -> Message | None:
        message = message_from(received, self._connection)
        if message is not None:
            self._outstanding = max(self._outstanding - 1, 0)
            self._credit -= 1
            return message
        if received.status == NO_RESPONDERS:
            self._outstanding = 0
            with contextlib.suppress(Unavailable):
                await self._jetstream.consumers.info(self._stream, self._consumer)
        elif received.status != _HEARTBEAT_STATUS:
            self._outstanding = _outstanding_after(received, self._outstanding)
            raise_for_status(received, self._stream, self._consumer)
        return None

    def _forget_if_lost(self) -> None:
        silent = time.monotonic() - self._last_received_at > _SILENCE_SECONDS
        if silent or self._requested_generation != self._connection.generation:
            self._outstanding = 0

    async def _close(self) -> None:
        if self._subscription is None:
            return
        subscription, self._subscription = self._subscription, None
        await subscription.close(in_flight=True)
        await _nack_remaining(subscription, self._connection)

"""Pull messages from a consumer: a few at once, or an endless loop that outlives a lost server.

The server's status messages drive it: 100 heartbeat, 404 and 408 the end of a request, 409 a reason why it ended,
503 nobody there. A request that went silent (no message, no heartbeat) is given up and asked again.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass

from purveyor.jetstream.connection import Answer, Connection, Subscription
from purveyor.jetstream.consumers import Consumers
from purveyor.jetstream.messages import Message, message_from
from purveyor.model.errors import ConfigRefused, InvalidInput, ServerUnavailable, Unavailable, UnknownConsumer
from purveyor.model.name_rules import check_name

_HEARTBEAT_SECONDS = 2.0
_REQUEST_SECONDS = 30.0
_TICK_SECONDS = 0.5
_PENDING = "Nats-Pending-Messages"


@dataclass(frozen=True, slots=True, kw_only=True)
class PullOptions:
    """How a pull loop asks: at most `batch` messages outstanding; `max_bytes` bounds one request in bytes."""

    batch: int = 100
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise InvalidInput(f"a batch of {self.batch} messages", fix="1 or more")


class Puller:
    """Pulls for one process; each loop has its own inbox."""

    def __init__(self, connection: Connection, consumers: Consumers) -> None:
        self._connection = connection
        self._consumers = consumers

    async def fetch(self, stream: str, consumer: str, count: int = 1, *, wait_seconds: float = 5) -> list[Message]:
        """Up to `count` messages, as soon as they are there; fewer when the wait is over. 0 waits for nothing."""
        PullOptions(batch=count)
        await self._consumers.info(stream, consumer)  # an unknown one is an error here, not a silence
        got: list[Message] = []
        deadline = time.monotonic() + wait_seconds
        request = _Request(self._connection, stream, consumer)
        async with contextlib.aclosing(request):
            await request.open()
            await request.ask(count, expires_seconds=wait_seconds)
            while len(got) < count:
                left = deadline - time.monotonic()
                answer = await request.next(max(left, 0) + 0.5)
                message = message_from(answer, self._connection) if answer else None
                if message is not None:
                    got.append(message)
                elif answer is None:
                    request.give_up_if_lost()
                    break
                elif answer.status != 100:
                    _raise_for(answer, stream, consumer)
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
        """Messages without end, in the consumer's order; each is to be answered by the caller.

        A lost server is waited for as long as the caller goes on asking. Raises UnknownConsumer or UnknownStream when
        the consumer is deleted. Messages received and not yet given out when the loop is closed are handed back.
        `on_idle` is called when there was nothing for half a second.
        """
        options = options or PullOptions()
        await self._consumers.info(stream, consumer)
        request = _Request(self._connection, stream, consumer, max_bytes=options.max_bytes)
        async with contextlib.aclosing(request):
            await request.open()
            while True:
                if request.outstanding <= options.batch // 2:
                    await self._connection.wait_connected(float("inf"))
                    await request.ask(options.batch - request.outstanding, expires_seconds=_REQUEST_SECONDS)
                answer = await request.next(_TICK_SECONDS)
                message = message_from(answer, self._connection) if answer else None
                if message is not None:
                    yield message
                elif answer is None:
                    request.give_up_if_lost()
                    if on_idle is not None:
                        await on_idle()
                elif answer.status == 503:
                    request.outstanding = 0
                    await self._check_there(stream, consumer)
                elif answer.status != 100:
                    _raise_for(answer, stream, consumer)

    async def _check_there(self, stream: str, consumer: str) -> None:
        """Nobody took the request: an error if the consumer is gone, a wait if only its leader is."""
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
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{check_name(consumer, 'consumer')}"
        self._max_bytes = max_bytes
        self._inbox = connection.new_inbox()
        self._listening: Subscription | None = None
        self._asked_on = 0
        self._heard_at = 0.0
        self.outstanding = 0

    async def open(self) -> None:
        self._listening = await self._connection.subscribe(self._inbox)

    async def ask(self, count: int, *, expires_seconds: float) -> None:
        body: dict[str, object] = {"batch": count}
        if expires_seconds > 0:
            body["expires"] = int(expires_seconds * 1e9)
            if expires_seconds > 2 * _HEARTBEAT_SECONDS:
                body["idle_heartbeat"] = int(_HEARTBEAT_SECONDS * 1e9)
        else:
            body["no_wait"] = True
        if self._max_bytes:
            body["max_bytes"] = self._max_bytes
        self.outstanding += count
        self._asked_on, self._heard_at = self._connection.generation, time.monotonic()
        await self._connection.publish(self._subject, json.dumps(body).encode(), reply=self._inbox)

    async def next(self, timeout_seconds: float) -> Answer | None:
        assert self._listening is not None
        answer = await self._listening.next(timeout_seconds)
        if answer is not None:
            self._heard_at = time.monotonic()
        if answer is None or answer.status == 100:
            return answer
        if answer.status:  # the end of a request: what it did not deliver will not come
            undelivered = answer.headers.get(_PENDING, (str(self.outstanding),))[0]
            self.outstanding = max(self.outstanding - int(undelivered), 0)
        else:
            self.outstanding = max(self.outstanding - 1, 0)
        return answer

    def give_up_if_lost(self) -> None:
        """Expect nothing more when the server we asked is gone, or has missed its heartbeats; it may have refused."""
        self._connection.raise_if_denied(self._subject)
        silent = time.monotonic() - self._heard_at > 2.5 * _HEARTBEAT_SECONDS
        if silent or self._asked_on != self._connection.generation:
            self.outstanding = 0

    async def aclose(self) -> None:
        """Stop listening, and give back what came and was not given out, instead of letting its ack wait run out.

        That includes what the server sends before it hears of the end.
        """
        if self._listening is None:
            return
        await self._listening.close(in_flight=self.outstanding > 0)
        with contextlib.suppress(ServerUnavailable):
            for answer in self._listening.drain():
                message = message_from(answer, self._connection)
                if message is not None:
                    await message.nak()


def _raise_for(answer: Answer, stream: str, consumer: str) -> None:
    """A 409 that will not go away by asking again is an error; every other end of a request is not."""
    text = answer.block.description.lower()
    if answer.status == 503:
        raise ServerUnavailable(f"consumer {consumer!r} of {stream!r} does not answer", fix="try again")
    if answer.status != 409:
        return
    if "consumer deleted" in text:
        raise UnknownConsumer(f"consumer {consumer!r} of stream {stream!r} was deleted", fix="make it again")
    if "push based" in text or "exceeded max" in text or "bad request" in text:
        raise ConfigRefused(f"pull from {consumer!r} of {stream!r}: {answer.block.description}", code=409)

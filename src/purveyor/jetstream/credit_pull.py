"""Pull with credit: a consumer gets exactly as many messages as it said it has room for, and no more lie about unseen.

What `pull` asks for ahead is nobody's until it is taken, while its acknowledgement wait runs. Here whatever has arrived
is handed over at once, so that its holder can say that it is being worked on; many at once cost less than one by one.
"""

import contextlib
import json
import time
from collections.abc import AsyncGenerator
from typing import Final

from purveyor.jetstream.client import JetStream
from purveyor.jetstream.connection import Answer, Subscription
from purveyor.jetstream.messages import Message, message_from
from purveyor.jetstream.puller import _raise_for
from purveyor.model.errors import ServerUnavailable, Unavailable
from purveyor.model.name_rules import check_name

_REQUEST_SECONDS: Final = 30.0
_HEARTBEAT_SECONDS: Final = 2.0
_TICK_SECONDS: Final = 0.5
_PENDING: Final = "Nats-Pending-Messages"


class CreditPull:
    """The messages of one consumer; see the module. One loop over `batches`; `grant` from the same event loop."""

    def __init__(self, jetstream: JetStream, stream: str, consumer: str, *, chunk: int = 1) -> None:
        """`chunk` is how much credit has to come together for another request, unless none is open."""
        self._jetstream = jetstream
        self._connection = jetstream.connection
        self._stream = check_name(stream, "stream")
        self._consumer = check_name(consumer, "consumer")
        self._chunk = chunk
        self._inbox = jetstream.connection.new_inbox()
        self._listening: Subscription | None = None
        self._credit = 0
        self._outstanding = 0
        self._asked_on = 0
        self._heard_at = 0.0

    async def grant(self, count: int) -> None:
        """There is room for so many more."""
        self._credit += count
        if self._listening is not None:
            await self._ask()

    async def batches(self) -> AsyncGenerator[list[Message]]:
        """Messages without end, as they come. A lost server is waited for.

        UnknownConsumer or UnknownStream when the consumer is deleted. What came and was not given out when the loop is
        closed is handed back.
        """
        await self._jetstream.consumers.info(self._stream, self._consumer)
        self._listening = await self._connection.subscribe(self._inbox)
        try:
            while True:
                await self._ask()
                answer = await self._listening.next(_TICK_SECONDS)
                if answer is None:
                    self._give_up_if_lost()
                    continue
                self._heard_at = time.monotonic()
                arrived = [answer, *self._listening.drain()]
                if messages := [message for item in arrived if (message := await self._heard(item)) is not None]:
                    yield messages
        finally:
            await self._close()

    async def _ask(self) -> None:
        more = self._credit - self._outstanding
        enough = self._outstanding == 0 or more >= self._chunk
        if more > 0 and enough and self._connection.connected:
            self._outstanding += more
            self._asked_on, self._heard_at = self._connection.generation, time.monotonic()
            wait = {"expires": int(_REQUEST_SECONDS * 1e9), "idle_heartbeat": int(_HEARTBEAT_SECONDS * 1e9)}
            subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._consumer}"
            with contextlib.suppress(Unavailable):  # asked again when the connection is back
                await self._connection.publish(subject, json.dumps({"batch": more, **wait}).encode(), reply=self._inbox)

    async def _heard(self, answer: Answer) -> Message | None:
        message = message_from(answer, self._connection)
        if message is not None:
            self._outstanding = max(self._outstanding - 1, 0)
            self._credit -= 1
            return message
        if answer.status == 503:
            self._outstanding = 0
            with contextlib.suppress(Unavailable):
                await self._jetstream.consumers.info(self._stream, self._consumer)
        elif answer.status != 100:  # the end of a request: what it did not deliver will not come
            undelivered = answer.headers.get(_PENDING, (str(self._outstanding),))[0]
            self._outstanding = max(self._outstanding - int(undelivered), 0)
            _raise_for(answer, self._stream, self._consumer)
        return None

    def _give_up_if_lost(self) -> None:
        silent = time.monotonic() - self._heard_at > 2.5 * _HEARTBEAT_SECONDS
        if silent or self._asked_on != self._connection.generation:
            self._outstanding = 0

    async def _close(self) -> None:
        if self._listening is None:
            return
        listening, self._listening = self._listening, None
        await listening.close(in_flight=True)
        with contextlib.suppress(ServerUnavailable):
            for answer in listening.drain():
                message = message_from(answer, self._connection)
                if message is not None:
                    await message.nak()

"""`Stages.ask`: a flow whose reply comes back to a future in this process.

The last stage stores the reply in the queue `stage-replies` like any message. This process subscribes to the subjects
of its replies and gets them at once; after a lost connection it looks them up in the queue.
"""

import asyncio
import contextlib
from dataclasses import replace
from typing import Any, Final, TypeVar

from purveyor.jetstream.connection import NatsSubscription
from purveyor.model.errors import NoAnswer, UnknownMessage
from purveyor.queues.catalogue import STAGE_REPLIES
from purveyor.queues.client import Queues
from purveyor.stages.flow import FLOW, Flow, Frame, Outgoing, new_id
from purveyor.stages.handler_types import Target
from purveyor.stages.message_codec import load

R = TypeVar("R")

_LOOKUP_INTERVAL_SECONDS: Final = 2.0


class RequestReply:
    """The open requests of one process and the subject of their replies."""

    def __init__(self, queues: Queues) -> None:
        self._queues = queues
        self._prefix = f"stage-replies.{new_id()}"
        self._waiting: dict[str, asyncio.Future[bytes]] = {}
        self._subscription: NatsSubscription | None = None
        self._task: asyncio.Task[None] | None = None

    async def ask(self, to: Target[Any, R], first: Outgoing, timeout_seconds: float) -> R:
        """Send the first message of a flow, with a frame for this process on its stack, and return the reply."""
        await self._subscribe()
        subject = f"{self._prefix}.{first.id}"
        flow = Flow.from_headers({name: (value,) for name, value in first.headers.items()}, first.id)
        headers = {**first.headers, FLOW: replace(flow, stack=(Frame(subject), *flow.stack)).to_header()}
        reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[subject] = reply
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._queues.publish(first.subject, first.data, headers=headers, msg_id=first.id)
                return load(to.reply, await self._wait(subject, reply))
        except TimeoutError:
            raise NoAnswer(
                f"endpoint {to.name!r} did not reply within {timeout_seconds:g} s to message {first.id}",
                fix="the flow continues; look at `purveyor stages list` and the dead letters",
            ) from None
        finally:
            del self._waiting[subject]

    async def _wait(self, subject: str, reply: "asyncio.Future[bytes]") -> bytes:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOKUP_INTERVAL_SECONDS):
                    return await asyncio.shield(reply)
            with contextlib.suppress(UnknownMessage):
                return (await self._queues.streams.get_last(STAGE_REPLIES.stream, subject)).data

    async def _subscribe(self) -> None:
        if self._task is None:
            self._subscription = await self._queues.connection.subscribe(f"{self._prefix}.*", confirm=True)
            self._task = asyncio.create_task(self._receive(self._subscription))

    async def _receive(self, subscription: NatsSubscription) -> None:
        async for message in subscription:
            waiting = self._waiting.get(message.subject)
            if waiting is not None and not waiting.done():
                waiting.set_result(message.data)

    async def close(self) -> None:
        """End the subscription."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._task
        if self._subscription is not None:
            await self._subscription.close()

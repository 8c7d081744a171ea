"""`ask` at the edge: a flow whose reply comes back to a future in this process.

The reply is stored in the queue `stage-replies` like any message, and heard at once by the one who waits, on a subject
of its own. If it came while the connection was lost, it is looked up there.
"""

import asyncio
import contextlib
from dataclasses import replace
from typing import Any, Final, TypeVar

from purveyor.jetstream.connection import Subscription
from purveyor.model.errors import NoAnswer, UnknownMessage
from purveyor.queues.client import Queues
from purveyor.queues.stage_queues import STAGE_REPLIES
from purveyor.stages.flow import FLOW, Flow, Frame, Outgoing, new_id
from purveyor.stages.handler_types import Target
from purveyor.stages.message_codec import load

R = TypeVar("R")

_LOOK_SECONDS: Final = 2.0


class Asking:
    """The questions of one process and their subject."""

    def __init__(self, queues: Queues) -> None:
        self._queues = queues
        self._prefix = f"stage-replies.{new_id()}"
        self._open: dict[str, asyncio.Future[bytes]] = {}
        self._listening: Subscription | None = None
        self._task: asyncio.Task[None] | None = None

    async def ask(self, to: Target[Any, R], opening: Outgoing, timeout_seconds: float) -> R:
        """Send the first message of a flow, with us at the bottom of its stack, and wait for the reply."""
        await self._listen()
        subject = f"{self._prefix}.{opening.id}"
        flow = Flow.from_headers({name: (value,) for name, value in opening.headers.items()}, opening.id)
        going = replace(flow, stack=(Frame(subject), *flow.stack))
        headers = {**opening.headers, FLOW: going.to_header()}
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._open[subject] = answer
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._queues.publish(opening.subject, opening.data, headers=headers, msg_id=opening.id)
                return load(to.reply, await self._wait(subject, answer))
        except TimeoutError:
            raise NoAnswer(
                f"endpoint {to.name!r} did not reply within {timeout_seconds:g} s to message {opening.id}",
                fix="the flow goes on; look at `purveyor stages list` and the dead letters",
            ) from None
        finally:
            del self._open[subject]

    async def _wait(self, subject: str, answer: "asyncio.Future[bytes]") -> bytes:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS):
                    return await asyncio.shield(answer)
            with contextlib.suppress(UnknownMessage):
                return (await self._queues.streams.get_last(STAGE_REPLIES.stream, subject)).data

    async def _listen(self) -> None:
        if self._task is None:
            self._listening = await self._queues.connection.subscribe(f"{self._prefix}.*", confirm=True)
            self._task = asyncio.create_task(self._hear(self._listening))

    async def _hear(self, listening: Subscription) -> None:
        async for message in listening:
            waiting = self._open.get(message.subject)
            if waiting is not None and not waiting.done():
                waiting.set_result(message.data)

    async def close(self) -> None:
        """Stop listening."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._task
        if self._listening is not None:
            await self._listening.close()

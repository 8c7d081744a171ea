"""What a connection hears on one subject, as it comes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from nats import errors as nats_errors
from nats.aio.msg import Msg

from purveyor.jetstream.nats_client import Answer, answer_of
from purveyor.model.errors import PurveyorError

_FLUSH_SECONDS = 10
"""How long to wait for what the server has sent before it hears that listening ends."""


class Subscription:
    """Messages of one subject as they come; survives a reconnect."""

    def __init__(self, closed_error: Callable[[], PurveyorError], inner: Any) -> None:
        self._closed_error = closed_error
        self._inner = inner

    async def next(self, timeout_seconds: float) -> Answer | None:
        """The next message, or None when the time is over."""
        task = asyncio.current_task()
        cancelled = task.cancelling() if task is not None else 0
        try:
            answer = answer_of(await self._inner.next_msg(timeout=max(timeout_seconds, 0.001)))
            if task is not None and task.cancelling() > cancelled:
                # Until Python 3.12 `asyncio.wait_for` swallows a cancellation that comes together with a message.
                raise asyncio.CancelledError
            return answer  # noqa: TRY300 - the errors below are those of the first line
        except nats_errors.TimeoutError:
            return None
        except nats_errors.ConnectionClosedError as error:
            if task is not None and task.cancelling() > cancelled:
                raise asyncio.CancelledError from error  # nats-py takes it for the end of the connection
            raise self._closed_error() from error

    async def __aiter__(self) -> AsyncIterator[Answer]:
        while True:
            message = await self.next(3600)
            if message is not None:
                yield message

    def drain(self) -> list[Answer]:
        """What arrived and nobody took."""
        arrived: list[Answer] = []
        queue: asyncio.Queue[Msg] = self._inner._pending_queue  # noqa: SLF001 - nats-py has no public way
        while not queue.empty():
            message = queue.get_nowait()
            self._inner._pending_size -= len(message.data)  # noqa: SLF001 - else nats-py takes us for slow some day
            arrived.append(answer_of(message))
        return arrived

    async def close(self, *, in_flight: bool = False) -> None:
        """Stop listening. With `in_flight`, messages that the server has sent by then still arrive, for `drain`."""
        with contextlib.suppress(nats_errors.Error):
            if in_flight and self._inner._conn.is_connected:  # noqa: SLF001 - nats-py can only throw them away
                await self._inner._conn._send_unsubscribe(self._inner._id)  # noqa: SLF001
                await self._inner._conn.flush(_FLUSH_SECONDS)  # noqa: SLF001
        with contextlib.suppress(nats_errors.Error):
            await self._inner.unsubscribe()

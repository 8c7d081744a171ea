"""A consumer of one subscription: it fetches messages, hands them out, and gives back what it does not finish."""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any, Final, Self

from purveyor.client.api_client import Http, authorization
from purveyor.client.consumer_messages import Batch, Message
from purveyor.client.consumer_options import MOST_AT_ONCE, ConsumerOptions
from purveyor.client.lease_keeper import Hand
from purveyor.model.delivery_policy import DEFAULT_LEASE_SECONDS
from purveyor.model.errors import (
    InvalidInput,
    LeaseLost,
    NotFound,
    PrefillFailed,
    Refused,
    Unavailable,
    UnknownSubscription,
)

Handler = Callable[[Message], Awaitable[object]]
_log = logging.getLogger("purveyor.client")
_STOP_SECONDS: Final = 5.0


class Consumer:
    """Messages of a subscription, one after the other, as in the example; many at once; or by a function.

    >>> async with Consumer("http://127.0.0.1:7777", "ox", password="secret") as consumer:  # doctest: +SKIP
    ...     async for message in consumer:
    ...         print(message.topic, message.new)
    ...         await message.ack()

    Many at once are `batches`, a function is for `run`. While the API is away it is waited for; a login that is not
    accepted is `AuthenticationFailed`, a prefill that failed is `PrefillFailed`. What was fetched and not settled when
    the block ends is given back.
    """

    def __init__(
        self,
        url: str,
        subscription: str,
        *,
        password: str | None = None,
        token: str | None = None,
        options: ConsumerOptions | None = None,
    ) -> None:
        self.subscription = subscription
        self.options = options or ConsumerOptions()
        self._http = Http(url, subscription, authorization(subscription, password, token), self.options)
        self._stopping = asyncio.Event()
        self._changed = asyncio.Event()
        self._ready: deque[Message] = deque()
        self._hand: Hand | None = None
        self._fetching = asyncio.Lock()
        self._most = self.options.batch
        self._few = self._most // 2

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        try:
            about = await self._ask(self._http.call("GET"))
        except BaseException:
            await self._http.__aexit__(None, None, None)
            raise
        self._hand = Hand(
            http=self._http,
            lease_seconds=self.options.lease_seconds or about.get("lease_seconds") or DEFAULT_LEASE_SECONDS,
            patience_seconds=self.options.patience_seconds,
            ordered=_is_ordered(about),
            changed=self._changed.set,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        hand, self._hand = self._hand, None
        if hand is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(hand.give_back(), _STOP_SECONDS)
            hand.close()
        await self._http.__aexit__(kind, error, trace)

    def stop(self) -> None:
        """Fetch nothing more: loops end when what they have at hand is done. For signal handlers, say."""
        self._stopping.set()
        self._changed.set()

    async def __aiter__(self) -> AsyncIterator[Message]:
        """Messages until `stop`.

        The next ones are fetched when those before are settled, or half of them in parallel delivery: one that is
        forgotten holds up all.
        """
        while (message := await self._next()) is not None:
            yield message

    async def batches(self) -> AsyncIterator[Batch]:
        """Messages as they were fetched, many at once. The next batch comes when the last is settled."""
        hand = self._open()
        while not self._stopping.is_set():
            messages = await self._fetch(self.options.batch)
            if messages:
                yield Batch(messages, hand)
                await self._until(lambda: not len(hand))

    async def run(self, handler: Handler, *, concurrency: int = 1) -> None:
        """Call a function for each message until `stop`, for several at once in parallel delivery.

        Its return acknowledges the message, unless it said itself what became of it; an exception of it is logged, and
        the message delivered again by the policy of the subscription. Returns when those under way are done.
        """
        if concurrency < 1:
            raise InvalidInput(f"{concurrency} at once", fix="give 1 or more")
        if concurrency > 1 and self._open().ordered:
            raise InvalidInput(
                f"subscription {self.subscription!r} is ordered: its messages are handled one after the other",
                fix="use a concurrency of 1, or make the subscription parallel",
            )
        self._most = min(max(self._most, concurrency), MOST_AT_ONCE)
        self._few = self._most - 1  # who asks is idle: what the others have is no reason to wait
        tasks = [asyncio.create_task(self._work(handler)) for _ in range(concurrency)]
        try:
            await asyncio.gather(*tasks)  # and no TaskGroup: what goes wrong is to be raised as it is
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self, handler: Handler) -> None:
        while (message := await self._next()) is not None:
            try:
                await handler(message)
                told = message.ack
            except Exception:  # noqa: BLE001 - whatever a handler raises, it has not handled the message
                _log.exception("message %d was not handled, it is to be delivered again", message.sequence)
                told = message.retry
            try:
                if not message.settled:
                    await told()
            except (LeaseLost, Unavailable) as error:
                _log.warning("message %d will be delivered again: %s", message.sequence, error)
                self._open().lose([message])

    async def _next(self) -> Message | None:
        """The next message; None when it is time to stop."""
        while not self._stopping.is_set():
            async with self._fetching:
                message = self._from_hand()
                if message is None and not self._stopping.is_set():
                    hand = self._open()
                    few = 0 if hand.ordered else self._few
                    await self._until(lambda hand=hand, few=few: len(hand) <= few)  # type: ignore[misc]
                    self._ready += await self._fetch(self._most - len(hand))
                    message = self._from_hand()
            if message is not None:
                return message
        return None

    def _from_hand(self) -> Message | None:
        """One that was fetched before; not if it was given back or lost meanwhile."""
        while self._ready and not self._stopping.is_set():
            message = self._ready.popleft()
            if not message.settled and not message.lost:
                return message
        return None

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait until enough is settled, or it is time to stop; say so if that takes long."""
        hand = self._open()
        while not condition() and not self._stopping.is_set():
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), hand.lease_seconds)
            except TimeoutError:
                _log.warning("%d messages wait to be acknowledged or given back before more are fetched", len(hand))

    async def _fetch(self, most: int) -> list[Message]:
        """Messages as soon as there are any; none when it is time to stop."""
        hand, wait = self._open(), self.options.wait_seconds
        if self._stopping.is_set():
            return []
        body = {"max": max(most, 1), "lease_seconds": hand.lease_seconds, "timeout": wait}
        asking = asyncio.ensure_future(self._ask(self._http.call("POST", "messages/lease", body, wait_seconds=wait)))
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait((asking, stopping), return_when=asyncio.FIRST_COMPLETED)
            # Stopped while it waits, the API sees that nobody is there, and gives the messages to others.
            return hand.take(asking.result()) if asking.done() else []
        finally:
            for task in (asking, stopping):
                task.cancel()
            await asyncio.gather(asking, stopping, return_exceptions=True)

    async def _ask(self, asking: Awaitable[Any]) -> Any:
        try:
            return await asking
        except NotFound as error:
            raise UnknownSubscription(error.message, fix=error.fix) from error
        except Refused as error:
            if error.code == 409:
                raise PrefillFailed(error.message, fix=error.fix, code=error.code) from error
            raise

    def _open(self) -> Hand:
        if self._hand is None:
            raise InvalidInput("the consumer is not open", fix="use it in `async with Consumer(...) as consumer:`")
        return self._hand


def _is_ordered(about: dict[str, Any]) -> bool:
    order = about.get("order_by")
    return bool(order == "position" if order is not None else about.get("delivery", "ordered") == "ordered")

"""A consumer of one subscription: fetches messages, passes them to the program, gives back the unsettled ones."""

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import quote

from purveyor.client.api_client import ApiAccess, ApiClient, authorization_header
from purveyor.client.leased_messages import Batch, LeaseKeeper, Message
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
_MAX_BATCH: Final = 1000
_MAX_WAIT_SECONDS: Final = 3600.0
_GIVE_BACK_TIMEOUT_SECONDS: Final = 5.0


def new_instance() -> str:
    """Return a name that no other process has: two that shared one would get the same messages."""
    return f"{socket.gethostname()[:100]}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerOptions:
    """Options of a consumer. The defaults suit most programs."""

    instance: str = field(default_factory=new_instance)
    """The name of this consumer among several of one subscription. With a name that a restart repeats, the consumer
    continues at once after a crash; without, it waits until the lease of the crashed one expires."""
    batch: int = 100
    """The largest number of messages in one fetch."""
    lease_seconds: float | None = None
    """The length of a lease, which the consumer extends while the program works; None: as the subscription says."""
    wait_seconds: float = 30.0
    """How long one request waits for messages. The consumer then makes the next one."""
    patience_seconds: float = 60.0
    """How long the API may be unavailable before an acknowledgement fails. Fetching waits without a limit."""
    tls: ssl.SSLContext | None = None
    """For an API with a certificate that the system does not know."""

    def __post_init__(self) -> None:
        if not 0 < len(self.instance) <= 200 or not self.instance.isprintable() or not self.instance.isascii():
            raise InvalidInput(f"invalid instance {self.instance[:40]!r}", fix="use 1 to 200 printable characters")
        if not 1 <= self.batch <= _MAX_BATCH:
            raise InvalidInput(f"a batch of {self.batch} messages", fix=f"give 1 to {_MAX_BATCH}")
        if not 0 < self.wait_seconds <= _MAX_WAIT_SECONDS:
            raise InvalidInput(f"a wait of {self.wait_seconds:g} s", fix=f"give up to {_MAX_WAIT_SECONDS:g}")


class Consumer:
    """The messages of a subscription: one after the other, as in the example; in batches; or passed to a function.

    >>> async with Consumer("http://127.0.0.1:7777", "ox", password="secret") as consumer:  # doctest: +SKIP
    ...     async for message in consumer:
    ...         print(message.topic, message.new)
    ...         await message.ack()

    `batches` yields batches, `run` calls a function. The consumer waits while the API is unavailable. A login that the
    API does not accept is `AuthenticationFailed`, a failed prefill is `PrefillFailed`. At the end of the block the
    consumer gives back the messages that it fetched and that are not settled.
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
        access = ApiAccess(url, authorization_header(subscription, password, token), self.options.tls)
        self._api = ApiClient(
            access,
            base=f"/v1/subscriptions/{quote(subscription, safe='')}",
            headers={"X-Consumer-Instance": self.options.instance},
        )
        self._stopping = asyncio.Event()
        self._changed = asyncio.Event()
        self._fetched: deque[Message] = deque()
        self._leases: LeaseKeeper | None = None
        self._fetching = asyncio.Lock()
        self._max_unsettled = self.options.batch
        self._fetch_below = self._max_unsettled // 2

    async def __aenter__(self) -> Self:
        await self._api.__aenter__()
        try:
            subscription = await _translate_errors(self._api.call("GET"))
        except BaseException:
            await self._api.__aexit__(None, None, None)
            raise
        self._leases = LeaseKeeper(
            api=self._api,
            lease_seconds=self.options.lease_seconds or subscription.get("lease_seconds") or DEFAULT_LEASE_SECONDS,
            patience_seconds=self.options.patience_seconds,
            ordered=_is_ordered(subscription),
            on_change=self._changed.set,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        leases, self._leases = self._leases, None
        if leases is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(leases.give_back(), _GIVE_BACK_TIMEOUT_SECONDS)
            leases.close()
        await self._api.__aexit__(kind, error, trace)

    def stop(self) -> None:
        """Stop fetching: loops end after the message that they work on. Suits a signal handler."""
        self._stopping.set()
        self._changed.set()

    async def __aiter__(self) -> AsyncIterator[Message]:
        """Yield messages until `stop`.

        The consumer fetches the next messages when all of the last are settled, in parallel delivery when half of them
        are: a message that the program forgets to settle blocks the rest.
        """
        while (message := await self._next()) is not None:
            yield message

    async def batches(self) -> AsyncIterator[Batch]:
        """Yield the messages of each fetch. The next fetch begins when the last batch is settled."""
        leases = self._require_open()
        while not self._stopping.is_set():
            messages = await self._fetch(self.options.batch)
            if messages:
                yield Batch(messages, leases)
                await self._wait_until(lambda: not len(leases))

    async def run(self, handler: Handler, *, concurrency: int = 1) -> None:
        """Call a function for each message until `stop`, in parallel delivery for several messages at once.

        When the function returns, the consumer acknowledges the message unless the function settled it. When it raises,
        the consumer logs the error and has the message delivered again by the policy of the subscription. Returns when
        the running calls have ended.
        """
        if concurrency < 1:
            raise InvalidInput(f"a concurrency of {concurrency}", fix="give 1 or more")
        if concurrency > 1 and self._require_open().ordered:
            raise InvalidInput(
                f"subscription {self.subscription!r} is ordered: its messages are handled one after the other",
                fix="use a concurrency of 1, or make the subscription parallel",
            )
        self._max_unsettled = min(max(self._max_unsettled, concurrency), _MAX_BATCH)
        self._fetch_below = self._max_unsettled - 1  # an idle task fetches, even if all other tasks are busy
        tasks = [asyncio.create_task(self._handle_messages(handler)) for _ in range(concurrency)]
        try:
            await asyncio.gather(*tasks)  # no TaskGroup: an error is raised as it is, in no group
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _handle_messages(self, handler: Handler) -> None:
        while (message := await self._next()) is not None:
            try:
                await handler(message)
                settle = message.ack
            except Exception:  # noqa: BLE001 - any error means that the handler has not handled the message
                _log.exception("the handler of message %d failed, the message is delivered again", message.sequence)
                settle = message.retry
            try:
                if not message.settled:
                    await settle()
            except (LeaseLost, Unavailable) as error:
                _log.warning("message %d will be delivered again: %s", message.sequence, error)
                self._require_open().mark_lost([message])

    async def _next(self) -> Message | None:
        """Return the next message, or None after `stop`."""
        while not self._stopping.is_set():
            async with self._fetching:
                message = self._next_fetched()
                if message is None and not self._stopping.is_set():
                    leases = self._require_open()
                    limit = 0 if leases.ordered else self._fetch_below
                    await self._wait_until(lambda leases=leases, limit=limit: len(leases) <= limit)  # type: ignore[misc]
                    self._fetched += await self._fetch(self._max_unsettled - len(leases))
                    message = self._next_fetched()
            if message is not None:
                return message
        return None

    def _next_fetched(self) -> Message | None:
        """Return the next message of an earlier fetch that was neither given back nor lost meanwhile."""
        while self._fetched and not self._stopping.is_set():
            message = self._fetched.popleft()
            if not message.settled and not message.lost:
                return message
        return None

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until enough messages are settled, or for `stop`; log a warning if that takes longer than a lease."""
        leases = self._require_open()
        while not condition() and not self._stopping.is_set():
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), leases.lease_seconds)
            except TimeoutError:
                _log.warning("the consumer fetches no more until %d messages are settled", len(leases))

    async def _fetch(self, limit: int) -> list[Message]:
        """Return up to `limit` messages as soon as there are any; none after `stop`."""
        leases, wait = self._require_open(), self.options.wait_seconds
        if self._stopping.is_set():
            return []
        body = {"max": max(limit, 1), "lease_seconds": leases.lease_seconds, "timeout": wait}
        call = self._api.call("POST", "messages/lease", body, wait_seconds=wait)
        fetching = asyncio.ensure_future(_translate_errors(call))
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait((fetching, stopping), return_when=asyncio.FIRST_COMPLETED)
            # After a stop the API notices the closed connection and gives the messages to other consumers.
            return leases.add(fetching.result()) if fetching.done() else []
        finally:
            for task in (fetching, stopping):
                task.cancel()
            await asyncio.gather(fetching, stopping, return_exceptions=True)

    def _require_open(self) -> LeaseKeeper:
        if self._leases is None:
            raise InvalidInput("the consumer is not open", fix="use it in `async with Consumer(...) as consumer:`")
        return self._leases


async def _translate_errors(call: Awaitable[Any]) -> Any:
    """Await a request; raise the refusals that it has as errors of the subscription."""
    try:
        return await call
    except NotFound as error:
        raise UnknownSubscription(error.message, fix=error.fix) from error
    except Refused as error:
        if error.code == HTTPStatus.CONFLICT:
            raise PrefillFailed(error.message, fix=error.fix, code=error.code) from error
        raise


def _is_ordered(subscription: dict[str, Any]) -> bool:
    order = subscription.get("order_by")
    return bool(order == "position" if order is not None else subscription.get("delivery", "ordered") == "ordered")

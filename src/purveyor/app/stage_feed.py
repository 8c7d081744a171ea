"""A subscription as the source of a stage: a provisioning consumer that is a transactional stage.

Here delivery and stages meet, which do not know each other. An event is leased, goes through the stage by its steps,
and is acknowledged at the end; the inbox knows it by its place in the subscription's queue.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from purveyor.delivery.pull import Delivered, Pull
from purveyor.model.errors import InvalidInput, LeaseLost, UnknownMessage, UnknownStream
from purveyor.model.event import Event
from purveyor.model.tracing import of_headers
from purveyor.queues.catalogue import subscription_queue
from purveyor.queues.client import Queues
from purveyor.queues.headers import POSITION
from purveyor.stages.source import Incoming

_MOST_AT_ONCE: Final = 100
_WAIT_SECONDS: Final = 5.0


class SubscriptionSource:
    """The events of a subscription for a stage that takes `Event`; give it to `Stages.terminator(..., source=...)`.

    With `Retry.in_order` one process works at a time, and all give the same `instance`: to delivery they are one
    consumer, so that who takes over gets at once what its predecessor had. With `Retry.parallel` (and a subscription
    that allows it) each process needs an `instance` of its own.
    """

    def __init__(
        self, queues: Queues, subscription: str, *, instance: str = "stages", lease: timedelta = timedelta(seconds=30)
    ) -> None:
        self.patience = lease
        self._queues = queues
        self._name = subscription
        self._instance = instance
        self._pull = Pull(queues)
        self._credit = 0
        self._out: set[int] = set()
        self._all_answered = asyncio.Event()
        self._all_answered.set()

    async def batches(self) -> AsyncGenerator[list[Incoming]]:
        """Events, the next ones when all before are answered: in ordered delivery the oldest come again until then."""
        self._out.clear()
        self._all_answered.set()
        while True:
            await self._all_answered.wait()
            found = await self._pull.lease(
                self._name,
                self._instance,
                max=max(1, min(self._credit, _MOST_AT_ONCE)),
                lease_seconds=self.patience.total_seconds(),
                timeout=_WAIT_SECONDS,
            )
            if found:
                self._credit -= len(found)
                self._out.update(message.sequence for message in found)
                self._all_answered.clear()
                yield [self._incoming(message) for message in found]

    async def grant(self, count: int) -> None:
        """There is room for so many more."""
        self._credit += count

    async def done(self, messages: Sequence[Incoming]) -> None:
        """Acknowledge them."""
        for message in messages:
            with contextlib.suppress(UnknownMessage):  # acknowledged already, or the subscription is gone
                await self._pull.acknowledge(self._name, message.sequence)
            self._answered(message)

    async def later(self, message: Incoming, delay: timedelta) -> None:
        """Give it again after a delay."""
        with contextlib.suppress(UnknownMessage, LeaseLost):
            seconds = delay.total_seconds()
            await self._pull.retry(self._name, message.sequence, delay=seconds, instance=self._instance)
        self._answered(message)

    async def working(self, messages: Sequence[Incoming]) -> None:
        """Begin their leases anew."""
        leases = {message.origin.lease: message for message in messages}
        for message in leases.values():
            with contextlib.suppress(UnknownMessage, LeaseLost):
                seconds = self.patience.total_seconds()
                await self._pull.extend(self._name, message.sequence, lease_seconds=seconds, instance=self._instance)

    async def floor(self) -> int:
        """What is acknowledged is deleted: below the first message of the queue there is nothing."""
        try:
            info = await self._queues.streams.info(subscription_queue(self._name).stream)
        except UnknownStream:
            return 0
        return info.state.first_seq - 1

    async def restart(self) -> None:
        """Nothing to do: the next lease of this instance begins with the oldest event."""

    async def close(self) -> None:
        """End what is under way."""
        await self._pull.close()

    def _answered(self, message: Incoming) -> None:
        self._out.discard(message.sequence)
        if not self._out:
            self._all_answered.set()

    def _incoming(self, message: Delivered) -> Incoming:
        try:
            key = Event.decode(message.data).object_key
        except InvalidInput:
            key = None  # the stage refuses it, with the reason
        return Incoming(
            id=f"{self._name}:{message.sequence}:{message.position}",
            subject=f"{self._name}.{message.kind.value}",
            data=message.data,
            headers={name: (value,) for name, value in of_headers(message.headers).items()} | _position(message),
            sequence=message.sequence,
            deliveries=message.num_delivered,
            stored=datetime.now(UTC),
            key=key,
            origin=message,
        )


def _position(message: Delivered) -> dict[str, tuple[str, ...]]:
    """Given up and put back, it comes again in its place."""
    return {} if message.position is None else {POSITION: (str(message.position),)}

"""A subscription as the source of a stage: a provisioning consumer that is a transactional stage.

Here delivery and stages meet, which do not know each other. An event is leased, goes through the stage by its steps,
and is acknowledged at the end. The inbox knows it by its place in the subscription's queue and the time at which the
server stored it there: after an older store is put back, the server gives the same places to other events.

The broker may be away for any time. A handled event whose acknowledgement fails is remembered and acknowledged before
the next lease, so that it is not delivered again. After a crash of this process it is, and the inbox turns it away.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from purveyor.delivery.pull import Delivered, Pull
from purveyor.jetstream.headers import POSITION
from purveyor.model.errors import InvalidInput, LeaseLost, Unavailable, UnknownMessage, UnknownStream
from purveyor.model.event import Event
from purveyor.model.tracing import of_headers
from purveyor.queues.catalogue import subscription_queue
from purveyor.queues.client import Queues
from purveyor.stages.source import Incoming

log = logging.getLogger("purveyor.stages")

_MOST_AT_ONCE: Final = 100
_WAIT_SECONDS: Final = 5.0
_PAUSE_SECONDS: Final = 1.0
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


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
        """Leased by this process and not answered, in success or not."""
        self._handled: dict[int, datetime] = {}
        """Handled, and the server has not confirmed the acknowledgement: sequences, and when they were stored."""
        self._all_answered = asyncio.Event()
        self._all_answered.set()

    async def batches(self) -> AsyncGenerator[list[Incoming]]:
        """Events, the next ones when all before are answered: in ordered delivery the oldest come again until then."""
        self._out.clear()
        self._all_answered.set()
        while True:
            await self._all_answered.wait()
            try:
                await self._acknowledge_left_over()
                found = await self._pull.lease(
                    self._name,
                    self._instance,
                    max=max(1, min(self._credit, _MOST_AT_ONCE)),
                    lease_seconds=self.patience.total_seconds(),
                    timeout=_WAIT_SECONDS,
                )
            except Unavailable as error:
                log.warning("the stage of subscription %s waits for the broker: %s", self._name, error)
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            if found:
                self._credit -= len(found)
                self._out.update(message.sequence for message in found)
                self._all_answered.clear()
                yield [self._incoming(message) for message in found]

    async def grant(self, count: int) -> None:
        """There is room for so many more."""
        self._credit += count

    async def done(self, messages: Sequence[Incoming]) -> None:
        """Acknowledge them; those that an Unavailable leaves over, before the next lease."""
        sequences = [message.sequence for message in messages]
        self._handled.update((message.sequence, message.stored) for message in messages)
        try:
            await self._acknowledge(sequences)
        finally:
            self._answered(sequences)

    async def later(self, message: Incoming, delay: timedelta) -> None:
        """Give it again after a delay, or after an Unavailable when its lease is over."""
        try:
            with contextlib.suppress(UnknownMessage, LeaseLost):
                seconds = delay.total_seconds()
                await self._pull.retry(self._name, message.sequence, delay=seconds, instance=self._instance)
        finally:
            self._answered([message.sequence])

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

    async def _acknowledge(self, sequences: Iterable[int]) -> None:
        for sequence in sequences:
            with contextlib.suppress(UnknownMessage):  # acknowledged already, or the subscription is gone
                await self._pull.acknowledge(self._name, sequence)
            self._handled.pop(sequence, None)

    async def _acknowledge_left_over(self) -> None:
        """Acknowledge what was handled before an outage, unless the server came back with an older store.

        Then another event may be in its place.
        """
        for sequence, stored in [*self._handled.items()]:
            try:
                found = await self._queues.streams.get(subscription_queue(self._name).stream, sequence)
            except (UnknownMessage, UnknownStream):
                found = None
            if found is not None and found.timestamp == stored:
                await self._acknowledge([sequence])
            self._handled.pop(sequence, None)

    def _answered(self, sequences: Iterable[int]) -> None:
        self._out.difference_update(sequences)
        if not self._out:
            self._all_answered.set()

    def _incoming(self, message: Delivered) -> Incoming:
        try:
            key = Event.decode(message.data).object_key
        except InvalidInput:
            key = None  # the stage refuses it, with the reason
        place = f"{self._name}:{message.sequence}:{message.position}"
        stored = message.stored or datetime.now(UTC)
        return Incoming(
            id=place if message.stored is None else f"{place}:{(stored - _EPOCH) // timedelta(microseconds=1)}",
            former_id=None if message.stored is None else place,
            subject=f"{self._name}.{message.kind.value}",
            data=message.data,
            headers={name: (value,) for name, value in of_headers(message.headers).items()} | _position(message),
            sequence=message.sequence,
            deliveries=message.num_delivered,
            stored=stored,
            key=key,
            origin=message,
        )


def _position(message: Delivered) -> dict[str, tuple[str, ...]]:
    """Given up and put back, it comes again in its place."""
    return {} if message.position is None else {POSITION: (str(message.position),)}

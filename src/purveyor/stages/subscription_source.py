"""A subscription as the source of a stage: a provisioning consumer that is a transactional stage.

Delivery and stages do not know each other: the source leases by a `SubscriptionPull`, and the program passes in the
pull service of `purveyor.delivery.pull`, which is one. The source leases an event, passes it to the stage, and
acknowledges it at the end. The inbox identifies an event by its sequence in the subscription's queue and the
time at which the server stored it: after an operator restores an older store, the server gives the same sequences to
other events.

The NATS server may be unreachable for any time. The source remembers a handled event whose acknowledgement failed, and
acknowledges it before the next lease, so that it is not delivered again. After a crash of this process it is delivered
again, and the inbox skips it.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, Protocol

from purveyor.jetstream.headers import POSITION, Headers
from purveyor.model.delivery_state import SubjectKind
from purveyor.model.errors import InvalidInput, LeaseLost, Unavailable, UnknownMessage, UnknownStream
from purveyor.model.event import Event
from purveyor.model.tracing import carrier_from_headers
from purveyor.queues.catalogue import subscription_queue
from purveyor.queues.client import Queues
from purveyor.stages.source import Incoming

log = logging.getLogger("purveyor.stages")

_MAX_LEASED: Final = 100
_LONG_POLL_SECONDS: Final = 5.0
_RETRY_SECONDS: Final = 1.0
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class LeasedMessage(Protocol):
    """A message of a subscription that one instance has leased."""

    @property
    def sequence(self) -> int:
        """Its sequence in the queue of the subscription."""

    @property
    def position(self) -> int | None:
        """The position of its event."""

    @property
    def kind(self) -> SubjectKind:
        """The subject that it came on."""

    @property
    def data(self) -> bytes:
        """The event."""

    @property
    def headers(self) -> Headers:
        """Its headers."""

    @property
    def stored(self) -> datetime | None:
        """When the server stored it."""

    @property
    def num_delivered(self) -> int:
        """The number of this delivery."""

    @property
    def lease(self) -> str | None:
        """The lease that it belongs to."""


class SubscriptionPull(Protocol):
    """Leases messages of subscriptions, and takes their outcomes. Raises Unavailable without a server."""

    async def lease(
        self,
        name: str,
        instance: str,
        max: int,  # noqa: A002 - the name in the API
        lease_seconds: float | None,
        timeout: float,  # noqa: ASYNC109 - how long to wait, not when to fail
    ) -> Sequence[LeasedMessage]:
        """Return up to `max` messages as soon as there is one; none after `timeout` seconds."""

    async def acknowledge(self, name: str, sequence: int) -> None:
        """Acknowledge a message; UnknownMessage if it is acknowledged already."""

    async def retry(self, name: str, sequence: int, *, delay: float | None, instance: str) -> None:
        """Deliver a message again after a delay."""

    async def extend(self, name: str, sequence: int, *, lease_seconds: float | None, instance: str) -> object:
        """Restart the lease of a message."""


class SubscriptionSource:
    """The events of a subscription for a stage that takes `Event`; pass it to `Stages.terminator(..., source=...)`.

    >>> async with open_pull(queues) as pull:  # doctest: +SKIP
    ...     source = SubscriptionSource(queues, "ox", pull)

    With `Retry.in_order` one process works at a time, and all use the same `instance`: delivery treats them as one
    consumer, so that the next process gets the leased events of its predecessor at once. With `Retry.parallel` (and a
    subscription that allows it) each process needs its own `instance`.
    """

    def __init__(
        self,
        queues: Queues,
        subscription: str,
        pull: SubscriptionPull,
        *,
        instance: str = "stages",
        lease: timedelta = timedelta(seconds=30),
    ) -> None:
        self.ack_wait = lease
        self._queues = queues
        self._name = subscription
        self._instance = instance
        self._pull = pull
        self._credit = 0
        self._in_flight: set[int] = set()
        """Sequences that this process has leased and not settled."""
        self._unconfirmed: dict[int, datetime] = {}
        """Handled events whose acknowledgement the server has not confirmed: sequence and time of storage."""
        self._all_settled = asyncio.Event()
        self._all_settled.set()

    async def batches(self) -> AsyncGenerator[list[Incoming]]:
        """Yield batches of events, the next one when the last one is settled.

        Before that, ordered delivery would return the same events again.
        """
        self._in_flight.clear()
        self._all_settled.set()
        while True:
            await self._all_settled.wait()
            try:
                await self._acknowledge_unconfirmed()
                found = await self._pull.lease(
                    self._name,
                    self._instance,
                    max(1, min(self._credit, _MAX_LEASED)),
                    self.ack_wait.total_seconds(),
                    _LONG_POLL_SECONDS,
                )
            except Unavailable as error:
                log.warning("the stage of subscription %s waits for the NATS server: %s", self._name, error)
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            if found:
                self._credit -= len(found)
                self._in_flight.update(message.sequence for message in found)
                self._all_settled.clear()
                yield [self._to_incoming(message) for message in found]

    async def grant(self, count: int) -> None:
        """Allow `count` more events."""
        self._credit += count

    async def ack(self, messages: Sequence[Incoming]) -> None:
        """Acknowledge events. Those that fail with Unavailable are acknowledged before the next lease."""
        sequences = [message.sequence for message in messages]
        self._unconfirmed.update((message.sequence, message.stored) for message in messages)
        try:
            await self._acknowledge(sequences)
        finally:
            self._mark_settled(sequences)

    async def retry(self, message: Incoming, delay: timedelta) -> None:
        """Deliver an event again after a delay; after an Unavailable, when its lease expires."""
        try:
            with contextlib.suppress(UnknownMessage, LeaseLost):
                seconds = delay.total_seconds()
                await self._pull.retry(self._name, message.sequence, delay=seconds, instance=self._instance)
        finally:
            self._mark_settled([message.sequence])

    async def extend(self, messages: Sequence[Incoming]) -> None:
        """Extend the leases of events."""
        leases = {message.origin.lease: message for message in messages}
        for message in leases.values():
            with contextlib.suppress(UnknownMessage, LeaseLost):
                seconds = self.ack_wait.total_seconds()
                await self._pull.extend(self._name, message.sequence, lease_seconds=seconds, instance=self._instance)

    async def ack_floor(self) -> int:
        """Return the sequence below the first stored message: the API deletes acknowledged messages."""
        try:
            info = await self._queues.streams.info(subscription_queue(self._name).stream)
        except UnknownStream:
            return 0
        return info.state.first_seq - 1

    async def restart(self) -> None:
        """Do nothing: the next lease of this instance begins with the oldest event."""

    async def _acknowledge(self, sequences: Iterable[int]) -> None:
        for sequence in sequences:
            with contextlib.suppress(UnknownMessage):  # acknowledged already, or the subscription is gone
                await self._pull.acknowledge(self._name, sequence)
            self._unconfirmed.pop(sequence, None)

    async def _acknowledge_unconfirmed(self) -> None:
        """Acknowledge events that were handled before an outage.

        Skip an event if the server came back with an older store: then its sequence may belong to another event.
        """
        for sequence, stored in [*self._unconfirmed.items()]:
            try:
                found = await self._queues.streams.get(subscription_queue(self._name).stream, sequence)
            except (UnknownMessage, UnknownStream):
                found = None
            if found is not None and found.timestamp == stored:
                await self._acknowledge([sequence])
            self._unconfirmed.pop(sequence, None)

    def _mark_settled(self, sequences: Iterable[int]) -> None:
        self._in_flight.difference_update(sequences)
        if not self._in_flight:
            self._all_settled.set()

    def _to_incoming(self, message: LeasedMessage) -> Incoming:
        try:
            key = Event.decode(message.data).object_key
        except InvalidInput:
            key = None  # the stage refuses it and reports the reason
        origin_id = f"{self._name}:{message.sequence}:{message.position}"
        stored = message.stored or datetime.now(UTC)
        return Incoming(
            id=origin_id if message.stored is None else f"{origin_id}:{(stored - _EPOCH) // timedelta(microseconds=1)}",
            former_id=None if message.stored is None else origin_id,
            subject=f"{self._name}.{message.kind.value}",
            data=message.data,
            headers={name: (value,) for name, value in carrier_from_headers(message.headers).items()}
            | _position_header(message),
            sequence=message.sequence,
            deliveries=message.num_delivered,
            stored=stored,
            key=key,
            origin=message,
        )


def _position_header(message: LeasedMessage) -> dict[str, tuple[str, ...]]:
    """Return the position header, so that a dead letter that is put back keeps its position."""
    return {} if message.position is None else {POSITION: (str(message.position),)}

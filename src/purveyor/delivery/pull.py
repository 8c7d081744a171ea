"""Pull: consumers ask for messages and say what became of them. What the HTTP API, push and the CLI stand on.

The rules are in `leases`; whether a subscription is served at all in `gate`; the book and the queue in `desk`. Nothing
here is kept that another process could not do without: any number of them serve the same subscriptions.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Final, Self

from purveyor.delivery import leases
from purveyor.delivery.bells import Bells
from purveyor.delivery.desk import Desk, Step
from purveyor.delivery.desks import Desks
from purveyor.delivery.gate import Gate, is_open
from purveyor.delivery.leases import Acked, Again, Ask, Book, Kind, Lease, Pending, Rules, Taken
from purveyor.delivery.letters import Parking
from purveyor.delivery.window import kind_of, position_of
from purveyor.model.errors import InvalidInput, UnknownMessage, UnknownStream, UnknownSubscription
from purveyor.model.policy import LONGEST_DELAY_SECONDS, OrderBy, check_lease_seconds
from purveyor.queues.catalogue import subscription_queue
from purveyor.queues.client import Queues
from purveyor.queues.headers import Headers
from purveyor.queues.streams import StoredMessage

DEFAULT_INSTANCE: Final = "default"
MOST_AT_ONCE: Final = 1000
LONGEST_WAIT_SECONDS: Final = 3600.0
_LONGEST_INSTANCE: Final = 200
_END: Final = 2**63
"""No sequence is as high."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """A message in the hands of a consumer."""

    sequence: int
    position: int | None
    kind: Kind
    data: bytes
    headers: Headers
    num_delivered: int
    lease: str | None
    """None when it was acknowledged as it was given."""
    until: datetime | None


class Pull:
    """Delivery on request. One per process, on one connection; closed with `close` or as a context manager.

    >>> pull = Pull(queues)  # doctest: +SKIP
    >>> message = await pull.next("ox", timeout=10)  # doctest: +SKIP
    >>> await pull.acknowledge("ox", message.sequence)  # doctest: +SKIP

    Every method raises `UnknownSubscription` if there is none of that name, and an `Unavailable` when the server is
    away for longer than the connection has patience; then nothing is lost, and the same call may be made again.
    """

    def __init__(self, queues: Queues, *, replicas: int = 1, clock: Callable[[], float] = time.time) -> None:
        self._queues = queues
        self._clock = clock
        self._bells = Bells(queues.connection)
        self._gate = Gate(queues, self._bells.ring, replicas=replicas)
        self._desks = Desks(queues, self._gate, self._bells, replicas=replicas)
        self._parking = Parking(queues, replicas=replicas)

    async def next(
        self,
        name: str,
        instance: str = DEFAULT_INSTANCE,
        timeout: float = 0.0,  # noqa: ASYNC109 - the word of the API, and how long to wait, not when to fail
        pop: bool = False,
        looked: bool = False,
    ) -> Delivered | None:
        """The next message for an instance, waited for up to `timeout` seconds; None if there is none.

        With `pop` it is acknowledged at once. With `looked` it is waited for without a look before: the caller has just
        asked without waiting, and got nothing. `PrefillFailed` if nothing will come until somebody acts.
        """
        found = await self._poll(name, _Order(instance=_check_instance(instance), pop=pop, looked=looked), timeout)
        return found[0] if found else None

    async def lease(
        self,
        name: str,
        instance: str = DEFAULT_INSTANCE,
        max: int = 100,  # noqa: A002 - the word of the API
        lease_seconds: float | None = None,
        timeout: float = 0.0,  # noqa: ASYNC109 - as above
    ) -> list[Delivered]:
        """Up to `max` messages, as soon as there is one. In ordered delivery they are the oldest, in their order."""
        if not 1 <= max <= MOST_AT_ONCE:
            raise InvalidInput(f"a lease of {max} messages", fix=f"ask for 1 to {MOST_AT_ONCE}")
        seconds = None if lease_seconds is None else check_lease_seconds(lease_seconds)
        order = _Order(instance=_check_instance(instance), most=max, seconds=seconds)
        return await self._poll(name, order, timeout)

    async def acknowledge(self, name: str, sequence: int) -> None:
        """A message is handled, and never given to anybody again, whoever has it now.

        `UnknownMessage` if it is not there (any more), or was handed out to nobody: an acknowledgement may be a late
        one, meant for a subscription of the same name that was deleted.
        """
        desk = await self._desk(name)
        message = await self._find(desk, sequence)

        def decide(book: Book) -> Step[None]:
            if not book.deliveries(sequence):
                raise _gone(name, sequence)
            return _acknowledged(desk, book, [message])

        await desk.decide(decide)

    async def acknowledge_up_to(self, name: str, sequence: int, *, instance: str = DEFAULT_INSTANCE) -> int:
        """All that an instance has at hand up to a message, in the order of delivery, is handled; how many that is.

        `LeaseLost` if the instance has that message no more.
        """
        desk = await self._desk(name)
        message = await self._find(desk, sequence)
        rules = _rules(desk)

        def decide(book: Book) -> Step[int]:
            if sequence in book.done(message.kind):
                raise _gone(desk.name, sequence)
            if desk.window.find(sequence) is None:
                return Step(value=0, missing=1, empty=True)
            book = leases.expire(book, self._now())
            handed_out = leases.handed_out(book, desk.window.pending(book), sequence, instance, rules)
            # The position of the last one is enough: what lies before it in the queue was written before it.
            acked = [Acked(each.sequence, each.kind, message.position) for each in handed_out]
            return Step(value=len(acked), book=leases.acknowledge(book, acked, desk.window.seen()), acked=acked)

        count = await desk.decide(decide)
        if not count:
            raise _gone(name, sequence)
        return count

    async def retry(
        self, name: str, sequence: int, *, delay: float | None = None, instance: str = DEFAULT_INSTANCE
    ) -> None:
        """A message was not handled: give it again, after a delay in seconds or, without one, after the policy's.

        `LeaseLost` if another instance has it.
        """
        if delay is not None and not 0 <= delay <= LONGEST_DELAY_SECONDS:
            raise InvalidInput(f"a delay of {delay:g} seconds", fix=f"give 0 to {LONGEST_DELAY_SECONDS:g}")
        desk = await self._desk(name)
        await self._find(desk, sequence)
        policy, rules = desk.definition.retry, _rules(desk)

        def decide(book: Book) -> Step[None]:
            now = self._now()
            book = leases.expire(book, now)
            seconds = policy.backoff_seconds(max(book.deliveries(sequence), 1)) if delay is None else delay
            again = Again(instance=instance, now=now, delay=_milliseconds(seconds))
            return Step(value=None, book=leases.retry(book, sequence, again, rules), frees=True)

        await desk.decide(decide)

    async def reject(self, name: str, sequence: int, reason: str, *, instance: str = DEFAULT_INSTANCE) -> None:
        """A message will never be handled: it becomes a dead letter. `LeaseLost` if another instance has it.

        1. It is parked under an id made of where it came from. 2. It is acknowledged. After a crash between the two it
        is given again; parked again within the window of duplicates it is the same dead letter.
        """
        desk = await self._desk(name)
        message = await self._find(desk, sequence)

        def check(book: Book) -> Step[int]:
            book = leases.expire(book, self._now())
            if sequence in book.done(message.kind):
                raise _gone(name, sequence)
            leases.may_give_up(book, sequence, instance)
            return Step(value=book.deliveries(sequence), empty=True)

        deliveries = await desk.decide(check)
        body = await self._read(desk, sequence)
        if body is None:
            raise _gone(name, sequence)
        await self._parking.park(desk, body, reason or "rejected by the consumer", deliveries)
        await desk.decide(lambda book: _acknowledged(desk, book, [message]))

    async def extend(
        self, name: str, sequence: int, *, lease_seconds: float | None = None, instance: str = DEFAULT_INSTANCE
    ) -> datetime:
        """The lease that a message is in, with all its messages, begins anew; until when it goes.

        `LeaseLost` if the instance has it no more.
        """
        desk = await self._desk(name)
        seconds = desk.definition.lease_seconds if lease_seconds is None else check_lease_seconds(lease_seconds)
        length = _milliseconds(seconds)

        def decide(book: Book) -> Step[Lease]:
            longer, lease = leases.extend(book, sequence, instance, self._now(), length)
            return Step(value=lease, book=longer)

        return _moment((await desk.decide(decide)).until)

    def forget(self, name: str) -> None:
        """The subscription was changed by this process: look at the registry before it is served again."""
        self._gate.forget(name)

    async def close(self) -> None:
        """End what is under way: what was acknowledged is removed from the queues."""
        await self._gate.close()
        await self._desks.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _poll(self, name: str, order: "_Order", wait_seconds: float) -> list[Delivered]:
        """Look; if there is nothing, listen, look again, and wait for the bell."""
        if not 0 <= wait_seconds <= LONGEST_WAIT_SECONDS:
            raise InvalidInput(f"a wait of {wait_seconds:g} seconds", fix=f"give 0 to {LONGEST_WAIT_SECONDS:g}")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_seconds
        if not order.looked:
            found, _ = await self._look(name, order)
            if found or wait_seconds <= 0:
                return found
        async with self._bells.waiting(name) as bell:
            while True:
                rung = await bell.arm()
                found, again_at = await self._look(name, order)
                left = deadline - loop.time()
                if found or left <= 0:
                    return found
                if again_at is not None:
                    left = min(left, max((again_at - self._now()) / 1000, 0.001))
                await bell.wait(rung, left)

    async def _look(self, name: str, order: "_Order") -> tuple[list[Delivered], int | None]:
        """What there is for an instance now; or when to look again, if that is known."""
        while True:
            registered = await self._gate.look(name)
            if not is_open(registered):
                return [], None
            desk = await self._desks.of(registered)
            try:
                alike = desk.definition.order_by is not OrderBy.POSITION  # whoever asks, there is something or not
                hand = await desk.decide(lambda book, desk=desk: self._take(desk, book, order), alike=alike)  # type: ignore[misc]
            except UnknownSubscription:
                self._gate.forget(name)  # deleted and perhaps added again: asked anew, the registry tells
                continue
            for message in hand.taken.exhausted:
                await self._give_up(desk, message)
            found = await self._bodies(desk, hand)
            if found or not (hand.taken.exhausted or hand.taken.lease):
                return found, hand.taken.again_at

    def _take(self, desk: Desk, book: Book, order: "_Order") -> "Step[_Hand]":
        seconds = order.seconds or desk.definition.lease_seconds
        ask = Ask(instance=order.instance, now=self._now(), length=_milliseconds(seconds), most=order.most)
        rules = _rules(desk)
        taken = leases.take(book, desk.window.pending(book), ask, rules)
        missing = order.most if taken.wants_more else 0
        if taken.lease is None:
            changed = None if taken.book is book else taken.book
            return Step(value=_Hand(taken), book=changed, missing=missing, empty=not taken.exhausted)
        lease = taken.lease
        bodies = [desk.window.body(sequence) for sequence in lease.sequences]
        missing = max(missing - len(bodies), 0)
        if order.pop:
            acked = [_acked(desk, sequence) for sequence in lease.sequences]
            done = leases.acknowledge(taken.book, acked, desk.window.seen())
            return Step(value=_Hand(taken, bodies, popped=True), book=done, acked=acked, missing=missing)
        return Step(
            value=_Hand(taken, bodies),
            book=taken.book,
            missing=missing,
            undo=lambda now: leases.give_back(now, lease.id),
        )

    async def _bodies(self, desk: Desk, hand: "_Hand") -> list[Delivered]:
        """The messages of a lease. One that limits or people removed meanwhile counts as done."""
        lease = hand.taken.lease
        if lease is None:
            return []
        found: list[Delivered] = []
        for sequence, body, count in zip(lease.sequences, hand.bodies, hand.taken.deliveries, strict=True):
            message = body or await self._read(desk, sequence)
            if message is None:
                kind = Kind.PREFILL if sequence in lease.prefill else Kind.MAIN
                gone = Acked(sequence, kind)
                await desk.decide(lambda book, gone=gone: _acknowledged(desk, book, [gone]))  # type: ignore[misc]
                continue
            found.append(_delivered(message, lease, count, popped=hand.popped))
        if desk.definition.order_by is not OrderBy.POSITION:
            desk.window.drop_bodies(lease.sequences)
        return found

    async def _give_up(self, desk: Desk, message: Pending) -> None:
        """Park a message that was delivered too often, and go on behind it."""
        attempts = desk.definition.retry.max_attempts or 0
        body = await self._read(desk, message.sequence)
        position = 0 if body is None else position_of(body.headers) or 0
        acked = Acked(message.sequence, message.kind, position)
        if body is not None:
            await self._parking.park(desk, body, f"not acknowledged after {attempts} deliveries", attempts)
        await desk.decide(lambda book: _acknowledged(desk, book, [acked]))

    async def _find(self, desk: Desk, sequence: int) -> Acked:
        """Where a message lies that is to be answered for; `UnknownMessage` if it does not or is acknowledged."""
        known = desk.window.find(sequence)
        if known is not None:
            return Acked(sequence, *known)
        body = await self._read(desk, sequence)
        if body is None:
            raise _gone(desk.name, sequence)
        return Acked(sequence, kind_of(body), position_of(body.headers) or 0)

    async def _read(self, desk: Desk, sequence: int) -> StoredMessage | None:
        body = desk.window.body(sequence)
        if body is not None or not 0 < sequence < _END:
            return body
        try:
            return await self._queues.streams.get(subscription_queue(desk.name).stream, sequence)
        except (UnknownMessage, UnknownStream):
            return None

    async def _desk(self, name: str) -> Desk:
        return await self._desks.of(await self._gate.look(name))

    def _now(self) -> int:
        return _milliseconds(self._clock())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """What a consumer asked for."""

    instance: str
    most: int = 1
    seconds: float | None = None
    pop: bool = False
    looked: bool = False


@dataclass(frozen=True, slots=True)
class _Hand:
    """What a consumer gets, with the messages as far as they were at hand."""

    taken: Taken
    bodies: Sequence[StoredMessage | None] = ()
    popped: bool = False


def _acknowledged(desk: Desk, book: Book, messages: Sequence[Acked]) -> Step[None]:
    for message in messages:
        if message.sequence in book.done(message.kind):
            raise _gone(desk.name, message.sequence)
    return Step(value=None, book=leases.acknowledge(book, messages, desk.window.seen()), acked=messages)


def _acked(desk: Desk, sequence: int) -> Acked:
    known = desk.window.find(sequence)
    assert known is not None
    return Acked(sequence, *known)


def _delivered(message: StoredMessage, lease: Lease, count: int, *, popped: bool) -> Delivered:
    return Delivered(
        sequence=message.sequence,
        position=position_of(message.headers),
        kind=kind_of(message),
        data=message.data,
        headers=message.headers,
        num_delivered=count,
        lease=None if popped else lease.id,
        until=None if popped else _moment(lease.until),
    )


def _rules(desk: Desk) -> Rules:
    return Rules(order_by=desk.definition.order_by, max_attempts=desk.definition.retry.max_attempts)


def _check_instance(instance: str) -> str:
    if not 0 < len(instance) <= _LONGEST_INSTANCE or not instance.isprintable():
        raise InvalidInput(f"invalid instance {instance[:40]!r}", fix=f"use 1 to {_LONGEST_INSTANCE} characters")
    return instance


def _gone(name: str, sequence: int) -> UnknownMessage:
    return UnknownMessage(
        f"subscription {name!r} has no message {sequence}", fix="it was acknowledged already, or never handed out"
    )


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


def _moment(milliseconds: int) -> datetime:
    return datetime.fromtimestamp(milliseconds / 1000, UTC)

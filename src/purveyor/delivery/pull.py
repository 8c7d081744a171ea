"""Pull: consumers ask for messages and say what became of them. What the HTTP API, push and the CLI stand on.

The rules are in `leases`; whether a subscription is served at all in `gate`; the book and the queue in `desk`. Nothing
here is kept that another process could not do without: any number of them serve the same subscriptions.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from types import TracebackType
from typing import Final, Self

from purveyor.delivery import lease_rules
from purveyor.delivery.dead_letters.park import Parking
from purveyor.delivery.failure_history import entry, log
from purveyor.delivery.memory_limit import Memory
from purveyor.delivery.message_buffer import kind_of, letter_of, position_of
from purveyor.delivery.notifier import Bells
from purveyor.delivery.prefetch import Kept
from purveyor.delivery.registration_cache import Gate, is_open
from purveyor.delivery.state import Acked, Again, Book, End, Full, Lease, Pending
from purveyor.delivery.state_writer import Desk, Step
from purveyor.delivery.state_writer_cache import Desks
from purveyor.delivery.transitions import (
    MOST_LAPSED,
    Delivered,
    Hand,
    Look,
    Order,
    acked,
    acknowledged,
    acknowledged_for,
    check_instance,
    claimed,
    count_delivered,
    delivered,
    gone,
    hand_over,
    kind_in,
    known,
    lapse,
    milliseconds,
    moment,
    refused,
    rules_of,
)
from purveyor.jetstream.streams import StoredMessage
from purveyor.model import metrics
from purveyor.model.delivery_policy import LONGEST_DELAY_SECONDS, OrderBy, check_lease_seconds
from purveyor.model.errors import InvalidInput, UnknownMessage, UnknownStream, UnknownSubscription
from purveyor.queues.catalogue import subscription_queue
from purveyor.queues.client import Queues

__all__ = ["DEFAULT_INSTANCE", "LONGEST_WAIT_SECONDS", "MOST_AT_ONCE", "Delivered", "Pull"]

_log = logging.getLogger(__name__)
DEFAULT_INSTANCE: Final = "default"
MOST_AT_ONCE: Final = 1000
LONGEST_WAIT_SECONDS: Final = 3600.0
_END: Final = 2**63
"""No sequence is as high."""


class Pull:
    """Delivery on request. One per process, on one connection; closed with `close` or as a context manager.

    >>> pull = Pull(queues)  # doctest: +SKIP
    >>> message = await pull.next("ox", timeout=10)  # doctest: +SKIP
    >>> await pull.acknowledge("ox", message.sequence)  # doctest: +SKIP

    Every method raises `UnknownSubscription` if there is none of that name, and an `Unavailable` when the server is
    away for longer than the connection has patience; then nothing is lost, and the same call may be made again.
    """

    def __init__(
        self,
        queues: Queues,
        *,
        replicas: int = 1,
        clock: Callable[[], float] = time.time,
        memory: Memory | None = None,
    ) -> None:
        self._queues = queues
        self._clock = clock
        self._bells = Bells(queues.connection)
        self._gate = Gate(queues, self._bells.ring, replicas=replicas)
        self._desks = Desks(queues, self._gate, self._bells, replicas=replicas, memory=memory)
        self._parking = Parking(queues, replicas=replicas)
        self._full: set[str] = set()
        """Subscriptions of which nothing more was handed out when they were looked at last."""

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
        asked without waiting, and got nothing. `PrefillFailed` if nothing will come until somebody acts; `WindowFull`
        if nothing more may be out.
        """
        order = Order(instance=check_instance(instance), pop=pop, looked=looked)
        found = await self._poll(name, order, timeout) if timeout or looked else await self._look_once(name, order)
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
        order = Order(instance=check_instance(instance), most=max, seconds=seconds)
        return await self._poll(name, order, timeout)

    async def acknowledge(self, name: str, sequence: int, *, instance: str | None = None) -> None:
        """A message is handled, and never given to anybody again, whoever has it now.

        For an `instance` that asks for the next one soon after, that one is leased with the same write (see `ahead`).
        `UnknownMessage` if it is not there (any more), or was handed out to nobody: an acknowledgement may be a late
        one, meant for a subscription of the same name that was deleted.
        """
        desk = await self._desk(name)
        message = await self._find(desk, sequence)

        def decide(book: Book) -> Step[Kept | None]:
            if not book.deliveries(sequence):
                raise gone(name, sequence)
            return acknowledged_for(desk, book, message, instance, self._now())

        kept = await desk.decide(decide)
        if instance is not None:
            desk.ahead.acknowledged(instance, kept)
        metrics.ACKNOWLEDGED.add(name)

    async def acknowledge_up_to(self, name: str, sequence: int, *, instance: str = DEFAULT_INSTANCE) -> int:
        """All that an instance has at hand up to a message, in the order of delivery, is handled; how many that is.

        `LeaseLost` if the instance has that message no more.
        """
        desk = await self._desk(name)
        message = await self._find(desk, sequence)
        rules = rules_of(desk)

        def decide(book: Book) -> Step[int]:
            if sequence in book.done(message.kind):
                raise gone(desk.name, sequence)
            if desk.window.find(sequence) is None:
                return Step(value=0, missing=1, empty=True)
            book = lease_rules.expire(book, self._now())
            handed_out = lease_rules.handed_out(book, desk.window.pending(book), sequence, instance, rules)
            # The position of the last one is enough: what lies before it in the queue was written before it.
            acked = [known(desk, each.sequence)._replace(position=message.position) for each in handed_out]
            return Step(value=len(acked), book=lease_rules.acknowledge(book, acked, desk.window.seen()), acked=acked)

        count = await desk.decide(decide)
        if not count:
            raise gone(name, sequence)
        metrics.ACKNOWLEDGED.add(name, by=count)
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
        policy, rules = desk.definition.retry, rules_of(desk)

        def decide(book: Book) -> Step[None]:
            now = self._now()
            book = lease_rules.expire(book, now)
            seconds = policy.backoff_seconds(max(book.deliveries(sequence), 1)) if delay is None else delay
            again = Again(instance=instance, now=now, delay=milliseconds(seconds))
            return Step(value=None, book=lease_rules.retry(book, sequence, again, rules), frees=True)

        await desk.decide(decide)
        metrics.RETURNED.add(name)

    async def reject(self, name: str, sequence: int, reason: str, *, instance: str = DEFAULT_INSTANCE) -> None:
        """A message will never be handled: it becomes a dead letter. `LeaseLost` if another instance has it.

        1. It is parked under an id made of where it came from. 2. It is acknowledged. After a crash between the two it
        is given again; parked again within the window of duplicates it is the same dead letter.
        """
        desk = await self._desk(name)
        message = await self._find(desk, sequence)

        def check(book: Book) -> Step[Book]:
            book = lease_rules.expire(book, self._now())
            if sequence in book.done(message.kind):
                raise gone(name, sequence)
            lease_rules.may_give_up(book, sequence, instance)
            return Step(value=book, empty=True)

        book = await desk.decide(check)
        body = await self._read(desk, sequence)
        if body is None:
            raise gone(name, sequence)
        last = entry(self._now(), f"rejected by instance {instance!r}", reason)
        attempts = [*log(book.ends.get(sequence, ())), last]
        reason = reason or "rejected by the consumer"
        await self._parking.park(desk, body, reason, book.deliveries(sequence), attempts)
        await desk.decide(lambda book: acknowledged(desk, book, [message]))

    async def set_aside(self, name: str, message: Delivered, reason: str) -> None:
        """Park a message that was handed out to this process, and that it cannot hand on.

        1. It is parked under an id made of where it came from. 2. It is acknowledged, unless it was popped. After a
        crash between the two it is handed out again; after a crash before 1, a popped one is lost, as it would be
        when the crash comes before the answer.
        """
        desk = await self._desk(name)
        stored = StoredMessage(
            stream=subscription_queue(name).stream,
            sequence=message.sequence,
            timestamp=None,
            subject=f"{name}.{message.kind.value}",
            headers=message.headers,
            data=message.data,
        )
        await self._parking.park(desk, stored, reason, message.num_delivered)
        if message.lease is not None:
            with contextlib.suppress(UnknownMessage):  # somebody was quicker
                await desk.decide(lambda book: acknowledged(desk, book, [acked(message)]))

    async def extend(
        self, name: str, sequence: int, *, lease_seconds: float | None = None, instance: str = DEFAULT_INSTANCE
    ) -> datetime:
        """The lease that a message is in, with all its messages, begins anew; until when it goes.

        `LeaseLost` if the instance has it no more.
        """
        desk = await self._desk(name)
        seconds = desk.definition.lease_seconds if lease_seconds is None else check_lease_seconds(lease_seconds)
        length = milliseconds(seconds)

        def decide(book: Book) -> Step[Lease]:
            longer, lease = lease_rules.extend(book, sequence, instance, self._now(), length)
            return Step(value=lease, book=longer)

        return moment((await desk.decide(decide)).until)

    async def expire(self, name: str) -> int:
        """Let go of what has waited for longer than the subscription keeps it; how many messages that is.

        Whoever asks for messages gets none of those anyway; this is for a subscription that nobody asks for.
        """
        desk = await self._desk(name)

        def decide(book: Book) -> Step[int]:
            after, lapsed = lapse(desk, book, self._now())
            whole = len(lapsed) < MOST_LAPSED and next(desk.window.pending(after), None) is None
            return Step(value=len(lapsed), book=after if lapsed else None, acked=lapsed, missing=int(whole))

        total = 0
        while lapsed := await desk.decide(decide):
            total += lapsed
        if total:
            metrics.EXPIRED.add(name, by=total)
        return total

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

    async def _poll(self, name: str, order: Order, wait_seconds: float) -> list[Delivered]:
        """Look; if there is nothing, listen, look again, and wait for the bell."""
        if not 0 <= wait_seconds <= LONGEST_WAIT_SECONDS:
            raise InvalidInput(f"a wait of {wait_seconds:g} seconds", fix=f"give 0 to {LONGEST_WAIT_SECONDS:g}")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_seconds
        if wait_seconds <= 0:
            return await self._look_once(name, order)
        if not order.looked and (found := (await self._look(name, order)).found):
            return found
        async with self._bells.waiting(name) as bell:
            while True:
                rung = await bell.arm()
                look = await self._look(name, order)
                left = deadline - loop.time()
                if look.found or left <= 0:
                    return _found(name, look)
                if look.again_at is not None:
                    left = min(left, max((look.again_at - self._now()) / 1000, 0.001))
                await bell.wait(rung, left)

    async def _look_once(self, name: str, order: Order) -> list[Delivered]:
        return _found(name, await self._look(name, order))

    async def _look(self, name: str, order: Order) -> Look:
        """What there is for an instance now; or when to look again, if that is known."""
        while True:
            registered = await self._gate.look(name)
            if not is_open(registered):
                return Look([])
            desk = await self._desks.of(registered)
            if (kept := claimed(desk, order)) is not None:
                return Look(await self._bodies(desk, kept))
            try:
                alike = desk.definition.order_by is not OrderBy.POSITION  # whoever asks, there is something or not
                hand = await desk.decide(lambda book, desk=desk: hand_over(desk, book, order, self._now()), alike=alike)  # type: ignore[misc]
            except UnknownSubscription:
                self._gate.forget(name)  # deleted and perhaps added again: asked anew, the registry tells
                continue
            problem = await self._give_up_exhausted(desk, hand)
            if hand.lapsed:
                metrics.EXPIRED.add(name, by=hand.lapsed)
            found = await self._bodies(desk, hand)
            if problem is not None and not found:
                raise problem
            if found or not (hand.taken.exhausted or hand.taken.lease or hand.lapsed):
                self._note_full(name, hand.taken.full)
                return Look(found, hand.taken.again_at, hand.taken.cut, hand.taken.full)

    def _note_full(self, name: str, full: Full | None) -> None:
        """Log once that nothing more of a subscription is handed out."""
        if full is None:
            self._full.discard(name)
        elif name not in self._full:
            self._full.add(name)
            _log.warning("%s", refused(name, full))

    async def _bodies(self, desk: Desk, hand: Hand) -> list[Delivered]:
        """The messages of a lease. One that limits or people removed meanwhile counts as done."""
        lease = hand.taken.lease
        if lease is None:
            return []
        found: list[Delivered] = []
        given_up = [each for each, body in zip(lease.sequences, hand.bodies, strict=True) if body is None]
        again = await desk.window.fetch(given_up) if given_up else {}
        for sequence, body, count in zip(lease.sequences, hand.bodies, hand.taken.deliveries, strict=True):
            message = body or again.get(sequence)
            if message is None:
                removed = desk.window.find(sequence) or Acked(sequence, kind_in(lease, sequence))
                await desk.decide(lambda book, removed=removed: acknowledged(desk, book, [removed]))  # type: ignore[misc]
                continue
            found.append(delivered(message, lease, count, popped=hand.popped))
        if desk.definition.order_by is not OrderBy.POSITION:
            desk.window.drop_bodies(lease.sequences)
        count_delivered(desk.name, found, popped=hand.popped)
        return found

    async def _give_up_exhausted(self, desk: Desk, hand: Hand) -> Exception | None:
        """Park what was delivered too often. An error is returned, so that what was leased with it is delivered."""
        try:
            for message in hand.taken.exhausted:
                await self._give_up(desk, message, hand.taken.ends.get(message.sequence, ()))
        except Exception as error:  # noqa: BLE001 - the caller raises it when there is nothing to deliver
            return error
        return None

    async def _give_up(self, desk: Desk, message: Pending, ends: Sequence[End]) -> None:
        """Park a message that was delivered too often, and go on behind it."""
        attempts = desk.definition.retry.max_attempts or 0
        body = await self._read(desk, message.sequence)
        headers = {} if body is None else body.headers
        acked = Acked(message.sequence, message.kind, position_of(headers) or 0, letter_of(headers))
        if body is not None:
            reason = f"not acknowledged after {attempts} deliveries"
            await self._parking.park(desk, body, reason, attempts, log(ends))
        await desk.decide(lambda book: acknowledged(desk, book, [acked]))

    async def _find(self, desk: Desk, sequence: int) -> Acked:
        """Where a message lies that is to be answered for; `UnknownMessage` if it does not or is acknowledged."""
        known = desk.window.find(sequence)
        if known is not None:
            return known
        body = await self._read(desk, sequence)
        if body is None:
            raise gone(desk.name, sequence)
        return Acked(sequence, kind_of(body), position_of(body.headers) or 0, letter_of(body.headers))

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
        return milliseconds(self._clock())


def _found(name: str, look: Look) -> list[Delivered]:
    """The messages; `WindowFull` if there are none because nothing more may be out."""
    if not look.found and look.full is not None:
        raise refused(name, look.full)
    return look.found

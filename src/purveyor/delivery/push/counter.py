"""The push worker at the counter where consumers fetch their messages: it takes many and answers for many at once.

The rules, the book and the queue are those of `pull`; so push workers, several of them, and consumers that pull may all
serve one subscription.
"""

import time
from collections.abc import Callable

from purveyor.delivery import leases
from purveyor.delivery.desk import Desk, Step
from purveyor.delivery.hands import Delivered, Order, acknowledged, rules_of
from purveyor.delivery.pull import Pull
from purveyor.delivery.push.attempts import Attempts
from purveyor.delivery.push.settling import Answers, settle
from purveyor.delivery.window import letter_of, position_of
from purveyor.delivery.words import Acked, Book, Kind, Pending
from purveyor.model import figures
from purveyor.model.errors import LeaseLost, UnknownSubscription
from purveyor.queues.client import Queues


class Counter(Pull):
    """See the module. `instance` is the name under which this process has messages."""

    def __init__(
        self,
        queues: Queues,
        attempts: Attempts,
        *,
        instance: str,
        replicas: int = 1,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(queues, replicas=replicas, clock=clock)
        self.instance = instance
        self._attempts = attempts

    async def look(self, name: str, most: int, lease_seconds: float) -> tuple[list[Delivered], float | None]:
        """What there is now, without waiting; and in how many seconds time alone may bring more, if that is known."""
        order = Order(instance=self.instance, most=most, seconds=lease_seconds)
        found, again_at = await self._look(name, order)
        return found, None if again_at is None else max((again_at - self._now()) / 1000, 0.001)

    async def settle(self, name: str, incarnation: str, answers: Answers) -> None:
        """Make answers count, all in one write. `UnknownSubscription` if it is another by now."""
        desk = await self._own_desk(name, incarnation)
        rules = rules_of(desk)

        def decide(book: Book) -> Step[int]:
            settled = settle(book, answers, self._now(), rules, desk.window.seen())
            return Step(
                value=len(settled.acknowledged),
                book=None if settled.book is book else settled.book,
                acked=settled.acknowledged,
                frees=bool(answers.again or answers.unused),
            )

        count = await desk.decide(decide)
        if count:
            figures.ACKNOWLEDGED.add(name, by=count)
        if answers.again:
            figures.RETURNED.add(name, by=len(answers.again))

    async def park(self, name: str, incarnation: str, message: Delivered, reason: str) -> int | None:
        """Store a message that failed for good as a dead letter; its sequence, or None if it is in other hands by now.

        It is acknowledged afterwards, by `settle`: after a crash between the two it is given up again, and is the same
        dead letter.
        """
        desk = await self._own_desk(name, incarnation)

        def check(book: Book) -> Step[None]:
            leases.held(leases.expire(book, self._now()), message.sequence, self.instance)
            return Step(value=None, empty=True)

        try:
            await desk.decide(check)
        except LeaseLost:
            return None
        body = await self._read(desk, message.sequence)
        if body is None:
            return 0  # somebody removed it
        details = await self._attempts.details(name, incarnation, message.sequence)
        return await self._parking.park(desk, body, reason, message.num_delivered, details)

    async def _give_up(self, desk: Desk, message: Pending) -> None:
        """A message that was out too often, the last time with a worker that did not live to tell what came of it."""
        body = await self._read(desk, message.sequence)
        headers = {} if body is None else body.headers
        acked = Acked(message.sequence, message.kind, position_of(headers) or 0, letter_of(headers))
        if body is not None:
            attempts = desk.definition.retry.max_attempts or 0
            details = await self._attempts.details(desk.name, desk.incarnation, message.sequence)
            await self._parking.park(desk, body, f"not acknowledged after {attempts} deliveries", attempts, details)
        await desk.decide(lambda book: acknowledged(desk, book, [acked]))
        await self._attempts.forget(desk.name, message.sequence, failed_before=True)

    async def _own_desk(self, name: str, incarnation: str) -> Desk:
        desk = await self._desk(name)
        if desk.incarnation != incarnation:
            raise UnknownSubscription(f"subscription {name!r} was deleted meanwhile", fix="nothing is to be done")
        return desk


def acked(message: Delivered) -> Acked:
    """A message as one to acknowledge."""
    letter = letter_of(message.headers) if message.kind is Kind.RETRY else 0
    return Acked(message.sequence, message.kind, message.position or 0, letter)

"""The push worker at the counter where consumers fetch their messages: it takes many and answers for many at once.

The rules, the book and the queue are those of `pull`; so push workers, several of them, and consumers that pull may all
serve one subscription.
"""

from collections.abc import Sequence

from purveyor.delivery import lease_rules
from purveyor.delivery.failure_history import log
from purveyor.delivery.message_buffer import letter_of, position_of
from purveyor.delivery.pull import Pull
from purveyor.delivery.push.attempt_log import Attempts
from purveyor.delivery.push.blocked_keys import ParkedKeys
from purveyor.delivery.push.payloads import key_of
from purveyor.delivery.push.settlement import Answers, settle
from purveyor.delivery.state import Acked, Book, End, Pending
from purveyor.delivery.state_writer import Desk, Step
from purveyor.delivery.transitions import Delivered, Look, Order, acknowledged, rules_of
from purveyor.jetstream.streams import StoredMessage
from purveyor.model import metrics
from purveyor.model.errors import LeaseLost, UnknownSubscription
from purveyor.model.push_config import AfterDeadLetter
from purveyor.queues.client import Queues


class Counter(Pull):
    """See the module. `instance` is the name under which this process has messages."""

    def __init__(
        self, queues: Queues, attempts: Attempts, parked: ParkedKeys, *, instance: str, replicas: int = 1
    ) -> None:
        super().__init__(queues, replicas=replicas)
        self.instance = instance
        self._attempts = attempts
        self._parked = parked

    async def look(self, name: str, most: int, lease_seconds: float) -> tuple[Look, float | None]:
        """What there is now, without waiting; and in how many seconds time alone may bring more, if that is known."""
        look = await self._look(name, Order(instance=self.instance, most=most, seconds=lease_seconds))
        return look, None if look.again_at is None else max((look.again_at - self._now()) / 1000, 0.001)

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
            metrics.ACKNOWLEDGED.add(name, by=count)
        if answers.again:
            metrics.RETURNED.add(name, by=len(answers.again))

    async def park(self, name: str, incarnation: str, message: Delivered, reason: str) -> bool:
        """Store a message that failed for good as a dead letter; False if it is in other hands by now.

        It is acknowledged afterwards, by `settle`: after a crash between the two it is given up again, and is the same
        dead letter.
        """
        desk = await self._own_desk(name, incarnation)

        def check(book: Book) -> Step[Sequence[End]]:
            book = lease_rules.expire(book, self._now())
            lease_rules.held(book, message.sequence, self.instance)
            return Step(value=book.ends.get(message.sequence, ()), empty=True)

        try:
            ends = await desk.decide(check)
        except LeaseLost:
            return False
        body = await self._read(desk, message.sequence)
        if body is not None:  # else somebody removed it
            await self._store(desk, body, reason, message.num_delivered, ends)
        return True

    async def _give_up(self, desk: Desk, message: Pending, ends: Sequence[End]) -> None:
        """A message that was out too often, the last time with a worker that did not live to tell what came of it."""
        body = await self._read(desk, message.sequence)
        headers = {} if body is None else body.headers
        acked = Acked(message.sequence, message.kind, position_of(headers) or 0, letter_of(headers))
        if body is not None:
            attempts = desk.definition.retry.max_attempts or 0
            await self._store(desk, body, f"not acknowledged after {attempts} deliveries", attempts, ends)
        await desk.decide(lambda book: acknowledged(desk, book, [acked]))
        await self._attempts.forget(desk.name, message.sequence, failed_before=True)

    async def _store(self, desk: Desk, body: StoredMessage, reason: str, count: int, ends: Sequence[End]) -> None:
        """1. The dead letter. 2. Its key is noted, if the later messages about it are to be parked too.

        It tells the attempts with their answers, and the leases of workers that did not live to note any. `Refused`
        before 1 if no more keys can be noted.
        """
        name, incarnation, push = desk.name, desk.incarnation, desk.definition.push
        parks_keys = push is not None and push.after_dead_letter is AfterDeadLetter.PARK_KEY
        if parks_keys:
            await self._parked.make_room(name, incarnation)
        noted = await self._attempts.log(name, incarnation, body.sequence)
        attempts = sorted([*noted, *log(ends)], key=lambda each: str(each.get("time")))
        letter = await self._parking.park(desk, body, reason, count, attempts)
        if parks_keys and (key := key_of(body.data)) is not None:
            await self._parked.add(name, incarnation, key, letter)

    async def _own_desk(self, name: str, incarnation: str) -> Desk:
        desk = await self._desk(name)
        if desk.incarnation != incarnation:
            raise UnknownSubscription(f"subscription {name!r} was deleted meanwhile", fix="nothing is to be done")
        return desk

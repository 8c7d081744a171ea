"""Messages that a subscription gives up become dead letters: rejected by a consumer, or delivered too often."""

from datetime import UTC, datetime

from purveyor.delivery.desk import Desk
from purveyor.delivery.window import position_of
from purveyor.queues.catalogue import DEAD_LETTERS
from purveyor.queues.client import Queues
from purveyor.queues.dead_letters import DeadLetter, park, subscription_origin
from purveyor.queues.streams import StoredMessage


def dead_letter_origin(name: str) -> str:
    """By what the dead letters of a subscription are told from others."""
    return subscription_origin(name)


class Parking:
    """Where dead letters go; the queue is made with the first."""

    def __init__(self, queues: Queues, *, replicas: int = 1) -> None:
        self._queues = queues
        self._replicas = replicas
        self._ready = False

    async def park(self, desk: Desk, message: StoredMessage, reason: str, attempts: int) -> None:
        """Store a dead letter. Its id tells where the message came from: parked again soon, it is the same one."""
        if not self._ready:
            (await self._queues.ensure(DEAD_LETTERS, replicas=self._replicas)).require_usable()
            self._ready = True
        now = datetime.now(UTC)
        letter = DeadLetter(
            reason=reason,
            origin=dead_letter_origin(desk.name),
            subject=message.subject,
            data=message.data,
            failed_first=now,
            failed_last=now,
            headers=message.headers,
            position=message.sequence,
            attempts=max(attempts, 1),
            details={
                "subscription": desk.name,
                "incarnation": desk.incarnation,
                "position": position_of(message.headers),
            },
        )
        await park(self._queues, letter)

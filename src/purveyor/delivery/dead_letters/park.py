"""Messages that a subscription gives up become dead letters: rejected by a consumer, or delivered too often."""

import contextlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from purveyor.delivery.failure_history import KEPT
from purveyor.delivery.message_buffer import position_of
from purveyor.delivery.state_writer import Desk
from purveyor.jetstream.headers import FAILED_FIRST, RETRIES, Headers, first, number
from purveyor.jetstream.streams import StoredMessage
from purveyor.model.json_fields import Json
from purveyor.model.metrics import DEAD_LETTERS as PARKED
from purveyor.queues.catalogue import DEAD_LETTERS
from purveyor.queues.client import Queues
from purveyor.queues.dead_letters.letter import DeadLetter, Detail, park, subscription_origin

ATTEMPTS_LOG: Final = "attempts_log"
"""The detail with the attempts, where each was noted: JSON of a list of time, status, error and excerpt."""


def dead_letter_origin(name: str) -> str:
    """By what the dead letters of a subscription are told from others."""
    return subscription_origin(name)


class Parking:
    """Where dead letters go; the queue is made with the first."""

    def __init__(self, queues: Queues, *, replicas: int = 1) -> None:
        self._queues = queues
        self._replicas = replicas
        self._ready = False

    async def park(
        self, desk: Desk, message: StoredMessage, reason: str, attempts: int, log: Sequence[Json] = ()
    ) -> int:
        """Store a dead letter; its sequence. Its id tells where the message came from: parked again, it is the same.

        `attempts` is how often it was tried, and `log` tells of those attempts that were noted.
        """
        if not self._ready:
            (await self._queues.ensure(DEAD_LETTERS, replicas=self._replicas)).require_usable()
            self._ready = True
        now = datetime.now(UTC)
        letter = DeadLetter(
            reason=reason,
            origin=dead_letter_origin(desk.name),
            subject=message.subject,
            data=message.data,
            failed_first=_failed_first(message.headers, now),
            failed_last=now,
            headers=message.headers,
            position=message.sequence,
            attempts=max(attempts, 1),
            details={
                "subscription": desk.name,
                "incarnation": desk.incarnation,
                "position": position_of(message.headers),
                **_retries(message.headers),
                **({ATTEMPTS_LOG: json.dumps(log[-KEPT:])} if log else {}),
            },
        )
        receipt = await park(self._queues, letter)
        PARKED.add(letter.origin)
        return receipt.sequence


def _failed_first(headers: Headers, now: datetime) -> datetime:
    """Of a message that was put back, when it was given up for the first time."""
    with contextlib.suppress(ValueError):
        told = datetime.fromisoformat(first(headers, FAILED_FIRST) or "")
        if told.tzinfo is not None:
            return min(told, now)
    return now


def _retries(headers: Headers) -> dict[str, Detail]:
    count = number(headers, RETRIES)
    return {} if count is None else {"retries": count}

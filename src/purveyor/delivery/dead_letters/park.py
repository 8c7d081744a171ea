"""Park messages of a subscription as dead letters, with a log of their failed attempts.

A message becomes a dead letter when a consumer rejects it or when it reaches the maximum of attempts. The attempt log
is a detail of the dead letter: a JSON list of objects with `time`, `status`, `error` and `excerpt`. Pull and push write
the same form; `attempts_of` reads it for the command line, the HTTP API and the console.
"""

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from purveyor.delivery.lease_rules import MAX_FAILURES_PER_MESSAGE
from purveyor.delivery.message_buffer import position_of
from purveyor.delivery.state_writer import StateWriter
from purveyor.jetstream.headers import Headers, first, number
from purveyor.jetstream.streams import StoredMessage
from purveyor.model.delivery_state import FailedDelivery
from purveyor.model.json_fields import Json
from purveyor.model.message_headers import FIRST_FAILED_AT, REDRIVE_COUNT
from purveyor.model.metrics import DEAD_LETTERS as PARKED
from purveyor.queues.catalogue import DEAD_LETTERS
from purveyor.queues.client import Queues
from purveyor.queues.dead_letters.letter import DeadLetter, Detail, park, subscription_origin
from purveyor.queues.dead_letters.store import ParkedMessage

ATTEMPTS_LOG: Final = "attempts_log"
"""The detail of a dead letter that holds the attempt log."""
MAX_EXCERPT_CHARACTERS: Final = 200
"""How much of an answer or a reason the log keeps."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One failed delivery."""

    time: datetime | None
    status: int | None = None
    error: str | None = None
    excerpt: str | None = None


class DeadLetterWriter:
    """Stores dead letters; creates their queue with the first one."""

    def __init__(self, queues: Queues, *, replicas: int = 1) -> None:
        self._queues = queues
        self._replicas = replicas
        self._has_queue = False

    async def park(
        self, writer: StateWriter, message: StoredMessage, reason: str, attempts: int, log: Sequence[Json] = ()
    ) -> int:
        """Store a message as a dead letter and return its sequence.

        The id of the dead letter derives from the origin of the message: parked twice, it is the same dead letter.
        `attempts` counts all attempts; `log` describes those that were recorded.
        """
        if not self._has_queue:
            (await self._queues.ensure(DEAD_LETTERS, replicas=self._replicas)).require_usable()
            self._has_queue = True
        now = datetime.now(UTC)
        letter = DeadLetter(
            reason=reason,
            origin=subscription_origin(writer.name),
            subject=message.subject,
            data=message.data,
            failed_first=_failed_first(message.headers, now),
            failed_last=now,
            headers=message.headers,
            position=message.sequence,
            attempts=max(attempts, 1),
            details={
                "subscription": writer.name,
                "incarnation": writer.incarnation,
                "position": position_of(message.headers),
                **_retries(message.headers),
                **({ATTEMPTS_LOG: json.dumps(log[-MAX_FAILURES_PER_MESSAGE:])} if log else {}),
            },
        )
        receipt = await park(self._queues, letter)
        PARKED.add(letter.origin)
        return receipt.sequence


def as_attempt_log(failures: Iterable[FailedDelivery]) -> list[Json]:
    """Convert failed deliveries to entries of the attempt log."""
    return [attempt_entry(failure.at, failure.describe()) for failure in failures]


def attempt_entry(at: int, error: str, excerpt: str = "") -> Json:
    """Return an entry of the attempt log for a failure without an HTTP status."""
    time = datetime.fromtimestamp(at / 1000, UTC)
    return {"time": time.isoformat(), "status": None, "error": error, "excerpt": excerpt[:MAX_EXCERPT_CHARACTERS]}


def attempts_of(parked: ParkedMessage) -> tuple[Attempt, ...]:
    """Return the attempt log of a dead letter; empty if only the number of attempts is known."""
    text = parked.letter.details.get(ATTEMPTS_LOG) if parked.letter is not None else None
    try:
        given: Any = json.loads(text) if isinstance(text, str) else []
    except ValueError:
        return ()
    return tuple(parse_attempt(each) for each in given if isinstance(each, dict)) if isinstance(given, list) else ()


def parse_attempt(entry: Mapping[str, Any]) -> Attempt:
    """Read one entry of an attempt log; fields that are missing or damaged become None."""
    time = None
    with contextlib.suppress(ValueError):
        time = datetime.fromisoformat(str(entry.get("time")))
    status = entry.get("status")
    return Attempt(
        time=time,
        status=status if isinstance(status, int) else None,
        error=None if entry.get("error") is None else str(entry["error"]),
        excerpt=None if entry.get("excerpt") is None else str(entry["excerpt"]),
    )


def _failed_first(headers: Headers, now: datetime) -> datetime:
    """Return when a redriven message failed for the first time; `now` for other messages."""
    with contextlib.suppress(ValueError):
        failed_first = datetime.fromisoformat(first(headers, FIRST_FAILED_AT) or "")
        if failed_first.tzinfo is not None:
            return min(failed_first, now)
    return now


def _retries(headers: Headers) -> dict[str, Detail]:
    count = number(headers, REDRIVE_COUNT)
    return {} if count is None else {"retries": count}

"""Decide what happens to a message after an attempt to push it: acknowledge, retry later, give up. Pure."""

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import Enum
from typing import Final, NamedTuple

from purveyor.delivery.dead_letters.park import MAX_EXCERPT_CHARACTERS
from purveyor.model.delivery_policy import LONGEST_DELAY_SECONDS, RetryPolicy
from purveyor.model.json_fields import Json
from purveyor.model.push_config import Push

_STATUS_GONE: Final = 410
_STATUSES_BUSY: Final = frozenset({408, 425, 429})
_STATUSES_ASKING_FOR_PAUSE: Final = frozenset({429, 503})


class Action(Enum):
    """What to do with a message."""

    ACKNOWLEDGE = "acknowledge"
    RETRY = "retry"
    GIVE_UP = "give up"
    DISABLE = "disable"
    """The endpoint is gone for good: pause the subscription, and keep the message in its queue."""
    RELEASE = "release"
    """The message was not sent: this does not count as an attempt."""


class Outcome(NamedTuple):
    """How an attempt ended: with a status, or without one and with an error."""

    status: int | None = None
    error: str | None = None
    retry_after: str | None = None
    """The Retry-After header as received."""
    body: bytes = b""
    """The beginning of the response body."""
    sent: bool = True
    refused: bool = False
    """Whether the egress policy refused the endpoint."""

    @property
    def is_endpoint_down(self) -> bool:
        """Whether the outcome says something about the endpoint rather than about the message."""
        return self.status is None or self.status >= 500 or self.status in _STATUSES_BUSY

    @property
    def excerpt(self) -> str:
        """The beginning of the response body as one printable line."""
        text = self.body[: MAX_EXCERPT_CHARACTERS * 4].decode("utf-8", "replace")
        printable = "".join(char if char.isprintable() else " " for char in text)
        return " ".join(printable.split())[:MAX_EXCERPT_CHARACTERS]

    @property
    def summary(self) -> str:
        """The error, or the status."""
        return self.error or (f"status {self.status}" if self.status is not None else "no answer")

    @property
    def summary_with_excerpt(self) -> str:
        """The summary and the beginning of the response, as the reason of a dead letter quotes them."""
        return f"{self.summary}: {self.excerpt}" if self.excerpt else self.summary

    def to_log_entry(self, at: datetime) -> Json:
        """Return the entry for the attempt log of a dead letter."""
        return {"time": at.isoformat(), "status": self.status, "error": self.error, "excerpt": self.excerpt}


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do. `delay_seconds`: before the retry. `pause_seconds`: the endpoint asks for no requests this long."""

    action: Action
    delay_seconds: float = 0.0
    pause_seconds: float = 0.0


_ACKNOWLEDGE: Final = Decision(Action.ACKNOWLEDGE)


def decide(outcome: Outcome, push: Push, retry: RetryPolicy, attempt: int, jitter: float) -> Decision:
    """Decide. `attempt` counts this one; `jitter` from 0 to 1 spreads messages that failed at the same time."""
    status = outcome.status
    if status is not None and push.ack_codes.acknowledges(status):
        return _ACKNOWLEDGE
    if not outcome.sent:
        return Decision(Action.RELEASE)
    if status == _STATUS_GONE:
        return Decision(Action.DISABLE)
    requested = retry_after_seconds(outcome.retry_after, datetime.now(UTC))
    pause = requested if status in _STATUSES_ASKING_FOR_PAUSE else 0.0
    if retry.max_attempts is not None and attempt >= retry.max_attempts:
        return Decision(Action.GIVE_UP, pause_seconds=pause)
    return Decision(Action.RETRY, max(backoff_seconds(retry, attempt, jitter), requested), pause)


def backoff_seconds(retry: RetryPolicy, attempt: int, jitter: float) -> float:
    """Return the delay before the next attempt: doubled each time, with up to half of it random.

    >>> policy = RetryPolicy(min_backoff_seconds=1.0, max_backoff_seconds=60.0)
    >>> [backoff_seconds(policy, attempt, 0.0) for attempt in (1, 2, 3, 10)]
    [1.0, 1.0, 2.0, 30.0]
    >>> [backoff_seconds(policy, attempt, 1.0) for attempt in (1, 2, 3, 10)]
    [1.0, 2.0, 4.0, 60.0]
    """
    full = retry.backoff_seconds(attempt)
    return max(full * (0.5 + jitter / 2), min(retry.min_backoff_seconds, full))


def retry_after_seconds(text: str | None, now: datetime) -> float:
    """Return the delay that a `Retry-After` header asks for, in seconds or as a date; 0 if it is not readable.

    >>> retry_after_seconds("120", datetime(2026, 1, 1, tzinfo=UTC))
    120.0
    >>> retry_after_seconds("Thu, 01 Jan 2026 00:00:30 GMT", datetime(2026, 1, 1, tzinfo=UTC))
    30.0
    """
    if not text:
        return 0.0
    try:
        seconds = float(text)
    except ValueError:
        try:
            at = parsedate_to_datetime(text)
        except (ValueError, TypeError, OverflowError):
            return 0.0
        seconds = ((at if at.tzinfo else at.replace(tzinfo=UTC)) - now).total_seconds()
    if not math.isfinite(seconds):
        return 0.0
    return min(max(seconds, 0.0), LONGEST_DELAY_SECONDS)

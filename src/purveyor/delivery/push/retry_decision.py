"""What becomes of a message after an attempt to push it: acknowledged, sent again later, given up. Pure."""

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import Enum
from typing import Final, NamedTuple

from purveyor.delivery.failure_history import EXCERPT
from purveyor.model.delivery_policy import LONGEST_DELAY_SECONDS, RetryPolicy
from purveyor.model.json_fields import Json
from purveyor.model.push_config import Push

_GONE: Final = 410
_BUSY: Final = frozenset({408, 425, 429})
_ASKS_FOR_PAUSE: Final = frozenset({429, 503})


class What(Enum):
    """What to do with the message."""

    ACKNOWLEDGE = "acknowledge"
    RETRY = "retry"
    GIVE_UP = "give up"
    DISABLE = "disable"
    """The endpoint is gone for good: the whole subscription is paused, and the message stays in its queue."""
    RELEASE = "release"
    """It was not sent: that is no attempt."""


class Outcome(NamedTuple):
    """How an attempt ended: with a status, or without one and an error that says why."""

    status: int | None = None
    error: str | None = None
    retry_after: str | None = None
    """The header, as it came."""
    body: bytes = b""
    """The beginning of the answer."""
    sent: bool = True
    refused: bool = False
    """The endpoint is where push must not go."""

    @property
    def is_down(self) -> bool:
        """Whether it says something about the endpoint, and not about the message."""
        return self.status is None or self.status >= 500 or self.status in _BUSY

    @property
    def excerpt(self) -> str:
        """The beginning of the answer as a line of text."""
        text = self.body[: EXCERPT * 4].decode("utf-8", "replace")
        return " ".join("".join(char if char.isprintable() else " " for char in text).split())[:EXCERPT]

    @property
    def words(self) -> str:
        """In a few words."""
        return self.error or (f"status {self.status}" if self.status is not None else "no answer")

    def log_entry(self, at: datetime) -> Json:
        """As it is kept with a dead letter."""
        return {"time": at.isoformat(), "status": self.status, "error": self.error, "excerpt": self.excerpt}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision. `pause_seconds`: the endpoint wants to be left alone for so long."""

    what: What
    delay_seconds: float = 0.0
    pause_seconds: float = 0.0


_ACKNOWLEDGED: Final = Verdict(What.ACKNOWLEDGE)


def judge(outcome: Outcome, push: Push, retry: RetryPolicy, attempt: int, chance: float) -> Verdict:
    """Decide. `attempt` counts this one; `chance` from 0 to 1 spreads those who failed at the same time."""
    status = outcome.status
    if status is not None and push.ack_codes.acknowledges(status):
        return _ACKNOWLEDGED
    if not outcome.sent:
        return Verdict(What.RELEASE)
    if status == _GONE:
        return Verdict(What.DISABLE)
    asked = retry_after_seconds(outcome.retry_after, datetime.now(UTC))
    pause = asked if status in _ASKS_FOR_PAUSE else 0.0
    if retry.max_attempts is not None and attempt >= retry.max_attempts:
        return Verdict(What.GIVE_UP, pause_seconds=pause)
    return Verdict(What.RETRY, max(backoff_seconds(retry, attempt, chance), asked), pause)


def backoff_seconds(retry: RetryPolicy, attempt: int, chance: float) -> float:
    """The pause before the next attempt: doubled each time, and up to a half of it left to chance.

    >>> policy = RetryPolicy(min_backoff_seconds=1.0, max_backoff_seconds=60.0)
    >>> [backoff_seconds(policy, attempt, 0.0) for attempt in (1, 2, 3, 10)]
    [1.0, 1.0, 2.0, 30.0]
    >>> [backoff_seconds(policy, attempt, 1.0) for attempt in (1, 2, 3, 10)]
    [1.0, 2.0, 4.0, 60.0]
    """
    whole = retry.backoff_seconds(attempt)
    return max(whole * (0.5 + chance / 2), min(retry.min_backoff_seconds, whole))


def retry_after_seconds(text: str | None, now: datetime) -> float:
    """How long a `Retry-After` asks to wait: in seconds or as a date; 0 if it says nothing that can be read.

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

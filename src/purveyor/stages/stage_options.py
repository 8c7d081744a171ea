"""Options of stages: when a failed message is retried (`Retry`), how a stage works, and the times of an application."""

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

from purveyor.model.backoff import Backoff
from purveyor.model.errors import InvalidConfig

_EXTRA_DELIVERIES: Final = 30
"""Deliveries beyond the attempts before a message without any outcome is given up."""
_MAX_CONCURRENCY: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """The attempts, their delays, and whether other messages wait meanwhile: `Retry.in_order` or `Retry.parallel`."""

    ordered: bool
    """While a message waits for its next attempt, those behind it with the same key (or all, without keys) wait too."""
    attempts: int = 7
    """All attempts together: 1 and 6 more by default."""
    first_delay: timedelta = timedelta(milliseconds=500)
    max_delay: timedelta = timedelta(minutes=1)

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise InvalidConfig(f"{self.attempts} attempts", fix="give 1 or more")
        if self.first_delay < timedelta(0) or self.max_delay < self.first_delay:
            raise InvalidConfig("the delays between attempts must grow", fix="0 <= first_delay <= max_delay")

    @classmethod
    def in_order(
        cls,
        *,
        attempts: int = 7,
        first_delay: timedelta = timedelta(milliseconds=500),
        max_delay: timedelta = timedelta(minutes=1),
    ) -> "Retry":
        """Keep the order: a failed message blocks its key, or the stage when messages have no key.

        One instance works at a time, on up to `concurrency` keys at once. The other instances wait to take over.
        """
        return cls(ordered=True, attempts=attempts, first_delay=first_delay, max_delay=max_delay)

    @classmethod
    def parallel(
        cls,
        *,
        attempts: int = 7,
        first_delay: timedelta = timedelta(milliseconds=500),
        max_delay: timedelta = timedelta(minutes=1),
    ) -> "Retry":
        """Block no other message: a failed one is delivered again later, to any instance."""
        return cls(ordered=False, attempts=attempts, first_delay=first_delay, max_delay=max_delay)

    def after(self, failures: int) -> timedelta | None:
        """Return the delay after that many failures; None when it was the last attempt.

        >>> [Retry.parallel(attempts=4).after(failures) for failures in (1, 2, 4)]
        [datetime.timedelta(microseconds=500000), datetime.timedelta(seconds=1), None]
        """
        if failures >= self.attempts:
            return None
        backoff = Backoff(self.first_delay.total_seconds(), self.max_delay.total_seconds())
        return timedelta(seconds=backoff.delay_seconds(failures))

    def is_exhausted(self, deliveries: int) -> bool:
        """Whether the broker delivered a message too often without any outcome: it probably kills its process."""
        return deliveries > self.attempts + _EXTRA_DELIVERIES


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOptions:
    """The options of one stage; `Endpoint.stage` explains them."""

    exactly_once: bool = False
    retry: Retry = field(default_factory=Retry.parallel)
    concurrency: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.concurrency <= _MAX_CONCURRENCY:
            raise InvalidConfig(f"a concurrency of {self.concurrency}", fix=f"give 1 to {_MAX_CONCURRENCY}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The times of an application with stages; the defaults are for production."""

    ack_wait: timedelta = timedelta(seconds=30)
    """How long after a crash the broker delivers its messages again."""
    grace: timedelta = timedelta(seconds=3)
    """How long the new owner of a stage in order waits after an owner that did not sign off and may still be alive."""
    outbox_kept: timedelta = timedelta(days=7)
    """How long a replay can send the messages of the outbox again."""
    inbox_kept: timedelta = timedelta(days=30)
    """How long the inbox knows a processed message at least: longer than a sender may be down before it resends."""
    upkeep: timedelta = timedelta(minutes=1)
    """The interval between two cleanups of inbox and outbox."""

    def __post_init__(self) -> None:
        if self.inbox_kept < self.outbox_kept:
            raise InvalidConfig(
                f"the inbox is kept for {self.inbox_kept}, and the outbox, which can be replayed, for "
                f"{self.outbox_kept}",
                fix="keep the inbox at least as long as the outbox",
            )
        if self.ack_wait <= timedelta(0):
            raise InvalidConfig("ack_wait must be longer than 0", fix="leave it at its default")

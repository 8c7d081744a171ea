"""When a failed message is tried again, and when it is given up. Pure."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from purveyor.model.errors import InvalidConfig

_DELIVERIES_WITHOUT_OUTCOME: Final = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """How often, how soon, and who waits meanwhile: made with `Retry.in_order` or `Retry.parallel`."""

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

        One instance works at a time, with as many handlers at once as it has keys and `concurrency`; others stand by.
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
        """Let the others go on: a failed message comes again later, to any instance."""
        return cls(ordered=False, attempts=attempts, first_delay=first_delay, max_delay=max_delay)

    def after(self, failures: int) -> timedelta | None:
        """The delay after that many failures; None when it was the last attempt.

        >>> [Retry.parallel(attempts=4).after(failures) for failures in (1, 2, 4)]
        [datetime.timedelta(microseconds=500000), datetime.timedelta(seconds=1), None]
        """
        if failures >= self.attempts:
            return None
        factor = float(2 ** min(failures - 1, 40))
        return min(self.first_delay * factor, self.max_delay)

    def hopeless(self, deliveries: int) -> bool:
        """Whether a message was delivered so often without an outcome that it must be what ends its process."""
        return deliveries > self.attempts + _DELIVERIES_WITHOUT_OUTCOME

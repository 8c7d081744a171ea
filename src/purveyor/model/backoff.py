"""Exponential backoff: the delays between the attempts of everything that retries.

`Backoff` is the policy and computes a delay from a number of failures. `RetryDelays` counts the failures of one retry
loop. Neither of them sleeps.
"""

import math
import random
from dataclasses import dataclass
from typing import Final

_MOST_DOUBLINGS: Final = 64
"""A part may fail for years: the power stays a float."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Delays that double from `first_seconds` to `longest_seconds`."""

    first_seconds: float
    longest_seconds: float = math.inf

    def delay_seconds(self, failures: int, *, jitter: float | None = None) -> float:
        """Return the delay after this many failures in a row, 0 after none.

        With `jitter`, a random number from 0 to 1, the delay lies between its half and its whole, so that many clients
        that lost one server do not come back at the same moment.

        >>> [Backoff(1.0, 30.0).delay_seconds(failures) for failures in (0, 1, 2, 5, 6, 10_000)]
        [0.0, 1.0, 2.0, 16.0, 30.0, 30.0]
        >>> Backoff(1.0, 30.0).delay_seconds(3, jitter=0.5)
        3.0
        """
        if failures <= 0:
            return 0.0
        delay = min(self.first_seconds * 2.0 ** min(failures - 1, _MOST_DOUBLINGS), self.longest_seconds)
        return delay if jitter is None else delay * (0.5 + jitter / 2)


class RetryDelays:
    """The delays of one retry loop: each failure makes the next delay longer, a success resets it."""

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self._failures = 0

    def next_seconds(self, *, jitter: float | None = None) -> float:
        """Count a failure and return the delay before the next attempt."""
        self._failures += 1
        return self._backoff.delay_seconds(self._failures, jitter=jitter)

    def reset(self) -> None:
        """Begin again with the first delay."""
        self._failures = 0


def random_jitter() -> float:
    """Return a random `jitter` for `delay_seconds`."""
    return random.random()  # noqa: S311 - spreads clients in time, protects no secret


__all__ = ["Backoff", "RetryDelays", "random_jitter"]

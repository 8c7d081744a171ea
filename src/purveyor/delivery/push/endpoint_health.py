"""The health of an endpoint: its circuit breaker, and the concurrency window of a subscription that pushes to it.

The circuit breaker stops push to an endpoint that is down, so that no attempt is spent on it.

    closed ──failures in a row──▶ open ──time──▶ half open ──success──▶ closed
                                   ▲                 └──failure──▶ open, for longer

While it is half open, one probe is in flight at a time. An endpoint that asks for a pause (Retry-After) opens it too.

The concurrency window limits the pushes in flight, as in TCP: slow start doubles the window with every round until a
threshold, from there on it grows by one per round. A failure halves it, once per round: an attempt that was sent before
the window shrank says nothing about the smaller window.

Both are pure: each event returns the next value. Times are seconds of a monotonic clock.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from purveyor.model.backoff import Backoff, random_jitter

FAILURES_TO_OPEN: Final = 5
OPEN_BACKOFF: Final = Backoff(1.0, 60.0)

INITIAL_WINDOW: Final = 4.0
SMALLEST_WINDOW: Final = 1.0
LARGEST_WINDOW: Final = 256.0
_SLOW_SHARE_OF_DEADLINE: Final = 0.5
_SHRINK_FACTOR: Final = 0.5


class BreakerState(Enum):
    """The states of a circuit breaker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half open"


@dataclass(frozen=True, slots=True)
class CircuitBreaker:
    """A circuit breaker."""

    failures: int = 0
    """Failures in a row while it is closed."""
    openings: int = 0
    """How often it opened since the last success."""
    open_until: float | None = None
    """Push sends nothing before this time; None while it is closed."""
    is_probing: bool = False

    def state(self, now: float) -> BreakerState:
        """Return the state at a time."""
        if self.open_until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self.open_until else BreakerState.HALF_OPEN

    def may_send(self, now: float) -> bool:
        """Return whether another message may be sent; while it is half open, only when no probe is in flight."""
        return self.open_until is None or (now >= self.open_until and not self.is_probing)

    def start_probe(self) -> "CircuitBreaker":
        """Note that a probe is in flight."""
        return replace(self, is_probing=True)

    def cancel_probe(self) -> "CircuitBreaker":
        """End a probe without an outcome."""
        return replace(self, is_probing=False) if self.is_probing else self

    def record_success(self) -> "CircuitBreaker":
        """Close it."""
        return _CLOSED

    def record_failure(self, now: float, jitter: float) -> "CircuitBreaker":
        """Count a failure, and open it after several in a row. `jitter` from 0 to 1 spreads the probes of many.

        Attempts that were in flight when it opened, and fail as well, change nothing.
        """
        if self.open_until is not None and not self.is_probing:
            return self
        if self.open_until is None and self.failures + 1 < FAILURES_TO_OPEN:
            return CircuitBreaker(self.failures + 1)
        openings = self.openings + 1
        return CircuitBreaker(0, openings, now + OPEN_BACKOFF.delay_seconds(openings, jitter=jitter))

    def pause(self, now: float, seconds: float) -> "CircuitBreaker":
        """Open it for the pause that the endpoint asks for, unless it is open for longer."""
        until = now + seconds
        if self.open_until is not None and self.open_until >= until:
            return self
        return CircuitBreaker(0, max(self.openings, 1), until)


_CLOSED: Final = CircuitBreaker()


class EndpointHealth:
    """The circuit breaker of one endpoint, shared by all subscriptions that push there."""

    def __init__(self) -> None:
        self.breaker = CircuitBreaker()
        self.listeners: set[Callable[[], None]] = set()
        """Called when the breaker closes."""
        self.refusal = ""
        """Why the egress policy refused the endpoint, if that was the last outcome."""

    def state(self, now: float) -> BreakerState:
        """Return the state of the breaker."""
        return self.breaker.state(now)

    def record_success(self) -> None:
        """Close the breaker, and call the listeners if it was open."""
        if self.breaker.open_until is not None or self.breaker.failures:
            was_open = self.breaker.open_until is not None
            self.breaker, self.refusal = self.breaker.record_success(), ""
            if was_open:
                for listener in [*self.listeners]:
                    listener()

    def record_failure(self, now: float) -> None:
        """Count a failure."""
        self.breaker = self.breaker.record_failure(now, random_jitter())

    def pause(self, now: float, seconds: float) -> None:
        """Open the breaker for the pause that the endpoint asks for."""
        self.breaker = self.breaker.pause(now, seconds)


@dataclass(frozen=True, slots=True)
class ConcurrencyWindow:
    """How many pushes may be in flight. `round` counts how often the window shrank."""

    size: float = INITIAL_WINDOW
    threshold: float = LARGEST_WINDOW
    round: int = 0

    @property
    def limit(self) -> int:
        """The number of pushes that may be in flight."""
        return int(self.size)

    def record_success(self, in_flight: int) -> "ConcurrencyWindow":
        """Grow after a success while `in_flight` were in flight, if at least half of the window was in use.

        >>> ConcurrencyWindow(4, 8).record_success(4), ConcurrencyWindow(8, 8).record_success(2).size
        (ConcurrencyWindow(size=5, threshold=8, round=0), 8)
        >>> ConcurrencyWindow(8, 8).record_success(8)
        ConcurrencyWindow(size=8.125, threshold=8, round=0)
        """
        if in_flight * 2 < self.size or self.size >= LARGEST_WINDOW:
            return self
        grown = self.size + (1 if self.size < self.threshold else 1 / self.size)
        return ConcurrencyWindow(min(grown, LARGEST_WINDOW), self.threshold, self.round)

    def record_failure(self, sent_in_round: int) -> "ConcurrencyWindow":
        """Shrink after an attempt that failed, or was slow, unless it was sent before the window last shrank.

        >>> ConcurrencyWindow(20, 256).record_failure(0)
        ConcurrencyWindow(size=10.0, threshold=10.0, round=1)
        >>> ConcurrencyWindow(20, 256).record_failure(0).record_failure(0)
        ConcurrencyWindow(size=10.0, threshold=10.0, round=1)
        """
        if sent_in_round < self.round:
            return self
        smaller = max(self.size * _SHRINK_FACTOR, SMALLEST_WINDOW)
        return ConcurrencyWindow(smaller, smaller, self.round + 1)


def is_slow(seconds: float, deadline_seconds: float) -> bool:
    """Return whether an acknowledgement came so late that more concurrent pushes would miss the deadline."""
    return seconds > deadline_seconds * _SLOW_SHARE_OF_DEADLINE

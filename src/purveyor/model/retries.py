"""Delays between attempts, the circuit breaker, and the restart rule of everything that is supervised.

`Backoff` is the policy of delays and computes one from a number of failures. `RetryDelays` counts the failures of one
retry loop. Neither of them sleeps.

The restart rule serves the parts of `up`, the embedded server and the parts of the pipeline:

    a run ends unexpectedly ──▶ RestartAfter a delay that grows while runs are short
                            └──▶ GiveUp: another start would end the same way

A supervisor makes one `Restarts` for each thing that it runs, reports the end of each run to it, and acts on the
decision. `Restarts` starts nothing and reads no clock.

The circuit breaker of an endpoint is pure: each event returns the next value. Times are seconds of a monotonic clock.

    closed ──failures in a row──▶ open ──time──▶ half open ──success──▶ closed
                                   ▲                 └──failure──▶ open, for longer

While it is half open, one probe is in flight at a time.
"""

import math
import random
from collections import deque
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from purveyor.model.errors import InvalidConfig

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """Restart with growing pauses; give up after `max_deaths` deaths within `window_seconds`."""

    max_deaths: int | None = 5
    """None: any number of deaths is followed by another start."""
    window_seconds: float = 60.0
    """A run of at least this length was healthy: the pauses begin again with the first one."""
    first_pause_seconds: float = 0.1
    max_pause_seconds: float = 5.0

    def __post_init__(self) -> None:
        too_few = self.max_deaths is not None and self.max_deaths < 1
        if too_few or min(self.window_seconds, self.first_pause_seconds, self.max_pause_seconds) < 0:
            raise InvalidConfig(f"invalid restart policy {self}", fix="allow at least one death, and no negative times")

    @property
    def backoff(self) -> Backoff:
        """The pauses between short runs."""
        return Backoff(self.first_pause_seconds, self.max_pause_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """How one run ended, although the supervisor did not stop it."""

    ran_seconds: float
    was_ready: bool = True
    """It did its work, at least for a moment."""
    exit_code: int | None = None
    """Of a process: positive if it ended with an error, negative if a signal ended it."""
    is_permanent: bool = False
    """It failed with an error that no other attempt can cure."""


@dataclass(frozen=True, slots=True)
class RestartAfter:
    """Start it again after a pause."""

    pause_seconds: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Do not start it again, after this many deaths within the window of the policy."""

    deaths: int


class Restarts:
    """The deaths of one supervised thing, and the decision after each of them."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._was_ready = False
        self._short_runs = 0
        self._deaths = deque[float](maxlen=policy.max_deaths or 1)

    def decide(self, end: RunEnd, now: float) -> RestartAfter | GiveUp:
        """Decide what follows a run that ended at `now`, in seconds of a clock that never goes back.

        >>> restarts = Restarts(RestartPolicy(max_deaths=3, first_pause_seconds=0.1))
        >>> [restarts.decide(RunEnd(ran_seconds=1.0), now) for now in (10.0, 11.0, 12.0)]
        [RestartAfter(pause_seconds=0.1), RestartAfter(pause_seconds=0.2), GiveUp(deaths=3)]

        A process that exits with an error before it was ever ready says what is wrong, and would say the same again:

        >>> Restarts(RestartPolicy()).decide(RunEnd(ran_seconds=1.0, was_ready=False, exit_code=2), 10.0)
        GiveUp(deaths=1)
        """
        policy = self._policy
        self._was_ready = self._was_ready or end.was_ready
        self._deaths.append(now)
        recent = sum(1 for death in self._deaths if death >= now - policy.window_seconds)
        never_worked = not self._was_ready and end.exit_code is not None and end.exit_code > 0
        too_often = policy.max_deaths is not None and recent >= policy.max_deaths
        if end.is_permanent or never_worked or too_often:
            return GiveUp(recent)
        self._short_runs = 1 if end.ran_seconds >= policy.window_seconds else self._short_runs + 1
        return RestartAfter(policy.backoff.delay_seconds(self._short_runs))


__all__ = [
    "Backoff",
    "GiveUp",
    "RestartAfter",
    "RestartPolicy",
    "Restarts",
    "RetryDelays",
    "RunEnd",
    "random_jitter",
]


FAILURES_TO_OPEN: Final = 5
OPEN_BACKOFF: Final = Backoff(1.0, 60.0)
"""How long nothing is sent while a circuit breaker is open."""


def describe_progress(attempts: int, breaker: str, window: int) -> str:
    """Describe how push treats a failing endpoint.

    >>> describe_progress(1, "half open", 4)
    '1 attempt failed, circuit breaker half open, window 4'
    """
    return f"{attempts:,} attempt{'' if attempts == 1 else 's'} failed, circuit breaker {breaker}, window {window}"


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
    """Nothing is sent before this time; None while it is closed."""
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

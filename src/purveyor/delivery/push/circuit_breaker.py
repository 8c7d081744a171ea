"""The circuit breaker of an endpoint: while it is down no message is taken for it, and no attempt is spent. Pure.

    closed ──failures in a row──▶ open ──time──▶ half open ──success──▶ closed
                                   ▲                 └──failure──▶ open, for longer

Half open, one probe is under way at a time. An endpoint that asks for a pause (Retry-After) gets it in the same way.
Times are seconds of a clock that never goes back.
"""

from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

FAILURES: Final = 5
FIRST_PAUSE_SECONDS: Final = 1.0
LONGEST_PAUSE_SECONDS: Final = 60.0


class State(Enum):
    """See the module."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half open"


@dataclass(frozen=True, slots=True)
class Breaker:
    """What is known about an endpoint."""

    failures: int = 0
    """In a row, while it is closed."""
    openings: int = 0
    """How often it opened since the last success."""
    until: float | None = None
    """Nothing is sent before this time; None while it is closed."""
    probing: bool = False

    def state(self, now: float) -> State:
        """Which of the three."""
        if self.until is None:
            return State.CLOSED
        return State.OPEN if now < self.until else State.HALF_OPEN

    def may_send(self, now: float) -> bool:
        """Whether another message may be sent now; half open, only when no probe is under way."""
        return self.until is None or (now >= self.until and not self.probing)

    def probe(self) -> "Breaker":
        """A probe is on its way."""
        return replace(self, probing=True)

    def give_up_probe(self) -> "Breaker":
        """There was nothing to probe with, or nobody heard what became of it."""
        return replace(self, probing=False) if self.probing else self

    def succeeded(self) -> "Breaker":
        """It answered: closed."""
        return _CLOSED

    def failed(self, now: float, chance: float) -> "Breaker":
        """It did not answer, or said that it cannot. `chance` from 0 to 1 spreads the probes of many.

        What was still under way when it opened, and fails as well, changes nothing.
        """
        if self.until is not None and not self.probing:
            return self
        if self.until is None and self.failures + 1 < FAILURES:
            return Breaker(self.failures + 1)
        pause = min(FIRST_PAUSE_SECONDS * 2.0 ** min(self.openings, 16), LONGEST_PAUSE_SECONDS)
        return Breaker(0, self.openings + 1, now + pause * (0.5 + chance / 2))

    def asked_for_pause(self, now: float, seconds: float) -> "Breaker":
        """It wants to be left alone for so long; a longer pause that it has already stands."""
        until = now + seconds
        if self.until is not None and self.until >= until:
            return self
        return Breaker(0, max(self.openings, 1), until)


_CLOSED: Final = Breaker()

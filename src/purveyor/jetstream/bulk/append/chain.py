"""One target's chain in `append_once`: the rows under way, their answers, and what it means when it breaks. Pure.

Each row of a chain expects that the last message of the stream is the row before it, told by its message id. So when
one is not stored, for whatever reason, none behind it is: no gap can arise, and what somebody else writes ends the
chain. (A predicted sequence would not do: a message of somebody else takes the place of a row, and the row behind that
one finds just the sequence it expects.)

And when one is stored, all before it are: so it is enough to be told of one row in some hundred, and the server spares
the answers to the others. Where such a row was refused, nobody knows how far the rows before it came: that is asked.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from purveyor.jetstream.bulk.append.replies import KNOWN
from purveyor.jetstream.bulk.publish.acks import Ack, Refusal

MOST_FRUITLESS: Final = 2
"""Chains in a row that stored less than was sent in vain: then others write to this stream, and batches are better."""


@dataclass(slots=True, eq=False)
class Flight:
    """Neighbouring rows that were sent together; the last of them is answered, for all."""

    number: int
    """Of the reply subject."""
    start: int
    rows: int
    size: int
    sent_at: float
    answer: Ack | Refusal | None = None

    def hear(self, answer: Ack | Refusal) -> None:
        """The stream has the last row, or has refused it. One that it knew before says nothing of the rows before."""
        self.answer = KNOWN if isinstance(answer, Ack) and answer.duplicate and self.rows > 1 else answer


@dataclass(frozen=True, slots=True)
class Advance:
    """What a chain has come to: the row to go on with, how many were stored, and what broke it, if it is over."""

    next: int
    stored: int
    seen_at: float
    cause: Refusal | None = None


@dataclass(slots=True, eq=False)
class Chain:
    """The rows of a target that are under way, and how that went before."""

    flights: deque[Flight] = field(default_factory=deque)
    sent: int = 0
    """The first row that was not sent."""
    sequence: int = 0
    """Of the newest message that it stored."""
    fruitless: int = 0
    begun: bool = False
    """Whether its first row is stored. None is sent behind it before: it alone proves that this is the right stream."""
    broken: bool = False
    _gained: int = 0

    def begin(self, row: int) -> None:
        """Start anew with a row."""
        self.flights.clear()
        self.sent, self.sequence, self._gained = row, 0, 0
        self.begun = self.broken = False

    def advance(self) -> Advance | None:
        """What can be said now, if anything. That it is broken is said when all is answered that was sent."""
        stored, passed = 0, None
        while self.flights and isinstance(answer := self.flights[0].answer, Ack):
            passed = self.flights.popleft()
            self.begun = True
            if not answer.duplicate:
                stored += passed.rows
                self.sequence = max(self.sequence, answer.sequence)
        self._gained += stored
        self.broken = self.broken or any(isinstance(flight.answer, Refusal) for flight in self.flights)
        cause = self._cause() if self.broken else None
        if passed is None and cause is None:
            return None
        place = self.flights[0].start if passed is None else passed.start + passed.rows
        if cause is not None:
            self.flights.clear()
        return Advance(place, stored, 0.0 if passed is None else passed.sent_at, cause)

    def _cause(self) -> Refusal | None:
        """Why it is broken; None as long as something is not answered."""
        answers = [flight.answer for flight in self.flights]
        if None in answers:
            return None
        in_vain = sum(flight.rows for flight in self.flights if isinstance(flight.answer, Refusal))
        self.fruitless = self.fruitless + 1 if self._gained < in_vain else 0
        return next(answer for answer in answers if isinstance(answer, Refusal))

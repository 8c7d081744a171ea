"""One target's chain in `append_once`: the rows under way, their answers, and what it means when it breaks. Pure.

Each row of a chain expects that the last message of the stream is the row before it, told by its message id. So when
one is not stored, for whatever reason, none behind it is: no gap can arise, and what somebody else writes ends the
chain. (A predicted sequence would not do: a message of somebody else takes the place of a row, and the row behind that
one finds just the sequence it expects.)
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from purveyor.queues.bulk.acks import Refusal
from purveyor.queues.bulk.append_answers import is_conflict
from purveyor.queues.bulk.slices import Mask, Positions

MOST_FRUITLESS: Final = 2
"""Chains in a row that stored less than was sent in vain: then others write to this stream, and batches are better."""


@dataclass(slots=True, eq=False)
class Flight:
    """Neighbouring rows that were sent together, answered in order on one reply subject."""

    number: int
    """Of the reply subject; the answers to its rows count from here."""
    start: int
    rows: int
    size: int
    sent_at: float
    heard: int = 0
    there: Mask = field(init=False)
    """Which rows the stream has, by its answers."""
    duplicates: set[int] = field(default_factory=set)
    refusals: dict[int, Refusal] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.there = np.zeros(self.rows, np.bool_)

    @property
    def answered(self) -> bool:
        """Whether nothing more is to be heard of it."""
        return self.heard >= self.rows

    def next_answers(self, count: int) -> Positions:
        """The numbers of the rows that the next so many answers are for; -1 for more than were asked for."""
        places = self.heard + np.arange(count)
        self.heard += count
        return np.where(places < self.rows, self.number + places, -1)


@dataclass(frozen=True, slots=True)
class Advance:
    """What a chain has come to: the row to go on with, how many were stored, and what broke it, if it is over."""

    next: int
    stored: int
    seen_at: float
    cause: Refusal | None = None
    passed: bool = False
    """It broke only because a row was known already, and that row is passed: there is nothing to ask."""


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
    _after_duplicate: bool = False

    def begin(self, row: int) -> None:
        """Start anew with a row."""
        self.flights.clear()
        self.sent, self.sequence = row, 0
        self.begun = self.broken = self._after_duplicate = False

    def advance(self) -> Advance | None:
        """What can be said now, if anything: after a break nothing, until all is answered that was sent."""
        if not self.broken:
            self.broken = any(flight.refusals for flight in self.flights)
        if self.broken:
            return self._end() if all(flight.answered for flight in self.flights) else None
        said: Advance | None = None
        while self.flights and self.flights[0].answered:
            flight = self.flights.popleft()
            stored = flight.rows - len(flight.duplicates) + (said.stored if said else 0)
            said = Advance(flight.start + flight.rows, stored, flight.sent_at)
            self._after_duplicate = flight.rows - 1 in flight.duplicates
            self.begun = True
        return said

    def _end(self) -> Advance:
        """The chain is broken and all is heard: what counts are the rows in front of the first that was refused."""
        first, stored, waste, later = self.flights[0].start, 0, 0, False
        place, seen_at = first, 0.0
        cause: Refusal | None = None
        for flight in self.flights:
            waste += len(flight.refusals)
            if cause is not None:
                later |= bool(flight.there.any())
                continue
            count = min(flight.refusals, default=flight.rows)
            before = sum(row < count for row in flight.duplicates)
            place, stored, cause = flight.start + count, stored + count - before, flight.refusals.get(count)
            if count:
                seen_at, self._after_duplicate = flight.sent_at, count - 1 in flight.duplicates
            later = cause is not None and bool(flight.there[count:].any())
        assert cause is not None
        self.flights.clear()
        self.fruitless = self.fruitless + 1 if place - first < waste else 0
        passed = self._after_duplicate and is_conflict(cause) and not later
        return Advance(place, stored, seen_at, cause, passed)

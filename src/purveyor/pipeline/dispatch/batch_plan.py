"""Who takes part in a batch, and from which position on: the decision before anything is written. Pure.

A queue must never be written behind a gap, because what lies in a gap would then count as written. So a subscription
takes part only if everything before the batch is in its queue. That is so for one that this dispatcher never left out.
One that was suspended has its first missing position in the registry; a small gap before the batch is filled first, a
large one is for the catch-up job, which moves that position on until the gap is small.

A suspension for want of understanding (`Suspension.group`) holds back only a dispatcher that does not understand the
record. One that does takes the subscription in again, with the gap before the batch.

Each group of dispatchers keeps its own account: another group may be ahead of this one, or behind.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from purveyor.model.registration import DispatchState, RecordState
from purveyor.queues.registry import Registered, Snapshot, Unreadable

SMALL_GAP: Final = 20_000
"""Gaps of so many positions are filled by the dispatcher itself."""
KEPT_WITHIN: Final = 10_000
"""So near behind the dispatcher the noted position of a subscription that was suspended once is kept, so that a
restart finds at most a small gap."""


@dataclass(frozen=True, slots=True)
class Span:
    """Positions from first to last, both included."""

    first: int
    last: int

    def __len__(self) -> int:
        return max(self.last - self.first + 1, 0)


@dataclass(frozen=True, slots=True)
class Seat:
    """A subscription that takes part: rows at or below `floor` are not for it, or are in its queue already."""

    found: Registered
    floor: int

    @property
    def name(self) -> str:
        """Its name."""
        return self.found.name

    @property
    def incarnation(self) -> str:
        """Which subscription of that name."""
        return self.found.incarnation

    @property
    def hidden(self) -> tuple[str, ...]:
        """The fields that it never sees."""
        return self.found.record.definition.hidden_fields


@dataclass(frozen=True, slots=True)
class Roster:
    """Who takes part in a batch. Those in `behind` only after the gap before it is filled."""

    seats: tuple[Seat, ...] = ()
    behind: tuple[Seat, ...] = ()
    far_behind: tuple[Registered, ...] = ()
    """Those that were not understood for so long that a catch-up job has to fill the gap."""

    @property
    def gap_first(self) -> int:
        """The first position that one of those behind is missing."""
        return min(seat.floor + 1 for seat in self.behind)


def call(snapshot: Snapshot, covered: Mapping[str, int], batch: Span) -> Roster:
    """Decide who takes part. `covered` tells, by incarnation, up to where this dispatcher has written a queue."""
    seats, behind, far_behind = [], [], []
    for found in snapshot.dispatched.values():
        begin = found.record.begin
        if begin is None or begin >= batch.last or not takes_part(found):
            continue
        floor = max(begin, _written(found.incarnation, found.dispatch, covered, batch))
        if floor >= batch.first - 1:
            # Told only where it leaves out a row: so what is told of a subscription is the same with every batch.
            seats.append(Seat(found, floor if floor >= batch.first else 0))
        elif batch.first - 1 - floor <= SMALL_GAP:
            behind.append(Seat(found, floor))
        elif found.suspended is not None:
            far_behind.append(found)
    return Roster(tuple(seats), tuple(behind), tuple(far_behind))


def takes_part(found: Registered) -> bool:
    """Whether its queue may be written at all by a dispatcher that understands its record."""
    halted = found.suspended is not None and found.suspended.group is None
    return found.record.state is not RecordState.DELETING and not halted


def first_missing(found: Registered | Unreadable, covered: Mapping[str, int], batch: Span) -> int:
    """The position at which a subscription is suspended that this dispatcher does not understand."""
    begin = found.record.begin if isinstance(found, Registered) else found.begin
    return max(begin or 0, _written(found.incarnation, found.dispatch, covered, batch)) + 1


def note_due(found: Registered, covered: int, group: str) -> bool:
    """Whether the registry must be told how far a queue was written. One that was never suspended needs no note."""
    if found.dispatch is None:
        return False
    understood_again = found.suspended is not None and found.suspended.group == group
    return understood_again or covered + 1 - found.dispatch.next >= KEPT_WITHIN


def _written(incarnation: str | None, noted: DispatchState | None, covered: Mapping[str, int], batch: Span) -> int:
    """The position up to which a queue holds everything that is for it."""
    up_to = noted.next - 1 if noted is not None else 0
    if incarnation is not None and incarnation in covered:
        return max(up_to, covered[incarnation])
    return up_to if noted is not None else batch.first - 1

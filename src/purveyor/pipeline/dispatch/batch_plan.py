"""Plans a batch before anything is written: which subscriptions take part, and from which position on. Pure.

The dispatcher must never write to a queue behind a gap, because the positions in the gap would then count as written.
So a subscription takes part only if everything before the batch is in its queue. That holds for one that this
dispatcher never left out. One that was suspended has its first missing position in the registry; the dispatcher fills a
small gap before the batch, and leaves a large one to the catch-up job, which moves that position on until the gap is
small.

A suspension because of an unreadable record (`Suspension.group`) holds back only a dispatcher that does not understand
the record. One that does lets the subscription take part again, with the gap before the batch.

Each group of dispatchers counts for itself: another group may be ahead of this one, or behind.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from purveyor.model.registration import DispatchState, RecordState
from purveyor.pipeline.archive.layout import PositionRange
from purveyor.queues.registry import Registered, Snapshot, Unreadable

SMALL_GAP: Final = 20_000
"""The dispatcher itself fills gaps of up to this many positions."""
NOTE_INTERVAL_POSITIONS: Final = 10_000
"""The noted position of a subscription that was once suspended stays this close behind the dispatcher, so that a
restart finds at most a small gap."""


@dataclass(frozen=True, slots=True)
class PlannedTarget:
    """A subscription that takes part: rows at or below `floor` are not for it, or are already in its queue."""

    found: Registered
    floor: int

    @property
    def name(self) -> str:
        """The name of the subscription."""
        return self.found.name

    @property
    def incarnation(self) -> str:
        """The incarnation of the subscription."""
        return self.found.incarnation

    @property
    def hidden(self) -> tuple[str, ...]:
        """The fields that are hidden from the subscription."""
        return self.found.record.definition.hidden_fields


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The targets of a batch. Those in `behind` take part after the gap before the batch is filled."""

    targets: tuple[PlannedTarget, ...] = ()
    behind: tuple[PlannedTarget, ...] = ()
    far_behind: tuple[Registered, ...] = ()
    """Subscriptions that need a catch-up job, because the dispatcher did not understand their record for too many
    positions."""

    @property
    def gap_first(self) -> int:
        """The first position that one of the targets behind is missing."""
        return min(target.floor + 1 for target in self.behind)


def plan_batch(snapshot: Snapshot, written_up_to: Mapping[str, int], batch: PositionRange) -> BatchPlan:
    """Plan a batch.

    `written_up_to` has, by incarnation, the position up to which this dispatcher has written a queue.
    """
    targets, behind, far_behind = [], [], []
    for found in snapshot.dispatched.values():
        begin = found.record.begin
        if begin is None or begin >= batch.last or not is_dispatchable(found):
            continue
        floor = max(begin, _complete_up_to(found.incarnation, found.dispatch, written_up_to, batch))
        if floor >= batch.first - 1:
            # Set only where it excludes a row: so the specification of a target is the same with every batch.
            targets.append(PlannedTarget(found, floor if floor >= batch.first else 0))
        elif batch.first - 1 - floor <= SMALL_GAP:
            behind.append(PlannedTarget(found, floor))
        elif found.suspended is not None:
            far_behind.append(found)
    return BatchPlan(tuple(targets), tuple(behind), tuple(far_behind))


def is_dispatchable(found: Registered) -> bool:
    """Return whether a dispatcher that understands the record may write to the queue."""
    halted = found.suspended is not None and found.suspended.group is None
    return found.record.state is not RecordState.DELETING and not halted


def first_missing_position(
    found: Registered | Unreadable, written_up_to: Mapping[str, int], batch: PositionRange
) -> int:
    """Return the position at which a subscription is suspended that this dispatcher does not understand."""
    begin = found.record.begin if isinstance(found, Registered) else found.begin
    return max(begin or 0, _complete_up_to(found.incarnation, found.dispatch, written_up_to, batch)) + 1


def is_note_due(found: Registered, written_up_to: int, group: str) -> bool:
    """Return whether the registry must get the progress of a queue. A queue that was never suspended needs no note."""
    if found.dispatch is None:
        return False
    understood_again = found.suspended is not None and found.suspended.group == group
    return understood_again or written_up_to + 1 - found.dispatch.next >= NOTE_INTERVAL_POSITIONS


def _complete_up_to(
    incarnation: str | None, noted: DispatchState | None, written_up_to: Mapping[str, int], batch: PositionRange
) -> int:
    """Return the position up to which a queue holds everything that is for it."""
    up_to = noted.next - 1 if noted is not None else 0
    if incarnation is not None and incarnation in written_up_to:
        return max(up_to, written_up_to[incarnation])
    return up_to if noted is not None else batch.first - 1

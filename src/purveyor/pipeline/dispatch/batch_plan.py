"""Which subscriptions take part in a batch, and from which position on: the snapshot of subscriptions, and the plan.

**The snapshot** is updated with two small requests per batch. A subscription begins at the position of its control
event. The API stores the record, then the event, then the event's position in the record; the dispatcher may reach the
event before that last step, or find that it never happened. So before each batch it asks for the newest control event:
every one up to the end of the batch is settled in the registry when the snapshot is taken, and no event behind it can
be missed. It remembers a control event that it does not understand: the subscription may begin there (see
`suspensions`).

**A change** of what a subscription selects is settled in the same way. The selection in force is decided by position,
not by what the registry has now: a batch that spans changes is divided behind the position of each (`divide`), and each
part is written with the selections in force there (`in_force`). So a batch that runs again, a gap that is filled later,
and a dispatcher that is far behind all write the same rows.

**The plan** is made before anything is written, by pure functions. The dispatcher must never write to a queue behind a
gap, because the positions in the gap would then count as written. So a subscription takes part only if everything
before the batch is in its queue. That holds for one that this dispatcher never left out. One that was suspended has its
first missing position in the registry; the dispatcher fills a small gap before the batch, and leaves a large one to the
catch-up job, which moves that position on until the gap is small.

A suspension because of an unreadable record (`Suspension.group`) holds back only a dispatcher that does not understand
the record. One that does lets the subscription take part again, with the gap before the batch.

Each group of dispatchers counts for itself: another group may be ahead of this one, or behind.
"""

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, assert_never

from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk import ReadOptions, read_range
from purveyor.jetstream.bulk.net.pool import request_api
from purveyor.model import json_fields
from purveyor.model.control_events import CONTROL_EVENT, CONTROL_SUBJECT, ControlEvent, ControlKind
from purveyor.model.errors import InvalidInput, PurveyorError, UnknownMessage, UnknownSubscription, UnreadableRecord
from purveyor.model.registration import DispatchState, RecordState
from purveyor.pipeline.archive.layout import PositionRange
from purveyor.queues.client import Queues
from purveyor.queues.registry import Registered, Registry, Snapshot, Unreadable
from purveyor.queues.subscription_queues import remove_queue
from purveyor.queues.sync_client import read_subscriptions, run_sync, settle_begin, settle_change

STREAM: Final = "stream:incoming"
ABANDONED_SECONDS: Final = 10.0
"""After this time the dispatcher completes a deletion that another process began."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UnreadableControlEvent:
    """A control event that the dispatcher does not understand. `name` is None if even that cannot be read."""

    name: str | None
    position: int
    reason: str


class SubscriptionTracker:
    """The subscriptions as of the last update."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._control_seen = 0
        self._deleting: dict[str, float] = {}
        self.snapshot = Snapshot()
        self.unreadable_control_events: list[UnreadableControlEvent] = []

    def update(self) -> Snapshot:
        """Read all subscriptions, with every beginning that lies before now."""
        newest = self._newest_control()
        self.refresh()
        if newest > self._control_seen:
            self._settle(self._control_seen + 1, newest)
            self._control_seen = newest
        self._end_deletions()
        return self.snapshot

    def refresh(self) -> Snapshot:
        """Read what changed."""
        self.snapshot = read_subscriptions(self._address, self.snapshot)
        return self.snapshot

    def find_current(self, name: str, incarnation: str) -> Registered | None:
        """Return a subscription as it is now, if it is still that incarnation and not being deleted."""
        found = self.refresh().dispatched.get(name)
        if found is None or found.incarnation != incarnation or found.record.state is RecordState.DELETING:
            return None
        return found

    def _newest_control(self) -> int:
        try:
            answer = request_api(self._address, f"STREAM.MSG.GET.{STREAM}", {"last_by_subj": CONTROL_SUBJECT})
        except UnknownMessage:
            return 0
        return int(answer["message"]["seq"])

    def _settle(self, first: int, last: int) -> None:
        settled = False
        options = ReadOptions(subjects=(CONTROL_SUBJECT,), columns=("sequence", "data"))
        for batch in read_range(self._address, STREAM, first, last, options):
            for row in batch.to_pylist():
                settled |= self._settle_one(row["sequence"], row["data"])
        if settled:
            self.refresh()

    def _settle_one(self, position: int, data: bytes) -> bool:
        """Note where a subscription begins or changes; return whether the registry has to be read again."""
        try:
            event = CONTROL_EVENT.read(data, ControlEvent.from_json)
        except UnreadableRecord as error:
            _log.error("the control event at position %d cannot be read: %s", position, error)
            reason = f"its control event at position {position} is not understood: {error.message}"
            self.unreadable_control_events.append(UnreadableControlEvent(_subscription_name_in(data), position, reason))
            return False
        found = self.snapshot.dispatched.get(event.name)
        if found is None or found.incarnation != event.incarnation:
            return False  # deleted since: the registry has that
        match event.kind:
            case ControlKind.ADDED:
                if found.record.begin is not None:
                    return False
                with contextlib.suppress(UnknownSubscription):  # deleted, or written again by a newer program
                    settle_begin(self._address, found, position)
                return True
            case ControlKind.CHANGED:
                pending = found.record.pending
                if event.change is None or pending is None or pending.change != event.change.change:
                    return False  # settled already, or void
                settle_change(self._address, event.name, event.incarnation, pending.change, position)
                return True
            case ControlKind.DELETED:
                return False
            case _:
                assert_never(event.kind)

    def _end_deletions(self) -> None:
        """Complete deletions that were begun and abandoned: otherwise their queue and keys would stay forever."""
        deleting = {
            found.incarnation: found
            for found in self.snapshot.subscriptions.values()
            if found.record.state is RecordState.DELETING
        }
        now = time.monotonic()
        self._deleting = {incarnation: self._deleting.get(incarnation, now) for incarnation in deleting}
        for incarnation, since in self._deleting.items():
            if now - since >= ABANDONED_SECONDS:
                found = deleting[incarnation]
                try:
                    run_sync(self._address, partial(_end_deletion, found))
                except PurveyorError as error:  # another process completes it, or the next update does
                    _log.warning("the deletion of subscription %s could not be ended: %s", found.name, error)
                else:
                    _log.info("ended the deletion of subscription %s", found.name)


def _subscription_name_in(data: bytes) -> str | None:
    """Return the subscription that a control event is about, also of an event that cannot be read otherwise."""
    try:
        name = json_fields.parse(data, CONTROL_EVENT.what).get("name")
    except InvalidInput:
        return None
    return name if isinstance(name, str) else None


async def _end_deletion(found: Registered, queues: Queues) -> None:
    registry = await Registry.open(queues)
    await remove_queue(queues, found.name, found.incarnation)
    await registry.remove(found)


SMALL_GAP_POSITIONS: Final = 20_000
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
        elif batch.first - 1 - floor <= SMALL_GAP_POSITIONS:
            behind.append(PlannedTarget(found, floor))
        elif found.suspended is not None:
            far_behind.append(found)
    return BatchPlan(tuple(targets), tuple(behind), tuple(far_behind))


def divide(positions: PositionRange, targets: Sequence[PlannedTarget]) -> list[PositionRange]:
    """Divide positions behind each change of a target, so that one selection is in force in each part. Pure."""
    cuts = {cut for each in targets if each.found.record.past for cut in _changes(each, positions)}
    firsts = [positions.first, *(cut + 1 for cut in sorted(cuts))]
    lasts = [*(first - 1 for first in firsts[1:]), positions.last]
    return [PositionRange(first, last) for first, last in zip(firsts, lasts, strict=True)]


def _changes(target: PlannedTarget, positions: PositionRange) -> list[int]:
    return target.found.record.changes_in(positions.first, positions.last)


def in_force(targets: Sequence[PlannedTarget], position: int) -> tuple[PlannedTarget, ...]:
    """Return the targets with the selections in force at a position. Pure."""
    return tuple(_in_force(each, position) if each.found.record.past else each for each in targets)


def _in_force(target: PlannedTarget, position: int) -> PlannedTarget:
    record = target.found.record
    definition = record.definition_at(position)
    if definition is record.definition:
        return target
    return replace(target, found=replace(target.found, record=replace(record, definition=definition)))


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

"""The selection of each audited subscription by position, from the control events in the log.

The registry keeps what was in force before a change only until every reader has passed the change. The log keeps all
control events, so the audit judges each position by the definition that was in force there. Where the registry still
has a past definition, that one counts: earlier versions of Purveyor changed definitions without a control event.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from purveyor.model.control_events import CONTROL_EVENT, ControlEvent, ControlKind
from purveyor.model.errors import UnreadableRecord
from purveyor.model.registration import Record
from purveyor.model.subscription import Subscription
from purveyor.pipeline.archive.layout import CONTROL
from purveyor.pipeline.archive.reader import ArchiveSource, events

_NO_END: Final = 2**62


@dataclass(frozen=True, slots=True)
class ControlEventAt:
    """A control event and its position."""

    position: int
    event: ControlEvent


@dataclass(frozen=True, slots=True)
class SelectionRange:
    """The selection from behind `after` up to `until`."""

    after: int
    until: int
    definition: Subscription


def read_control_events(spark: SparkSession, archive: ArchiveSource, first: int, last: int) -> list[ControlEventAt]:
    """Return the control events of a range in their order. One that is not understood is about a record that is not."""
    rows = events(spark, archive, first, last).where(f.col("kind") == CONTROL).select("position", "data").collect()
    found = []
    for row in sorted(rows, key=lambda row: int(row.position)):
        try:
            found.append(ControlEventAt(row.position, CONTROL_EVENT.read(bytes(row.data), ControlEvent.from_json)))
        except UnreadableRecord:
            continue
    return found


def selection_ranges(record: Record, log: Sequence[ControlEventAt], dispatched: int) -> list[SelectionRange]:
    """Return what a subscription selected, in the order of positions. Pure.

    A change counts at the first position of its event, unless a later change has voided it. A dispatcher settles a
    change before it passes its event. So for events up to `dispatched`, a position that was read before the record, the
    record knows more than the log: a change that is still pending has no effect there. Behind it the log may know more.
    """
    own = [each for each in log if each.event.incarnation == record.incarnation]
    changed = [(each.position, each.event.change) for each in own if each.event.change is not None]
    void = {each for _, change in changed for each in change.voids}
    if record.pending is not None:
        void |= {*record.pending.voids}
        void |= {change.change for at, change in changed if at <= dispatched and change.change == record.pending.change}
    first = {change.change: (at, change) for at, change in reversed(changed) if change.change not in void}
    behind = {at: change.selection.for_dispatch(record.name) for at, change in first.values()}
    before = {each.until: each.selection.for_dispatch(record.name) for each in record.past}
    added = next((each.event.definition for each in own if each.event.kind is ControlKind.ADDED), None)
    positions = sorted({*behind, *before})
    ranges = []
    after, current = record.begin or 0, added or record.definition
    for position in positions:
        ranges.append(SelectionRange(after, position, before.get(position, current)))
        after, current = position, behind.get(position, record.definition)
    is_newer = bool(positions) and positions[-1] > dispatched
    return [*ranges, SelectionRange(after, _NO_END, current if is_newer else record.definition)]

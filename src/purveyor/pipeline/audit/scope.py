"""The inputs of an audit: subscriptions, what each selected, how far it was dispatched, and what is acknowledged.

The order of reading makes the audit of a running system right: first the position of dispatch, then the queues, and
last the acknowledgements. So a message that moves on in the meantime is seen in one place or the next, never in none.

The registry keeps what was in force before a change only until every reader has passed the change. The log keeps all
control events, so the audit judges each position by the definition that was in force there. Where the registry still
has a past definition, that one counts: earlier versions of Purveyor changed definitions without a control event.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk import read_range
from purveyor.jetstream.bulk.net.pool import request_api
from purveyor.model.control_events import CONTROL_EVENT, ControlEvent, ControlKind
from purveyor.model.delivery_state import AckSummary, decode_summary
from purveyor.model.errors import NotFound, UnknownStream, UnknownSubscription, UnreadableRecord
from purveyor.model.registration import Record
from purveyor.model.subscription import Subscription
from purveyor.pipeline.archive.layout import CONTROL
from purveyor.pipeline.archive.reader import ArchiveSource, events
from purveyor.queues.catalogue import RECEIPTS, subscription_queue
from purveyor.queues.registry import ACKNOWLEDGED, RecordState, Registered
from purveyor.queues.sync_client import read_subscriptions

_NOT_DISPATCHERS: Final = ("archive", RECEIPTS)
"""The durables of `incoming` that belong to no dispatcher."""
_NO_END: Final = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """One subscription, before its queue is read."""

    registered: Registered
    begin: int
    reached: int
    dispatched: int
    first_sequence: int
    """The first sequence that its queue ever had."""
    ever_written: int | None
    """How many messages its queue took since it was created; None if there is no queue."""

    @property
    def name(self) -> str:
        """The name of the subscription."""
        return self.registered.name


def find_scopes(address: Address, dispatched: int, names: Sequence[str] | None) -> tuple[list[Scope], dict[str, str]]:
    """Return the named subscriptions, or all that have begun; raise UnknownSubscription for an unknown name.

    Also return, by name, why this program does not understand a subscription: such a one cannot be audited.
    """
    snapshot = read_subscriptions(address)
    known, unreadable = snapshot.subscriptions, snapshot.unreadable
    for name in names or ():
        if name not in known and name not in unreadable:
            raise UnknownSubscription(f"no subscription {name!r}", fix="`purveyor subscription list` lists them")
    wanted = names if names is not None else [*known, *unreadable]
    chosen = [known[name] for name in wanted if name in known]
    found = [
        _scope(address, each, each.record.begin, dispatched)
        for each in chosen
        if each.record.begin is not None and each.record.state is not RecordState.DELETING
    ]
    return found, {name: unreadable[name].reason for name in wanted if name in unreadable}


def _scope(address: Address, registered: Registered, begin: int, dispatched: int) -> Scope:
    first_sequence, ever_written = queue_extent(address, registered.name)
    return Scope(
        registered=registered,
        begin=begin,
        reached=reached(registered, dispatched),
        dispatched=dispatched,
        first_sequence=first_sequence,
        ever_written=ever_written,
    )


def reached(registered: Registered, dispatched: int) -> int:
    """Return the last position up to which everything must be in the queue. Pure.

    The queue of a suspended subscription is written up to the noted position, and perhaps further, which the queue
    itself shows: no queue is ever written behind a gap.
    """
    return dispatched if registered.dispatch is None else min(dispatched, registered.dispatch.next - 1)


def dispatched_until(address: Address, stream: str) -> int:
    """Return the position of the dispatcher that is furthest: what one of them wrote is written. 0 if there is none."""
    try:
        names = request_api(address, f"CONSUMER.NAMES.{stream}").get("consumers") or []
        infos = [
            request_api(address, f"CONSUMER.INFO.{stream}.{name}") for name in names if name not in _NOT_DISPATCHERS
        ]
    except NotFound:
        return 0
    return max((int(info["ack_floor"]["stream_seq"]) for info in infos), default=0)


def queue_extent(address: Address, name: str) -> tuple[int, int | None]:
    """Return the first sequence that a queue ever had, and how many messages it took; None if it does not exist."""
    try:
        info = request_api(address, f"STREAM.INFO.{subscription_queue(name).stream}")
    except UnknownStream:
        return 1, None
    first = max(int(info["config"].get("first_seq") or 1), 1)
    return first, int(info["state"]["last_seq"]) - first + 1


def acknowledged(address: Address) -> tuple[Mapping[tuple[str, str], AckSummary], dict[str, str]]:
    """Return the acknowledgements by name and incarnation; and by name why a record is not understood."""
    stream, prefix = f"KV_{ACKNOWLEDGED}", f"$KV.{ACKNOWLEDGED}."
    found: dict[tuple[str, str], AckSummary] = {}
    unreadable: dict[str, str] = {}
    try:
        last = int(request_api(address, f"STREAM.INFO.{stream}")["state"]["last_seq"])
        for batch in read_range(address, stream, 1, last):
            for subject, data in zip(batch["subject"].to_pylist(), batch["data"].to_pylist(), strict=True):
                name = subject.removeprefix(prefix)
                try:
                    value = decode_summary(data) if data else None
                except UnreadableRecord as error:
                    unreadable[name] = error.message
                else:
                    if value is not None:
                        found[name, value.incarnation] = value
    except UnknownStream:
        pass
    return found, unreadable


def count_dead_letters(address: Address, stream: str, pattern: str) -> Mapping[str, int]:
    """Count the dead letters by subject."""
    found: dict[str, int] = {}
    try:
        while True:
            answer = request_api(address, f"STREAM.INFO.{stream}", {"subjects_filter": pattern, "offset": len(found)})
            page = answer["state"].get("subjects") or {}
            found |= page
            if not page or len(found) >= int(answer.get("total", 0)):
                return found
    except UnknownStream:
        return found


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

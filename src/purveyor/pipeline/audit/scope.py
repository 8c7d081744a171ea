"""What an audit stands on: which subscriptions, how far each was dispatched, and what it has acknowledged.

The order of reading makes an audit of a running system right: how far dispatch has come is asked first, the queues are
read after that, and what was acknowledged is asked last. So a message that moves on meanwhile is seen in one place or
the next, never in none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk import read_range
from purveyor.jetstream.bulk.net.api_request import ask
from purveyor.model.ack_ranges import DELIVERY_STATE, Acknowledged
from purveyor.model.errors import NotFound, UnknownStream, UnknownSubscription, UnreadableRecord
from purveyor.queues.catalogue import subscription_queue
from purveyor.queues.registry import ACKNOWLEDGED, RecordState, Registered, read_subscriptions

ARCHIVE: Final = "archive"
"""The durable of `incoming` that is no dispatcher's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """One subscription, before its queue is read."""

    registered: Registered
    begin: int
    reached: int
    dispatched: int
    first_sequence: int
    """Where its queue begins to count."""
    ever_written: int | None
    """How many messages its queue took since it was made; None when there is no queue."""

    @property
    def name(self) -> str:
        """Its name."""
        return self.registered.name


def scopes(address: Address, dispatched: int, names: Sequence[str] | None) -> tuple[list[Scope], dict[str, str]]:
    """Those asked for, or all that have begun; UnknownSubscription names one that is not there.

    And of those that this program does not understand, which cannot be audited, the reason by name.
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
    """The last position up to which all must be in the queue. Pure.

    One that was suspended is written up to the position noted for it, and perhaps further, which its queue tells: no
    queue is ever written behind a gap.
    """
    return dispatched if registered.dispatch is None else min(dispatched, registered.dispatch.next - 1)


def dispatched_until(address: Address, stream: str) -> int:
    """How far the first of the dispatchers has come: what one of them wrote is written. 0 if there is none."""
    try:
        names = ask(address, f"CONSUMER.NAMES.{stream}").get("consumers") or []
        infos = [ask(address, f"CONSUMER.INFO.{stream}.{name}") for name in names if name != ARCHIVE]
    except NotFound:
        return 0
    return max((int(info["ack_floor"]["stream_seq"]) for info in infos), default=0)


def queue_extent(address: Address, name: str) -> tuple[int, int | None]:
    """The first sequence that a queue ever had, and how many messages it ever took; None if it is not there."""
    try:
        info = ask(address, f"STREAM.INFO.{subscription_queue(name).stream}")
    except UnknownStream:
        return 1, None
    first = max(int(info["config"].get("first_seq") or 1), 1)
    return first, int(info["state"]["last_seq"]) - first + 1


def acknowledged(address: Address) -> tuple[Mapping[tuple[str, str], Acknowledged], dict[str, str]]:
    """What is acknowledged, by name and incarnation; and why, by name, where that is not understood."""
    stream, prefix = f"KV_{ACKNOWLEDGED}", f"$KV.{ACKNOWLEDGED}."
    found: dict[tuple[str, str], Acknowledged] = {}
    unreadable: dict[str, str] = {}
    try:
        last = int(ask(address, f"STREAM.INFO.{stream}")["state"]["last_seq"])
        for batch in read_range(address, stream, 1, last):
            for subject, data in zip(batch["subject"].to_pylist(), batch["data"].to_pylist(), strict=True):
                name = subject.removeprefix(prefix)
                try:
                    value = DELIVERY_STATE.read(data, Acknowledged.from_json) if data else None
                except UnreadableRecord as error:
                    unreadable[name] = error.message
                else:
                    if value is not None:
                        found[name, value.incarnation] = value
    except UnknownStream:
        pass
    return found, unreadable


def letters(address: Address, stream: str, pattern: str) -> Mapping[str, int]:
    """How many dead letters there are, by subject."""
    found: dict[str, int] = {}
    try:
        while True:
            answer = ask(address, f"STREAM.INFO.{stream}", {"subjects_filter": pattern, "offset": len(found)})
            page = answer["state"].get("subjects") or {}
            found |= page
            if not page or len(found) >= int(answer.get("total", 0)):
                return found
    except UnknownStream:
        return found

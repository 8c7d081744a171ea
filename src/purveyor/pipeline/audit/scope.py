"""The inputs of an audit: which subscriptions, how far each was dispatched, and what is acknowledged.

The order of reading makes the audit of a running system right: first the position of dispatch, then the queues, and
last the acknowledgements. So a message that moves on in the meantime is seen in one place or the next, never in none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk import read_range
from purveyor.jetstream.bulk.net.pool import request_api
from purveyor.model.delivery_state import AckSummary, decode_summary
from purveyor.model.errors import NotFound, UnknownStream, UnknownSubscription, UnreadableRecord
from purveyor.queues.catalogue import RECEIPTS, subscription_queue
from purveyor.queues.registry import ACKNOWLEDGED, RecordState, Registered
from purveyor.queues.sync_client import read_subscriptions

_NOT_DISPATCHERS: Final = ("archive", RECEIPTS)
"""The durables of `incoming` that belong to no dispatcher."""


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

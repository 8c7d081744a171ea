"""What an audit stands on: which subscriptions, how far each was dispatched, and what it has acknowledged.

The order of reading makes an audit of a running system right: how far dispatch has come is asked first, the queues are
read after that, and what was acknowledged is asked last. So a message that moves on meanwhile is seen in one place or
the next, never in none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from purveyor.model import jsontext
from purveyor.model.done import Acknowledged
from purveyor.model.errors import InvalidInput, NotFound, UnknownStream, UnknownSubscription
from purveyor.queues.address import Address
from purveyor.queues.bulk import read_range
from purveyor.queues.bulk.ask import ask
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


def scopes(address: Address, dispatched: int, names: Sequence[str] | None) -> list[Scope]:
    """Those asked for, or all that have begun; UnknownSubscription names one that is not there."""
    known = read_subscriptions(address).subscriptions
    for name in names or ():
        if name not in known:
            raise UnknownSubscription(f"no subscription {name!r}", fix="`purveyor subscription list` lists them")
    chosen = [known[name] for name in names] if names is not None else list(known.values())
    return [
        _scope(address, each, each.record.begin, dispatched)
        for each in chosen
        if each.record.begin is not None and each.record.state is not RecordState.DELETING
    ]


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


def acknowledged(address: Address) -> Mapping[tuple[str, str], Acknowledged]:
    """What is acknowledged, by name and incarnation."""
    stream, prefix = f"KV_{ACKNOWLEDGED}", f"$KV.{ACKNOWLEDGED}."
    found: dict[tuple[str, str], Acknowledged] = {}
    try:
        last = int(ask(address, f"STREAM.INFO.{stream}")["state"]["last_seq"])
        for batch in read_range(address, stream, 1, last):
            for subject, data in zip(batch["subject"].to_pylist(), batch["data"].to_pylist(), strict=True):
                if data:
                    value = Acknowledged.from_json(jsontext.parse(data, "acknowledged position"))
                    found[subject.removeprefix(prefix), value.incarnation] = value
    except UnknownStream:
        pass
    except InvalidInput as error:
        raise InvalidInput(f"the bucket {ACKNOWLEDGED!r} cannot be read: {error.message}", fix=error.fix) from error
    return found


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

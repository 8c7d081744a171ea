"""The registry: the read model of all subscriptions, in the key-value bucket `subscriptions`.

    <name>.definition   Record          written by delivery
    <name>.dispatch     DispatchState   written by dispatch and catch-up; absent: never suspended
    <name>.prefill      PrefillState    written by delivery (pending) and prefill; absent: none was asked for
    <name>.replay       WaitingReplay   written by delivery and prefill (`waiting_replays`); absent: none waits
    <name>.sequence     a number        where its queues have ended; it outlives them all (`queue_ends`)

Delivery and the surfaces use the asynchronous `Registry`. The driver of a Spark query, which has no event loop, takes
snapshots with `read_subscriptions` and writes with `update_dispatch` and its like. Every write is a compare-and-set by
revision, where 0 means that nothing was ever written under that key; it fails with `WrongRevision`.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Final

from purveyor.jetstream import headers as header_names
from purveyor.jetstream.address import Address
from purveyor.jetstream.api_errors import WRONG_LAST_SEQUENCE, WRONG_LAST_SEQUENCE_UNKNOWN
from purveyor.jetstream.key_value import OPERATION, Bucket, BucketConfig
from purveyor.model import json_fields
from purveyor.model.ack_ranges import DELIVERY_STATE, Acknowledged
from purveyor.model.errors import (
    InvalidInput,
    NoAnswer,
    PublishRefused,
    UnknownKey,
    UnknownStream,
    UnknownSubscription,
    WrongRevision,
)
from purveyor.model.name_rules import check_subscription_name
from purveyor.model.registration import (
    DISPATCH_STATE,
    PREFILL_STATE,
    RECORD,
    DispatchState,
    PrefillState,
    PrefillStatus,
    Record,
    RecordState,
    Suspension,
)
from purveyor.queues.registrations import (
    NOTHING,
    Registered,
    Snapshot,
    Unreadable,
    Value,
    assemble,
    merge,
)
from purveyor.queues.waiting_replays import WaitingReplays

if TYPE_CHECKING:  # the bulk path brings Arrow: only those who use it wait for it
    from purveyor.queues.client import Queues

SUBSCRIPTIONS: Final = "subscriptions"
STATES: Final = ("dispatch", "prefill")
"""What is kept about a subscription beside its record."""
ACKNOWLEDGED: Final = "acknowledged"
"""The bucket of the positions last acknowledged: key `<name>`, value `{"incarnation": ..., "position": n}` and more.

Delivery keeps its leases in the same value, so that an acknowledgement is one write (`delivery/state_codec.py`). Other
parts read `model.ack_ranges.Acknowledged` of it."""

_STREAM: Final = f"KV_{SUBSCRIPTIONS}"
_PREFIX: Final = f"$KV.{SUBSCRIPTIONS}."
_STALE_SECONDS: Final = 30.0
_PAGE: Final = 500


class Registry:
    """The registry for programs with an event loop."""

    def __init__(self, subscriptions: Bucket, acknowledged: Bucket) -> None:
        self._subscriptions = subscriptions
        self._acknowledged = acknowledged
        self.waiting_replays = WaitingReplays(subscriptions)

    @classmethod
    async def open(cls, queues: "Queues", *, replicas: int = 1) -> "Registry":
        """The registry of a server; its buckets are made if they are not there."""
        wanted = (BucketConfig(name=name, replicas=replicas) for name in (SUBSCRIPTIONS, ACKNOWLEDGED))
        return cls(*[await queues.bucket(config) for config in wanted])

    async def get(self, name: str, states: Collection[str] = STATES) -> Registered:
        """A subscription, in whatever state; UnknownSubscription if there is none.

        Of its states only those named are read. UnreadableRecord if this program does not understand one of them, or
        the record.
        """
        found = await self.find(name, states)
        if isinstance(found, Unreadable):
            raise found.error()
        return found

    async def find(self, name: str, states: Collection[str] = STATES) -> Registered | Unreadable:
        """A subscription, also one that is not understood; UnknownSubscription if there is none.

        Its parts belong together: the record is read before and after the others, because between two reads a
        subscription may be deleted and another of its name be added, whose prefill must not be overlooked.
        """
        check_subscription_name(name)
        before = await self._part(name, "definition")
        while True:
            values = await asyncio.gather(*(self._part(name, state) for state in states))
            record = await self._part(name, "definition") if states else before
            if record == before:
                break
            before = record
        found = assemble(name, {"definition": record, **dict(zip(states, values, strict=True))})
        if found is None:
            raise UnknownSubscription(f"no subscription {name!r}", fix="`purveyor subscription list` lists them")
        return found

    async def list(self) -> Snapshot:
        """All subscriptions."""
        values: dict[str, Value] = {}
        async with contextlib.aclosing(self._subscriptions.watch()) as changes:
            async for entry in changes:
                if entry is None:
                    break
                values[entry.key] = (entry.revision, None if entry.deleted else entry.value)
        return merge(Snapshot(), values)

    async def create(self, record: Record) -> int:
        """Write a record under a name that is free; AlreadyExists if it is not. Of many at once one succeeds."""
        return await self._subscriptions.create(f"{record.name}.definition", _encode(record))

    async def put_record(self, record: Record, revision: int) -> int:
        """Write a record again."""
        return await self._put(record.name, "definition", record, revision)

    async def put_dispatch(self, name: str, state: DispatchState, revision: int) -> int:
        """Write how far writing has come."""
        return await self._put(name, "dispatch", state, revision)

    async def put_prefill(self, name: str, state: PrefillState, revision: int) -> int:
        """Write how far a prefill is."""
        return await self._put(name, "prefill", state, revision)

    async def remove(self, found: Registered) -> None:
        """Take everything about a subscription out; the record last, so that what was begun can be ended."""
        await self.remove_states(found)
        await self.remove_record(found)

    async def remove_record(self, found: Registered | Unreadable) -> None:
        """Take the record out, as it was found."""
        await self._subscriptions.delete(f"{found.name}.definition", revision=found.revision)

    async def remove_states(self, found: Registered | Unreadable) -> None:
        """Take out what is kept beside the record, also what is not understood of it."""
        with contextlib.suppress(UnknownKey):
            entry = await self._acknowledged.get(found.name)
            if found.incarnation is None or _incarnation(entry.value) in (None, found.incarnation):
                await self._acknowledged.delete(found.name, revision=entry.revision)
        for part, revision in (("dispatch", found.dispatch_revision), ("prefill", found.prefill_revision)):
            if revision:
                await self._subscriptions.delete(f"{found.name}.{part}", revision=revision)
        await self.waiting_replays.remove(found.name, found.incarnation)

    async def acknowledged(self, found: Registered) -> int | None:
        """The position last acknowledged in its queue, if any was."""
        value = await self.book(found)
        # 0 stands in the value while messages were handed out and none is acknowledged.
        return value.position or None if value is not None else None

    async def book(self, found: Registered) -> Acknowledged | None:
        """What is acknowledged in its queue, and what has expired there; None while nothing was handed out."""
        try:
            entry = await self._acknowledged.get(found.name)
        except UnknownKey:
            return None
        value = DELIVERY_STATE.read(entry.value, Acknowledged.from_json, f"subscription {found.name!r}")
        return value if value.incarnation == found.incarnation else None

    async def _part(self, name: str, part: str) -> Value:
        entry = await self._subscriptions.newest(f"{name}.{part}")
        if entry is None:
            return NOTHING
        return entry.revision, None if entry.deleted else entry.value

    async def _put(self, name: str, part: str, value: Record | DispatchState | PrefillState, revision: int) -> int:
        return await self._subscriptions.update(f"{name}.{part}", _encode(value), revision)


def read_subscriptions(address: Address, previous: Snapshot | None = None) -> Snapshot:
    """All subscriptions as of now, synchronously; given an earlier snapshot, only what changed since is read.

    What was written and acknowledged before the call is in it, also on a cluster.
    """
    snapshot = previous or Snapshot()
    give_up = time.monotonic() + _STALE_SECONDS
    while (last := _last_sequence(address)) != snapshot.last_sequence:
        if last < snapshot.last_sequence:
            snapshot = Snapshot()  # another registry than the one that was read before
            continue
        values, seen = _read(address, snapshot.last_sequence + 1, last)
        # A value that is overwritten while we read is gone from where it was, and lies behind the end that was asked
        # for: therefore the loop. When the newest message itself was not found, it was overwritten as well, or a
        # replica answered that has not got it yet and may lack others: read the same again.
        if seen == last:
            snapshot = merge(snapshot, values)
        elif time.monotonic() > give_up:
            raise NoAnswer(f"the registry of subscriptions cannot be read up to {last}", fix="is the cluster complete?")
        else:
            time.sleep(0.02)
    return snapshot


async def refresh(queues: "Queues", previous: Snapshot, last_sequence: int) -> Snapshot:
    """The same for a program that has an event loop and no use for Arrow: what was written up to a sequence.

    A replica that lags behind gives fewer values, never others; the rest comes with the next call.
    """
    from purveyor.jetstream.direct_get import Wanted, read_page  # noqa: PLC0415 - it stands on the client

    snapshot = previous if previous.last_sequence <= last_sequence else Snapshot()
    while snapshot.last_sequence < last_sequence:
        wanted = Wanted(subject=f"{_PREFIX}>", from_sequence=snapshot.last_sequence + 1, count=_PAGE)
        page = await read_page(queues, _STREAM, wanted)
        if not page.messages:
            break
        values: dict[str, Value] = {}
        for message in page.messages:
            value = None if OPERATION in message.headers else message.data
            values[message.subject.removeprefix(_PREFIX)] = message.sequence, value
        snapshot = merge(snapshot, values)
    return snapshot


def changed_since(address: Address, last_sequence: int) -> bool:
    """Whether anything was written to the registry since a snapshot with that last sequence: one small question."""
    return _last_sequence(address) != last_sequence


def update_definition(address: Address, record: Record, revision: int) -> int:
    """Write a record again, synchronously; the new revision."""
    return _write(address, f"{record.name}.definition", record, revision)


def update_dispatch(address: Address, name: str, state: DispatchState, revision: int) -> int:
    """Write how far writing has come, synchronously; the new revision."""
    return _write(address, f"{name}.dispatch", state, revision)


def update_prefill(address: Address, name: str, state: PrefillState, revision: int) -> int:
    """Write how far a prefill is, synchronously; the new revision."""
    return _write(address, f"{name}.prefill", state, revision)


def settle_begin(address: Address, found: Registered, position: int) -> Record:
    """The record with its beginning: the one it has, else the position of the control event that was met in the log.

    Between storing the control event and noting its position, the one who adds a subscription may be slow or dead.
    Whoever meets the event first may note it; the first note stands, for all.
    """
    record, revision = found.record, found.revision
    while record.begin is None:
        settled = dataclasses.replace(record, begin=position)
        try:
            update_definition(address, settled, revision)
        except WrongRevision:
            now = read_subscriptions(address).subscriptions.get(record.name)
            if now is None or now.incarnation != record.incarnation:
                raise UnknownSubscription(f"subscription {record.name!r} is gone") from None
            record, revision = now.record, now.revision
        else:
            record = settled
    return record


def _incarnation(delivery_state: bytes) -> str | None:
    """Whose it is; None if that cannot be read."""
    try:
        found = json_fields.parse(delivery_state, DELIVERY_STATE.what).get("incarnation")
    except InvalidInput:
        return None
    return found if isinstance(found, str) else None


def _last_sequence(address: Address) -> int:
    from purveyor.jetstream.bulk.net.api_request import ask  # noqa: PLC0415 - see the top

    try:
        return int(ask(address, f"STREAM.INFO.{_STREAM}")["state"]["last_seq"])
    except UnknownStream:
        return 0


def _read(address: Address, first: int, last: int) -> tuple[dict[str, Value], int]:
    """The newest value of each key in a range, and the last sequence found."""
    from purveyor.jetstream.bulk import read_range  # noqa: PLC0415 - see the top

    values: dict[str, Value] = {}
    seen = 0
    for batch in read_range(address, _STREAM, first, last):
        columns = (batch.column(name).to_pylist() for name in ("sequence", "subject", "headers", "data"))
        for sequence, subject, headers, data in zip(*columns, strict=True):
            deleted = any(name == OPERATION for name, _ in headers or ())
            values[subject.removeprefix(_PREFIX)] = (sequence, None if deleted else data)
            seen = sequence
    return values, seen


def _encode(value: Record | DispatchState | PrefillState) -> bytes:
    match value:
        case Record():
            return RECORD.dump(value.to_json())
        case DispatchState():
            return DISPATCH_STATE.dump(value.to_json())
        case PrefillState():
            return PREFILL_STATE.dump(value.to_json())


def _write(address: Address, key: str, value: Record | DispatchState | PrefillState, revision: int) -> int:
    from purveyor.jetstream.bulk import PublishOptions, outgoing, publish_many  # noqa: PLC0415 - see the top

    expected = {header_names.EXPECTED_LAST_SUBJECT_SEQUENCE: str(revision)}
    rows = outgoing([(f"{_PREFIX}{key}", _encode(value), expected, None)])
    try:
        return publish_many(address, rows, PublishOptions(expected_stream=_STREAM)).last_sequences[_STREAM]
    except PublishRefused as error:
        if error.err_code not in (WRONG_LAST_SEQUENCE, WRONG_LAST_SEQUENCE_UNKNOWN):
            raise
        raise WrongRevision(
            f"key {key!r} of the registry is not at revision {revision} any more",
            fix="read again, then write",
            code=error.code,
            err_code=error.err_code,
        ) from error


__all__ = [
    "ACKNOWLEDGED",
    "SUBSCRIPTIONS",
    "DispatchState",
    "PrefillState",
    "PrefillStatus",
    "Record",
    "RecordState",
    "Registered",
    "Registry",
    "Snapshot",
    "Suspension",
    "Unreadable",
    "changed_since",
    "read_subscriptions",
    "refresh",
    "settle_begin",
    "update_definition",
    "update_dispatch",
    "update_prefill",
]

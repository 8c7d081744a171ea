"""The registry: the read model of all subscriptions, in the key-value bucket `subscriptions`.

    <name>.definition   Record          written by delivery
    <name>.dispatch     DispatchState   written by dispatch and catch-up; absent: never suspended
    <name>.prefill      PrefillState    written by delivery (pending) and prefill; absent: no prefill was requested
    <name>.replay       WaitingReplay   written by delivery and prefill (`waiting_replays`); absent: none waits
    <name>.<kind>-job   StoredJob       written by delivery and dispatch (`stored_jobs`); absent: no job was stored
    <name>.sequence     a number        the last sequence of its earlier queues (`subscription_queues`); never deleted

Every write is a compare-and-set by revision, where 0 means that the key was never written; it fails with
`WrongRevision`. Programs without an event loop, such as the driver of a Spark query, use `sync_client`.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Final

from purveyor.jetstream.key_value import OPERATION, Bucket, BucketConfig
from purveyor.jetstream.streams import PageRequest, read_page
from purveyor.model.delivery_state import AckSummary, DeliveryState, decode, decode_summary, incarnation_of
from purveyor.model.errors import (
    NoAnswer,
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
    NO_VALUE,
    Registered,
    Snapshot,
    Unreadable,
    Value,
    assemble,
    merge,
)
from purveyor.queues.stored_jobs import StoredJobs
from purveyor.queues.waiting_replays import WaitingReplays

if TYPE_CHECKING:
    from purveyor.jetstream.client import JetStream

SUBSCRIPTIONS: Final = "subscriptions"
STATES: Final = ("dispatch", "prefill")
"""The states of a subscription beside its record."""
ACKNOWLEDGED: Final = "acknowledged"
"""The bucket of the last acknowledged positions: key `<name>`, value `{"incarnation": ..., "position": n}` and more.

Delivery stores its leases in the same value, so that an acknowledgement is one write (`model/delivery_state.py`). Other
parts read `model.delivery_state.AckSummary` from it."""

_STREAM: Final = f"KV_{SUBSCRIPTIONS}"
_PREFIX: Final = f"$KV.{SUBSCRIPTIONS}."
_STALE_REPLICA_SECONDS: Final = 30.0
_PAGE_MESSAGES: Final = 500


class Registry:
    """The subscriptions of one server."""

    def __init__(self, jetstream: "JetStream", subscriptions: Bucket, acknowledged: Bucket) -> None:
        self._jetstream = jetstream
        self._subscriptions = subscriptions
        self._acknowledged = acknowledged
        self.waiting_replays = WaitingReplays(subscriptions)
        self.stored_jobs = StoredJobs(jetstream, subscriptions)

    @classmethod
    async def open(cls, jetstream: "JetStream", *, replicas: int = 1) -> "Registry":
        """Open the registry of a server, and create its buckets if they are missing."""
        wanted = (BucketConfig(name=name, replicas=replicas) for name in (SUBSCRIPTIONS, ACKNOWLEDGED))
        return cls(jetstream, *[await jetstream.bucket(config) for config in wanted])

    async def get(self, name: str, states: Collection[str] = STATES) -> Registered:
        """Return a subscription in any state; UnknownSubscription if there is none.

        Of its states only the named ones are read. UnreadableRecord if this program does not understand one of them,
        or the record.
        """
        found = await self.find(name, states)
        if isinstance(found, Unreadable):
            raise found.error()
        return found

    async def find(self, name: str, states: Collection[str] = STATES) -> Registered | Unreadable:
        """Return a subscription, also one that this program does not understand; UnknownSubscription if there is none.

        Its parts belong together: the record is read before and after the others, because between two reads a
        subscription may be deleted and another one of that name added, whose prefill must not be overlooked.
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

    async def list(self, previous: Snapshot | None = None) -> Snapshot:
        """Return all subscriptions; see `read_snapshot`."""
        return await read_snapshot(self._jetstream, previous)

    async def create(self, record: Record) -> int:
        """Write a record under a free name; AlreadyExists if it is taken. Of many callers at once, one succeeds."""
        return await self._subscriptions.create(f"{record.name}.definition", _encode(record))

    async def put_record(self, record: Record, revision: int) -> int:
        """Overwrite a record; return the new revision."""
        return await self._put(record.name, "definition", record, revision)

    async def put_dispatch(self, name: str, state: DispatchState, revision: int) -> int:
        """Write how far the dispatcher has written the queue; return the new revision."""
        return await self._put(name, "dispatch", state, revision)

    async def put_prefill(self, name: str, state: PrefillState, revision: int) -> int:
        """Write how far a prefill is; return the new revision."""
        return await self._put(name, "prefill", state, revision)

    async def settle_begin(self, found: Registered, position: int) -> Record:
        """Return the record with its beginning: the one it has, else the position of its control event in the log.

        Between storing the control event and writing its position into the record, the process that adds a subscription
        may be slow or dead. Every reader that meets the event may write the position; the first write is final.
        """
        record, revision = found.record, found.revision
        while record.begin is None:
            settled = dataclasses.replace(record, begin=position)
            try:
                await self.put_record(settled, revision)
            except WrongRevision:
                now = await self.find(record.name, ())
                if isinstance(now, Unreadable) or now.incarnation != record.incarnation:
                    raise UnknownSubscription(f"subscription {record.name!r} is gone") from None
                record, revision = now.record, now.revision
            else:
                record = settled
        return record

    async def settle_change(self, name: str, incarnation: str, change: str, position: int) -> Record | None:
        """Return the record with its pending change in force behind the position of the control event.

        Every reader that meets the event may write the position; the first write is final. A change that is not pending
        (any more) has no effect. None if the subscription is gone, or if this program does not understand it.
        """
        while True:
            try:
                found = await self.find(name, ())
            except UnknownSubscription:
                return None
            if isinstance(found, Unreadable) or found.incarnation != incarnation:
                return None
            settled = found.record.with_change(change, position)
            if settled is found.record:
                return settled
            with contextlib.suppress(WrongRevision):
                await self.put_record(settled, found.revision)
                return settled

    async def remove(self, found: Registered) -> None:
        """Delete everything about a subscription; the record last, so that a removal that was cut off can be ended."""
        await self.remove_states(found)
        await self.remove_record(found)

    async def remove_record(self, found: Registered | Unreadable) -> None:
        """Delete the record, if it is still the one that was found."""
        await self._subscriptions.delete(f"{found.name}.definition", revision=found.revision)

    async def remove_states(self, found: Registered | Unreadable) -> None:
        """Delete the states beside the record, also those that this program does not understand."""
        with contextlib.suppress(UnknownKey):
            entry = await self._acknowledged.get(found.name)
            if found.incarnation is None or incarnation_of(entry.value) in (None, found.incarnation):
                await self._acknowledged.delete(found.name, revision=entry.revision)
        for part, revision in (("dispatch", found.dispatch_revision), ("prefill", found.prefill_revision)):
            if revision:
                await self._subscriptions.delete(f"{found.name}.{part}", revision=revision)
        await self.waiting_replays.remove(found.name, found.incarnation)
        await self.stored_jobs.remove(found.name)

    async def last_acknowledged(self, found: Registered) -> int | None:
        """Return the last acknowledged position of its queue; None if there is none."""
        value = await self.read_acknowledged(found)
        # The value has position 0 while messages are leased and none is acknowledged.
        return value.position or None if value is not None else None

    async def read_acknowledged(self, found: Registered) -> AckSummary | None:
        """Read what is acknowledged and what has expired in its queue; None while no message was delivered."""
        try:
            entry = await self._acknowledged.get(found.name)
        except UnknownKey:
            return None
        value = decode_summary(entry.value, f"subscription {found.name!r}")
        return value if value.incarnation == found.incarnation else None

    async def read_delivery_state(self, found: Registered) -> DeliveryState | None:
        """Read the whole delivery state of a subscription, as delivery does; None while no message was delivered."""
        try:
            entry = await self._acknowledged.get(found.name)
        except UnknownKey:
            return None
        value = decode(entry.value, f"subscription {found.name!r}")
        return value if value.incarnation == found.incarnation else None

    async def _part(self, name: str, part: str) -> Value:
        entry = await self._subscriptions.newest(f"{name}.{part}")
        if entry is None:
            return NO_VALUE
        return entry.revision, None if entry.deleted else entry.value

    async def _put(self, name: str, part: str, value: Record | DispatchState | PrefillState, revision: int) -> int:
        key = f"{name}.{part}"
        try:
            return await self._subscriptions.update(key, _encode(value), revision)
        except WrongRevision as error:
            raise WrongRevision(
                f"key {key!r} of the registry is not at revision {revision} any more",
                fix="read again, then write",
                code=error.code,
                err_code=error.err_code,
            ) from error


async def read_snapshot(jetstream: "JetStream", previous: Snapshot | None = None) -> Snapshot:
    """Return all subscriptions as of now; given an earlier snapshot, read only the changes since.

    It contains everything that was written and acknowledged before the call, also on a cluster. It creates no bucket.
    """
    snapshot = previous or Snapshot()
    give_up = time.monotonic() + _STALE_REPLICA_SECONDS
    while (last := await _last_sequence(jetstream)) != snapshot.last_sequence:
        if last < snapshot.last_sequence:
            snapshot = Snapshot()  # another registry than the one of the earlier snapshot
            continue
        values, seen = await _read_changes(jetstream, snapshot.last_sequence + 1, last)
        # A value that is overwritten during the read moves behind the end that was asked for: therefore the loop. When
        # even the newest message was not found, it was overwritten as well, or a replica answered that has not got it
        # yet: read the same again.
        if seen >= last:
            snapshot = merge(snapshot, values)
        elif time.monotonic() > give_up:
            raise NoAnswer(f"the registry of subscriptions cannot be read up to {last}", fix="is the cluster complete?")
        else:
            await asyncio.sleep(0.02)
    return snapshot


async def _last_sequence(jetstream: "JetStream") -> int:
    try:
        return (await jetstream.streams.info(_STREAM)).state.last_seq
    except UnknownStream:
        return 0


async def _read_changes(jetstream: "JetStream", first: int, last: int) -> tuple[dict[str, Value], int]:
    """Return the newest value of each key from a sequence on, and the last sequence found."""
    values: dict[str, Value] = {}
    seen = first - 1
    while seen < last:
        wanted = PageRequest(subject=f"{_PREFIX}>", from_sequence=seen + 1, count=_PAGE_MESSAGES)
        page = await read_page(jetstream, _STREAM, wanted)
        for message in page.messages:
            value = None if OPERATION in message.headers else message.data
            values[message.subject.removeprefix(_PREFIX)] = message.sequence, value
            seen = message.sequence
        if not page.messages:
            break
    return values, seen


def _encode(value: Record | DispatchState | PrefillState) -> bytes:
    match value:
        case Record():
            return RECORD.dump(value.to_json())
        case DispatchState():
            return DISPATCH_STATE.dump(value.to_json())
        case PrefillState():
            return PREFILL_STATE.dump(value.to_json())


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
    "read_snapshot",
]

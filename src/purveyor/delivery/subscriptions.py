"""Subscriptions: add, read, pause, resume, replay, delete. The only writer of definitions in the registry.

Every change is a sequence of steps. A crash may cut it off anywhere; the same call completes it. The control events in
`incoming` decide where a subscription begins and ends.
"""

import contextlib
import dataclasses
import uuid
from collections.abc import Callable, Collection, Iterable
from datetime import UTC, datetime
from typing import assert_never

from purveyor.delivery.definition_changes import DefinitionChanged, DefinitionChanges
from purveyor.delivery.subscription_jobs import (
    MAX_ATTEMPTS,
    SubscriptionJobs,
    changed_too_often,
    deleted_meanwhile,
    not_registered,
)
from purveyor.jetstream.publisher import Expect
from purveyor.model.control_events import (
    CONTROL_SUBJECT,
    ControlEvent,
    ControlKind,
    ReplayJob,
    ReplayPoint,
)
from purveyor.model.errors import (
    AlreadyExists,
    InvalidName,
    UnknownSubscription,
    WrongRevision,
)
from purveyor.model.subscription import RealmTopic, Subscription
from purveyor.model.subscription_limits import check_subscription
from purveyor.queues.catalogue import PREFILL, incoming, subscription_queue
from purveyor.queues.client import Queues
from purveyor.queues.registry import (
    STATES,
    PrefillState,
    PrefillStatus,
    Record,
    RecordState,
    Registered,
    Registry,
    Snapshot,
    Unreadable,
)
from purveyor.queues.subscription_queues import create_queue, queue_owner, remove_queue


class Subscriptions:
    """All subscriptions of one server."""

    def __init__(self, queues: Queues, *, replicas: int = 1) -> None:
        self._queues = queues
        self._replicas = replicas
        self._registry: Registry | None = None
        self._jobs = SubscriptionJobs(queues, replicas=replicas)
        self._changes = DefinitionChanges(queues, replicas=replicas)

    async def registry(self) -> Registry:
        """Return the registry; open it with the first call."""
        if self._registry is None:
            self._registry = await Registry.open(self._queues, replicas=self._replicas)
        return self._registry

    async def add(self, definition: Subscription) -> tuple[Record, bool]:
        """Register a subscription. Return the record, and whether it is new. Every later event is delivered.

        The same definition again returns the existing record; the same name with other parameters is AlreadyExists.

        1. `incoming` and `prefill` are created with their readers. An interest queue without a reader keeps nothing.
        2. The record is created as *registering*, with a new incarnation. Of many concurrent calls one succeeds, and
           the others continue with its incarnation. A crash after this, or after any step up to 7, leaves the record
           *registering*: no caller got an answer, and adding the subscription again continues here.
        3. The queue is created for this incarnation, before any process can write to it; a queue that a deleted
           subscription of the same name left behind is removed first.
        4. The control event is stored in `incoming`. Its position is the beginning: earlier events are not delivered
           (but may be prefilled), later events are. After a crash it is stored again under the same id. If the server
           has forgotten the id by then, there are two events, and step 5 decides which of them counts.
        5. The position is stored in the record. The dispatcher stores it if it reads the event first: the first value
           stays.
        6. If a prefill is requested, its state becomes *pending*. This is before the subscription is active, so that a
           consumer never gets live events before the prefill.
        7. The job is put on `prefill`. After a crash it is put there again under the same id if the prefill is still
           pending; a worker that reads the job twice finds the state of that attempt taken.
        8. The record becomes *active*.
        """
        subscription_queue(definition.name)  # refuses the names of internal queues
        (await self._queues.ensure(incoming(), replicas=self._replicas)).require_usable()
        (await self._queues.ensure(PREFILL, replicas=self._replicas)).require_usable()
        found, created = await self._claim(definition)
        if found.record.state is RecordState.ACTIVE:
            return found.record, False
        record = found.record
        await create_queue(
            self._queues,
            definition.name,
            found.incarnation,
            check_owner=lambda: self._change(record, lambda now: now),
            replicas=self._replicas,
        )
        if record.begin is None:
            position = await self._publish_control_event(ControlKind.ADDED, record)
            record = await self._change(record, lambda now: _with_begin(now, position))
        if definition.request_prefill:
            await self._jobs.begin_prefill(await self.registry(), record)
        return await self._change(record, lambda now: dataclasses.replace(now, state=RecordState.ACTIVE)), created

    async def get(self, name: str, states: Collection[str] = STATES) -> Registered:
        """Return a subscription with some of its states; UnknownSubscription if it is unknown or being deleted."""
        found = await (await self.registry()).get(name, states)
        if found.record.state is RecordState.DELETING:
            raise UnknownSubscription(f"subscription {name!r} is being deleted", fix="delete it again if that ended")
        return found

    async def find(self, name: str) -> Subscription | None:
        """Return the definition of a subscription; None if there is none."""
        try:
            return (await (await self.registry()).get(name, ())).record.definition
        except (UnknownSubscription, InvalidName):
            return None

    async def list(self) -> Snapshot:
        """Return all subscriptions, also those whose registration or deletion is not complete."""
        return await (await self.registry()).list()

    async def delete(self, name: str, *, force: bool = False) -> str | None:
        """Delete a subscription with its queue, and return its incarnation; UnknownSubscription if there is none.

        UnreadableRecord if this program does not understand the record. With `force` it is deleted anyway (see
        `_delete_unreadable`); the incarnation is None if it cannot be read.

        1. The record becomes *deleting*: messages are no longer delivered, and writers drop what they have for it.
        2. The control event is stored in `incoming`: dispatchers ignore the subscription from there on.
        3. The queue is removed.
        4. The keys are removed, the record last. A crash before this leaves the record *deleting*: deleting the
           subscription again, or adding one of the same name, repeats all steps, and each step can be repeated.
        """
        found = await (await self.registry()).find(name)
        if isinstance(found, Registered):
            await self._delete(found)
        elif force:
            await self._delete_unreadable(found)
        else:
            raise found.error()
        return found.incarnation

    async def pause(self, name: str, reason: str | None = None) -> Record:
        """Stop delivery until `resume`; the queue continues to fill. A program gives a `reason`."""
        found = await self._get_active(name, ())
        return await self._change(found.record, lambda now: dataclasses.replace(now, paused=True, pause_reason=reason))

    async def resume(self, name: str) -> Record:
        """Continue delivery. If the subscription is suspended, request the events that its queue lacks."""
        found = await self._get_active(name, ("dispatch",))
        record = await self._change(found.record, lambda now: dataclasses.replace(now, paused=False, pause_reason=None))
        if found.suspended is not None:
            await self._jobs.catch_up(await self.registry(), found, record)
        return record

    async def redefine(
        self, name: str, change: Callable[[Subscription], Subscription], *, prefill_new_topics: bool = False
    ) -> DefinitionChanged:
        """Change the definition of a subscription. The queue stays the same.

        Topics, filter and hidden fields change at an exact position of the log, which the result has; the other options
        change at once. With `prefill_new_topics` the objects of topics that are new are delivered first, as of that
        position. See `definition_changes` for the steps.
        """
        found = await self._get_active(name, ())
        return await self._changes.change(await self.registry(), found, change, prefill=prefill_new_topics)

    async def replay(
        self, name: str, from_: ReplayPoint, to: ReplayPoint | None = None, topics: Iterable[RealmTopic] = ()
    ) -> ReplayJob:
        """Request events of the past again, from a position or time, up to another or to now.

        AlreadyExists if a replay of this subscription is waiting; a replay that is running does not count.
        """
        registered = await self._get_active(name, ("prefill",))
        return await self._jobs.replay(await self.registry(), registered, from_, to, topics)

    async def request_prefill(self, name: str) -> PrefillState:
        """Start a failed prefill again. A pending prefill gets its job again; a running or done one stays."""
        return await self._jobs.repeat_prefill(await self.registry(), lambda: self._get_active(name, ("prefill",)))

    async def set_prefill_status(self, name: str, status: PrefillStatus, *, reason: str | None = None) -> PrefillState:
        """Store the prefill status that an external program reports, for example one that fills queues itself.

        A failed prefill that becomes *pending* again gets a job, as with the first request.
        """
        state = await self._jobs.set_prefill_status(
            await self.registry(), lambda: self.get(name), status, reason=reason
        )
        return await self.request_prefill(name) if state is None else state

    async def _claim(self, definition: Subscription) -> tuple[Registered, bool]:
        """Return the record to continue with: an existing one with the same definition, or a new one."""
        registry = await self.registry()
        created = False
        for _ in range(MAX_ATTEMPTS):
            try:
                found = await registry.get(definition.name)
            except UnknownSubscription:
                check_subscription(definition)  # new ones only: an existing one may be older than the limits
                record = Record(incarnation=str(uuid.uuid4()), definition=definition, created=datetime.now(UTC))
                try:
                    await registry.create(record)
                    created = True
                except AlreadyExists:
                    pass  # another process was faster
                continue
            match found.record.state:
                case RecordState.DELETING:
                    await self._delete(found)
                case RecordState.ACTIVE | RecordState.REGISTERING:
                    if found.record.definition.is_same_as(definition):
                        return found, created or found.record.state is RecordState.REGISTERING
                    raise AlreadyExists(
                        f"subscription {definition.name!r} exists with other parameters",
                        fix="choose another name, or delete it first",
                        code=409,
                    )
                case _:
                    assert_never(found.record.state)
        raise changed_too_often(definition.name)

    async def _delete(self, found: Registered) -> None:
        registry = await self.registry()
        (await self._queues.ensure(incoming(), replicas=self._replicas)).require_usable()
        incarnation = found.incarnation
        for _ in range(MAX_ATTEMPTS):
            try:
                record = await self._change(
                    found.record, lambda now: dataclasses.replace(now, state=RecordState.DELETING)
                )
                await self._publish_control_event(ControlKind.DELETED, record)
                await remove_queue(self._queues, record.name, incarnation)
                found = await registry.get(record.name)
                if found.incarnation == incarnation:
                    await registry.remove(found)
            except UnknownSubscription:
                return  # another process deleted it
            except WrongRevision:
                continue  # a writer changed a key: read it again and remove it
            return
        raise changed_too_often(found.name)

    async def _delete_unreadable(self, found: Unreadable) -> None:
        """Delete a subscription whose record this program does not understand.

        1. The record is removed. It cannot become *deleting*, because that would overwrite it. Without a record no
           program delivers the subscription or creates its queue again. A crash after this leaves the queue and the
           other keys, which have no effect; adding a subscription of the same name removes the queue.
        2. The control event is stored, if the record has an incarnation.
        3. The queue is removed: the one of that incarnation, or else the one of that name.
        4. The other keys are removed.
        """
        registry = await self.registry()
        (await self._queues.ensure(incoming(), replicas=self._replicas)).require_usable()
        await registry.remove_record(found)
        if found.incarnation is not None:
            await self._publish_control(
                ControlEvent(kind=ControlKind.DELETED, name=found.name, incarnation=found.incarnation)
            )
        owner = found.incarnation or await queue_owner(self._queues, found.name)
        if owner is not None:
            await remove_queue(self._queues, found.name, owner)
        with contextlib.suppress(WrongRevision):  # a writer changed a key, which has no effect any more
            await registry.remove_states(found)

    async def _get_active(self, name: str, states: Collection[str]) -> Registered:
        found = await self.get(name, states)
        if found.record.state is not RecordState.ACTIVE:
            raise not_registered(name)
        return found

    async def _change(self, record: Record, change: Callable[[Record], Record]) -> Record:
        """Change a record despite concurrent writers; UnknownSubscription if it is of another incarnation now."""
        registry = await self.registry()
        for _ in range(MAX_ATTEMPTS):
            found = await registry.get(record.name, ())
            if found.incarnation != record.incarnation:
                raise deleted_meanwhile(record.name)
            changed = change(found.record)
            if changed.state is not RecordState.DELETING and found.record.state is RecordState.DELETING:
                raise deleted_meanwhile(record.name)
            if changed == found.record:
                return changed
            try:
                await registry.put_record(changed, found.revision)
            except WrongRevision:
                continue
            return changed
        raise changed_too_often(record.name)

    async def _publish_control_event(self, kind: ControlKind, record: Record) -> int:
        event = ControlEvent(
            kind=kind,
            name=record.name,
            incarnation=record.incarnation,
            definition=record.definition if kind is ControlKind.ADDED else None,
        )
        return await self._publish_control(event)

    async def _publish_control(self, event: ControlEvent) -> int:
        receipt = await self._queues.publish(
            CONTROL_SUBJECT, event.encode(), msg_id=event.msg_id, expect=Expect(stream=incoming().stream)
        )
        return receipt.sequence


def _with_begin(record: Record, position: int) -> Record:
    return record if record.begin is not None else dataclasses.replace(record, begin=position)

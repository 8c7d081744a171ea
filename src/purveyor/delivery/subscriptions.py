"""Subscriptions: add, look at, pause, resume, replay, delete. The only writer of definitions in the registry.

Every change is a sequence of steps that may be cut off anywhere and are made whole by asking for the same again. The
truth about where a subscription begins and ends is its control event in `incoming`.
"""

import contextlib
import dataclasses
import uuid
from collections.abc import Callable, Collection, Iterable
from datetime import UTC, datetime
from typing import assert_never

from purveyor.jetstream.publisher import Expect
from purveyor.model import tracing
from purveyor.model.control_events import (
    CONTROL_SUBJECT,
    JOB_SUBJECT,
    CatchUpJob,
    ControlEvent,
    ControlKind,
    Job,
    JobKind,
    Place,
    PrefillJob,
    ReplayJob,
    job_id,
)
from purveyor.model.errors import (
    AlreadyExists,
    InvalidInput,
    InvalidName,
    OutcomeUnknown,
    PurveyorError,
    Refused,
    Unavailable,
    UnknownSubscription,
    UnreadableRecord,
    WrongRevision,
)
from purveyor.model.subscription import RealmTopic, Subscription
from purveyor.model.subscription_limits import check_options, check_subscription, check_topics
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
from purveyor.queues.subscriptions import make_queue, queue_owner, remove_queue
from purveyor.queues.waiting_replays import WaitingReplay

_ATTEMPTS = 50


class Subscriptions:
    """All subscriptions of one server."""

    def __init__(self, queues: Queues, *, replicas: int = 1) -> None:
        self._queues = queues
        self._replicas = replicas
        self._registry: Registry | None = None

    async def registry(self) -> Registry:
        """The read model; made with the first use."""
        if self._registry is None:
            self._registry = await Registry.open(self._queues, replicas=self._replicas)
        return self._registry

    async def add(self, definition: Subscription) -> tuple[Record, bool]:
        """Register a subscription; the record, and whether it is new. When it returns, every later event is delivered.

        The same again gives the record that is there; the same name with other parameters is AlreadyExists.

        1. `incoming` and `prefill` exist with their readers. An interest queue without a reader keeps nothing.
        2. The record is created as *registering*, with a new incarnation. Of many at once one succeeds, the others go
           on with its incarnation. A crash after this, or after any step up to 7, leaves it *registering*: nobody was
           told that it exists, and adding it again goes on here.
        3. Its queue is made for this incarnation, before anybody can write to it; one that a deleted subscription of
           the same name left behind is removed first.
        4. The control event is stored in `incoming`. Its position is the beginning: what was accepted before is not
           delivered (but may be prefilled), what comes after is. Crash: stored again, under the same id; when that is
           so late that the server has forgotten the id, there are two events, and step 5 decides which of them counts.
        5. Its position is noted in the record. The dispatcher may have done so, if it met the event first: the first
           note stands.
        6. If a prefill is wanted, its state becomes *pending*. This is before the subscription is active, so that
           nobody is ever served live events in place of a prefill that is still to come.
        7. The job is put on `prefill`. Crash: put there again under the same id if the prefill is still pending; a
           worker that meets the job twice finds the state of that attempt taken.
        8. The record becomes *active*.
        """
        subscription_queue(definition.name)  # refuses the names of internal queues
        (await self._queues.ensure(incoming(), replicas=self._replicas)).require_usable()
        (await self._queues.ensure(PREFILL, replicas=self._replicas)).require_usable()
        found, created = await self._claim(definition)
        if found.record.state is RecordState.ACTIVE:
            return found.record, False
        record = found.record
        await make_queue(
            self._queues,
            definition.name,
            found.incarnation,
            still_ours=lambda: self._change(record, lambda now: now),
            replicas=self._replicas,
        )
        if record.begin is None:
            position = await self._tell_log(ControlKind.ADDED, record)
            record = await self._change(record, lambda now: _begun(now, position))
        if definition.request_prefill:
            await self._begin_prefill(record)
        return await self._change(record, lambda now: dataclasses.replace(now, state=RecordState.ACTIVE)), created

    async def get(self, name: str, states: Collection[str] = STATES) -> Registered:
        """A subscription, with these of its states; UnknownSubscription if there is none or it is being deleted."""
        found = await (await self.registry()).get(name, states)
        if found.record.state is RecordState.DELETING:
            raise UnknownSubscription(f"subscription {name!r} is being deleted", fix="delete it again if that ended")
        return found

    async def find(self, name: str) -> Subscription | None:
        """What the subscription of a name asks for; None if there is none."""
        try:
            return (await (await self.registry()).get(name, ())).record.definition
        except (UnknownSubscription, InvalidName):
            return None

    async def list(self) -> Snapshot:
        """All subscriptions, those too that are not registered or deleted to the end."""
        return await (await self.registry()).list()

    async def delete(self, name: str, *, force: bool = False) -> str | None:
        """End a subscription and remove what it has not acknowledged; UnknownSubscription if there is none.

        Returns its incarnation. UnreadableRecord if this program does not understand it; with `force` it is deleted
        all the same (see `_end_unreadable`), and the incarnation is None if even that cannot be read.

        1. The record becomes *deleting*: it is not served any more, and writers drop what they have for it.
        2. The control event is stored in `incoming`: dispatchers leave it out from there on.
        3. Its queue is removed.
        4. Its keys are removed, the record last. A crash before this leaves it *deleting*: deleting it again, or adding
           one of the same name, goes through all steps again, and each of them is the same done twice.
        """
        found = await (await self.registry()).find(name)
        if isinstance(found, Registered):
            await self._end(found)
        elif force:
            await self._end_unreadable(found)
        else:
            raise found.error()
        return found.incarnation

    async def pause(self, name: str, reason: str | None = None) -> Record:
        """Hand out nothing until `resume`; the queue goes on filling. Who is no person gives a reason."""
        found = await self._ready(name, ())
        return await self._change(found.record, lambda now: dataclasses.replace(now, paused=True, pause_reason=reason))

    async def resume(self, name: str) -> Record:
        """Hand out again, and if its queue refused messages, ask for those to be written now."""
        found = await self._ready(name, ("dispatch",))
        record = await self._change(found.record, lambda now: dataclasses.replace(now, paused=False, pause_reason=None))
        if found.suspended is not None:
            # Asking twice is one job; when writing has stopped again since, or a catch-up has failed, it is another.
            job = job_id(record.incarnation, JobKind.CATCH_UP, found.dispatch_revision)
            await self._put_job(CatchUpJob(**_about(record, job)))
        return record

    async def redefine(self, name: str, change: Callable[[Subscription], Subscription]) -> Record:
        """Another definition under the same name, in the same queue: for what is dispatched and handed out from now on.

        Topics and prefill are what it began with, and stay.
        """
        found = await self._ready(name, ())

        def redefined(now: Record) -> Record:
            definition = change(now.definition)
            if (definition.name, definition.realms_topics, definition.request_prefill) != (
                now.definition.name,
                now.definition.realms_topics,
                now.definition.request_prefill,
            ):
                raise InvalidInput(f"other topics for subscription {name!r}", fix="delete it and add it again")
            check_options(definition)
            return dataclasses.replace(now, definition=definition)

        return await self._change(found.record, redefined)

    async def replay(
        self, name: str, from_: Place, to: Place | None = None, topics: Iterable[RealmTopic] = ()
    ) -> ReplayJob:
        """Ask for events of the past to be written again, from a position or time on, up to another or to now.

        AlreadyExists if a replay of this subscription waits already; one that is being written does not wait.

        1. The record of the waiting replay is written. After a crash other replays are refused for a minute.
        2. The job is put on `prefill`. After a crash, or when the server did not answer, the prefill worker runs the
           job if it is there; if it has to wait, the worker completes the record.
        3. Its sequence there is added to the record. The worker deletes the record when it begins the job.
        """
        found = await self._ready(name, ("prefill",))
        _check_places(from_, to)
        wanted = tuple(topics)
        check_topics(wanted)
        job = ReplayJob(**_about(found.record, str(uuid.uuid4())), from_=from_, to=to, topics=wanted)
        waiting = (await self.registry()).waiting_replays
        (await self._queues.ensure(PREFILL, replicas=self._replicas)).require_usable()
        await waiting.claim(
            name,
            WaitingReplay(incarnation=job.incarnation, job=job.job, at=datetime.now(UTC)),
            first_sequence=(await self._queues.streams.info(PREFILL.stream)).state.first_seq,
            begun=found.prefill.job if found.prefill is not None else None,
        )
        try:
            sequence = await self._put_job(job)
        except (Unavailable, OutcomeUnknown):
            raise  # the job may be stored
        except PurveyorError:
            with contextlib.suppress(PurveyorError):  # then other replays are refused for a minute
                await waiting.forget(name, job.job)
            raise
        with contextlib.suppress(Unavailable, UnreadableRecord):  # the job is stored, and that is the answer
            await waiting.stored(name, job.job, sequence)
        return job

    async def request_prefill(self, name: str) -> PrefillState:
        """Try a prefill that failed again. One that is pending gets its job again; a running or done one is left."""
        registry = await self.registry()
        for _ in range(_ATTEMPTS):
            found = await self._ready(name, ("prefill",))
            state = found.prefill
            if state is None:
                raise Refused(
                    f"subscription {name!r} was added without a prefill: its live events are on their way already",
                    fix="delete it and add it with --prefill",
                )
            if state.status is PrefillStatus.FAILED:
                state = PrefillState(
                    incarnation=found.incarnation,
                    status=PrefillStatus.PENDING,
                    position=state.position,
                    attempt=state.attempt + 1,
                )
                try:
                    await registry.put_prefill(name, state, found.prefill_revision)
                except WrongRevision:
                    continue  # somebody else asks as well, or the worker speaks: look again
            if state.status is PrefillStatus.PENDING:
                await self._put_job(_prefill_job(found.record, state))
            return state
        raise _too_busy(name)

    async def _claim(self, definition: Subscription) -> tuple[Registered, bool]:
        """The record to go on with: one that is there and asks for the same, or a new one."""
        registry = await self.registry()
        created = False
        for _ in range(_ATTEMPTS):
            try:
                found = await registry.get(definition.name)
            except UnknownSubscription:
                check_subscription(definition)  # not if it is there: it may be older than the limits
                record = Record(incarnation=str(uuid.uuid4()), definition=definition, created=datetime.now(UTC))
                try:
                    await registry.create(record)
                    created = True
                except AlreadyExists:
                    pass  # somebody else was quicker
                continue
            match found.record.state:
                case RecordState.DELETING:
                    await self._end(found)
                case RecordState.ACTIVE | RecordState.REGISTERING:
                    if found.record.definition.same_as(definition):
                        return found, created or found.record.state is RecordState.REGISTERING
                    raise AlreadyExists(
                        f"subscription {definition.name!r} exists with other parameters",
                        fix="choose another name, or delete it first",
                        code=409,
                    )
                case _:
                    assert_never(found.record.state)
        raise _too_busy(definition.name)

    async def _begin_prefill(self, record: Record) -> None:
        registry = await self.registry()
        assert record.begin is not None
        for _ in range(_ATTEMPTS):
            found = await registry.get(record.name, ("prefill",))
            state = found.prefill
            if found.incarnation != record.incarnation:
                raise _gone(record.name)
            if state is None:
                state = PrefillState(
                    incarnation=record.incarnation, status=PrefillStatus.PENDING, position=record.begin, attempt=1
                )
                try:
                    await registry.put_prefill(record.name, state, found.prefill_revision)
                except WrongRevision:
                    continue
            if state.status is PrefillStatus.PENDING:
                await self._put_job(_prefill_job(record, state))
            return
        raise _too_busy(record.name)

    async def _end(self, found: Registered) -> None:
        registry = await self.registry()
        (await self._queues.ensure(incoming(), replicas=self._replicas)).require_usable()
        incarnation = found.incarnation
        for _ in range(_ATTEMPTS):
            try:
                record = await self._change(
                    found.record, lambda now: dataclasses.replace(now, state=RecordState.DELETING)
                )
                await self._tell_log(ControlKind.DELETED, record)
                await remove_queue(self._queues, record.name, incarnation)
                found = await registry.get(record.name)
                if found.incarnation == incarnation:
                    await registry.remove(found)
            except UnknownSubscription:
                return  # somebody else ended it meanwhile
            except WrongRevision:
                continue  # a writer noted something: its key is read again and removed
            return
        raise _too_busy(found.name)

    async def _end_unreadable(self, found: Unreadable) -> None:
        """End a subscription that is not understood.

        1. The record is removed. It cannot be marked as *deleting*, because that would be written over it; without a
           record no program serves the subscription or makes its queue again. A crash after this leaves its queue and
           the other keys, which count for nothing; adding one of the same name removes the queue.
        2. The control event is stored, if the record tells which subscription it is.
        3. Its queue is removed: the one that the record tells, or the one that has its name.
        4. Its other keys are removed.
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
        with contextlib.suppress(WrongRevision):  # a writer noted something, which counts for nothing by now
            await registry.remove_states(found)

    async def _ready(self, name: str, states: Collection[str]) -> Registered:
        found = await self.get(name, states)
        if found.record.state is not RecordState.ACTIVE:
            raise Refused(f"subscription {name!r} is not registered to the end", fix="add it again, as it was")
        return found

    async def _change(self, record: Record, change: Callable[[Record], Record]) -> Record:
        """A changed record, whoever else writes at the same time; UnknownSubscription if it is another by now."""
        registry = await self.registry()
        for _ in range(_ATTEMPTS):
            found = await registry.get(record.name, ())
            if found.incarnation != record.incarnation:
                raise _gone(record.name)
            changed = change(found.record)
            if changed.state is not RecordState.DELETING and found.record.state is RecordState.DELETING:
                raise _gone(record.name)
            if changed == found.record:
                return changed
            try:
                await registry.put_record(changed, found.revision)
            except WrongRevision:
                continue
            return changed
        raise _too_busy(record.name)

    async def _tell_log(self, kind: ControlKind, record: Record) -> int:
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

    async def _put_job(self, job: Job) -> int:
        """Store a job; return its sequence in the queue."""
        (await self._queues.ensure(PREFILL, replicas=self._replicas)).require_usable()
        receipt = await self._queues.publish(
            JOB_SUBJECT,
            job.encode(),
            headers=tracing.current(),  # what comes of it belongs to the trace of whoever asks
            msg_id=job.job,
            expect=Expect(stream=PREFILL.stream),
        )
        return receipt.sequence


def _begun(record: Record, position: int) -> Record:
    return record if record.begin is not None else dataclasses.replace(record, begin=position)


def _about(record: Record, job: str) -> dict[str, str]:
    return {"name": record.name, "incarnation": record.incarnation, "job": job}


def _prefill_job(record: Record, state: PrefillState) -> PrefillJob:
    about = _about(record, job_id(record.incarnation, JobKind.PREFILL, state.attempt))
    return PrefillJob(**about, position=state.position)


def _check_places(from_: Place, to: Place | None) -> None:
    for place in (from_, to):
        if isinstance(place, datetime) and place.tzinfo is None:
            raise InvalidInput(f"the time {place.isoformat()} has no zone", fix="use an aware time, in UTC say")
        if isinstance(place, int) and place < 1:
            raise InvalidInput(f"no event has the position {place}", fix="positions begin at 1")
    if (isinstance(from_, int) and isinstance(to, int) and to < from_) or (
        isinstance(from_, datetime) and isinstance(to, datetime) and to < from_
    ):
        raise InvalidInput("the replay ends before it begins", fix="exchange from and to")


def _gone(name: str) -> UnknownSubscription:
    return UnknownSubscription(f"subscription {name!r} was deleted meanwhile", fix="add it again if it is wanted")


def _too_busy(name: str) -> Unavailable:
    return Unavailable(f"subscription {name!r} is changed by others faster than it can be read", fix="try again")

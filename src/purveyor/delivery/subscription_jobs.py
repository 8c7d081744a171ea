"""Jobs for the prefill worker: prefill, replay and catch-up, and the prefill state that goes with them."""

import asyncio
import contextlib
import dataclasses
import uuid
from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC, datetime
from typing import Final

from purveyor.jetstream.publisher import Expect
from purveyor.model import tracing
from purveyor.model.control_events import (
    JOB_SUBJECT,
    CatchUpJob,
    JobKind,
    PrefillJob,
    ReplayJob,
    ReplayPoint,
    job_id,
)
from purveyor.model.errors import (
    InvalidInput,
    OutcomeUnknown,
    PurveyorError,
    Refused,
    Unavailable,
    UnknownSubscription,
    UnreadableRecord,
    WrongRevision,
)
from purveyor.model.selection import may_overlap
from purveyor.model.subscription import RealmTopic, Subscription
from purveyor.model.subscription_limits import check_topics
from purveyor.queues.catalogue import PREFILL, incoming
from purveyor.queues.client import Queues
from purveyor.queues.registry import PrefillState, PrefillStatus, Record, Registered, Registry
from purveyor.queues.waiting_replays import WaitingReplay

MAX_ATTEMPTS: Final = 50
"""How often a change of the registry is tried while other processes change it too."""

ReadRegistration = Callable[[], Awaitable[Registered]]


class SubscriptionJobs:
    """Puts jobs on the queue `prefill`."""

    def __init__(self, queues: Queues, *, replicas: int = 1) -> None:
        self._queues = queues
        self._replicas = replicas

    async def put_once(self, registry: Registry, job: PrefillJob | CatchUpJob) -> int:
        """Store a job, unless the queue holds it, and return its sequence in the queue."""
        (await self._queues.ensure(PREFILL, replicas=self._replicas)).require_usable()
        return await registry.stored_jobs.put_once(job, tracing.current_carrier())  # the trace of the caller

    async def _put_replay(self, job: ReplayJob) -> int:
        (await self._queues.ensure(PREFILL, replicas=self._replicas)).require_usable()
        receipt = await self._queues.publish(
            JOB_SUBJECT,
            job.encode(),
            headers=tracing.current_carrier(),  # the job belongs to the trace of the caller
            msg_id=job.job,
            expect=Expect(stream=PREFILL.stream),
        )
        return receipt.sequence

    async def catch_up(self, registry: Registry, registered: Registered, record: Record) -> None:
        """Request the events that a suspended subscription lacks.

        Two requests are one job; when writing has stopped again since, or a catch-up has failed, it is another job.
        """
        job = job_id(record.incarnation, JobKind.CATCH_UP, registered.dispatch_revision)
        await self.put_once(registry, CatchUpJob(**_job_fields(record, job)))

    async def replay(
        self,
        registry: Registry,
        registered: Registered,
        from_: ReplayPoint,
        to: ReplayPoint | None = None,
        topics: Iterable[RealmTopic] = (),
    ) -> ReplayJob:
        """Request events of the past, from a position or time, up to another or to now.

        AlreadyExists if a replay of this subscription is waiting; a replay that is running does not count.

        1. The record of the waiting replay is written. After a crash other replays are refused for a minute.
        2. The job is put on `prefill`. After a crash, or when the server did not answer, the prefill worker runs the
           job if it is there; if it has to wait, the worker completes the record.
        3. The sequence of the job is added to the record. The worker deletes the record when it begins the job.
        """
        _check_range(from_, to)
        await self._check_begin(from_)
        wanted = tuple(topics)
        check_topics(wanted)
        await asyncio.to_thread(_check_selected, registered.record.definition, wanted)  # it matches expressions
        name = registered.name
        job = ReplayJob(**_job_fields(registered.record, str(uuid.uuid4())), from_=from_, to=to, topics=wanted)
        waiting = registry.waiting_replays
        (await self._queues.ensure(PREFILL, replicas=self._replicas)).require_usable()
        await waiting.claim(
            name,
            WaitingReplay(incarnation=job.incarnation, job=job.job, at=datetime.now(UTC)),
            first_sequence=(await self._queues.streams.info(PREFILL.stream)).state.first_seq,
            begun=registered.prefill.job if registered.prefill is not None else None,
        )
        try:
            sequence = await self._put_replay(job)
        except (Unavailable, OutcomeUnknown):
            raise  # the job may be stored
        except PurveyorError:
            with contextlib.suppress(PurveyorError):  # then other replays are refused for a minute
                await waiting.forget(name, job.job)
            raise
        with contextlib.suppress(Unavailable, UnreadableRecord):  # the job is stored, so the replay is accepted
            await waiting.store_sequence(name, job.job, sequence)
        return job

    async def _check_begin(self, from_: ReplayPoint) -> None:
        """Raise InvalidInput for a replay from a position or time that no event has reached: it would be empty."""
        if isinstance(from_, datetime):
            if from_ > datetime.now(UTC):
                raise InvalidInput(f"the replay begins at {from_.isoformat()}, in the future", fix="give a time before")
            return
        newest = (await self._queues.streams.info(incoming().stream)).state.last_seq
        if from_ > newest:
            raise InvalidInput(
                f"the replay begins at position {from_}, and the newest position is {newest}",
                fix=f"give a position up to {newest}",
            )

    async def begin_prefill(self, registry: Registry, record: Record) -> None:
        """Set the prefill of a new subscription to *pending*, and put its job on the queue."""
        assert record.begin is not None
        for _ in range(MAX_ATTEMPTS):
            registered = await registry.get(record.name, ("prefill",))
            state = registered.prefill
            if registered.incarnation != record.incarnation:
                raise deleted_meanwhile(record.name)
            if state is None:
                state = PrefillState(
                    incarnation=record.incarnation, status=PrefillStatus.PENDING, position=record.begin, attempt=1
                )
                try:
                    await registry.put_prefill(record.name, state, registered.prefill_revision)
                except WrongRevision:
                    continue
            if state.status is PrefillStatus.PENDING:
                await self.put_once(registry, _prefill_job(record, state))
            return
        raise changed_too_often(record.name)

    async def repeat_prefill(self, registry: Registry, read: ReadRegistration) -> PrefillState:
        """Start a failed prefill again. A pending prefill gets its job again; a running or done one stays."""
        for _ in range(MAX_ATTEMPTS):
            registered = await read()
            state = registered.prefill
            if state is None:
                raise Refused(
                    f"subscription {registered.name!r} was added without a prefill and already gets live events",
                    fix="delete it and add it with --prefill",
                )
            if state.status is PrefillStatus.FAILED:
                state = PrefillState(
                    incarnation=registered.incarnation,
                    status=PrefillStatus.PENDING,
                    position=state.position,
                    attempt=state.attempt + 1,
                    through=state.through,
                )
                try:
                    await registry.put_prefill(registered.name, state, registered.prefill_revision)
                except WrongRevision:
                    continue  # another caller or the prefill worker has changed it
            if state.status is PrefillStatus.PENDING:
                await self.put_once(registry, _prefill_job(registered.record, state))
            return state
        raise changed_too_often(registered.name)

    async def set_prefill_status(
        self, registry: Registry, read: ReadRegistration, status: PrefillStatus, *, reason: str | None = None
    ) -> PrefillState | None:
        """Store the prefill status that an external program reports. None: a failed prefill is to be repeated."""
        for _ in range(MAX_ATTEMPTS):
            registered = await read()
            state = registered.prefill
            if registered.record.begin is None:
                raise not_registered(registered.name)
            if state is not None and status is PrefillStatus.PENDING and state.status is PrefillStatus.FAILED:
                return None
            if state is None:
                state = PrefillState(
                    incarnation=registered.incarnation, status=status, position=registered.record.begin
                )
            cause = reason or "the prefill user gave no reason"
            state = dataclasses.replace(state, status=status, reason=cause if status is PrefillStatus.FAILED else None)
            try:
                await registry.put_prefill(registered.name, state, registered.prefill_revision)
            except WrongRevision:
                continue
            return state
        raise changed_too_often(registered.name)


def deleted_meanwhile(name: str) -> UnknownSubscription:
    """Return the error for a subscription that another process deleted."""
    return UnknownSubscription(f"subscription {name!r} was deleted meanwhile", fix="add it again if it is needed")


def not_registered(name: str) -> Refused:
    """Return the error for a subscription whose registration is not complete."""
    return Refused(
        f"the registration of subscription {name!r} is not complete", fix="add it again with the same definition"
    )


def changed_too_often(name: str) -> Unavailable:
    """Return the error for a subscription that other processes keep changing."""
    return Unavailable(f"other processes change subscription {name!r} faster than it can be read", fix="try again")


def _job_fields(record: Record, job: str) -> dict[str, str]:
    return {"name": record.name, "incarnation": record.incarnation, "job": job}


def _prefill_job(record: Record, state: PrefillState) -> PrefillJob:
    fields = _job_fields(record, job_id(record.incarnation, JobKind.PREFILL, state.attempt))
    return PrefillJob(**fields, position=state.position)


def _check_selected(definition: Subscription, wanted: Iterable[RealmTopic]) -> None:
    """Raise InvalidInput for a topic of which the subscription selects nothing: its replay would be empty."""
    for topic in wanted:
        if not any(may_overlap(topic, selected) for selected in definition.realms_topics):
            selected = ", ".join(f"{each.realm}:{each.topic}" for each in definition.realms_topics)
            raise InvalidInput(
                f"subscription {definition.name!r} selects no event of {topic.realm}:{topic.topic}, "
                "so the replay would be empty",
                fix=f"give some of its topics, or none for all: it has {selected}",
            )


def _check_range(from_: ReplayPoint, to: ReplayPoint | None) -> None:
    for place in (from_, to):
        if isinstance(place, datetime) and place.tzinfo is None:
            raise InvalidInput(f"the time {place.isoformat()} has no time zone", fix="give one, for example UTC")
        if isinstance(place, int) and place < 1:
            raise InvalidInput(f"no event has the position {place}", fix="positions begin at 1")
    if (isinstance(from_, int) and isinstance(to, int) and to < from_) or (
        isinstance(from_, datetime) and isinstance(to, datetime) and to < from_
    ):
        raise InvalidInput("the replay ends before it begins", fix="exchange from and to")

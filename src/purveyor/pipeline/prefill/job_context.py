"""The context of every job, and the claim by which one run of one job fills a queue.

`JobContext` has Spark, the archive, the queues and the registry, and runs work on Spark.

The prefill state in the registry names the job that fills `<name>.prefill` and the run that it claimed by
compare-and-set. Delivery gives out nothing while the state is not `done`, so no consumer sees messages of a job that is
still running. A replay claims the state as well: delivery gives out its messages when it is complete, after those of
an earlier job.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, TypeVar
from uuid import uuid4

from pyspark.sql import SparkSession

from purveyor.model.control_events import CatchUpJob, Job, PrefillJob, ReplayJob
from purveyor.model.errors import InvalidInput, PurveyorError, UnknownStream, UnknownSubscription, WrongRevision
from purveyor.model.registration import PrefillState, PrefillStatus, RecordState
from purveyor.model.tracing import Carrier
from purveyor.pipeline.archive.reader import ArchiveSource
from purveyor.pipeline.dispatch.topic_prefill import is_first
from purveyor.queues.catalogue import subscription_queue
from purveyor.queues.client import Queues
from purveyor.queues.registry import Registered, Registry
from purveyor.queues.subscription_queues import restore_queue

T = TypeVar("T")
_CANCEL_INTERVAL_SECONDS = 0.2


class JobResult(Enum):
    """How a job ended, which decides about its message."""

    DONE = "done"
    """Acknowledge it: everything is written, or the subscription is gone."""
    LATER = "later"
    """Another job of this subscription comes first: deliver it again after a while."""
    LEFT = "left"
    """A newer run of the same job has it: do not answer, that run does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobContext:
    """The context of a job: Spark, the archive, the queues and the registry."""

    spark: SparkSession
    archive: ArchiveSource
    queues: Queues
    registry: Registry
    replicas: int = 1
    progress_seconds: float = 1.0
    patience_seconds: float = 60.0
    trace: Carrier = field(default_factory=dict)
    """The trace of the request for the job."""

    async def find(self, job: Job) -> Registered | None:
        """Return the subscription of a job, with the state that the job changes; None if it is gone."""
        state = "dispatch" if isinstance(job, CatchUpJob) else "prefill"
        try:
            found = await self.registry.get(job.name, (state,))
        except UnknownSubscription:
            return None
        return None if is_gone(found, job) else found

    async def last_sequence(self, job: Job) -> int:
        """Return the last sequence of the subscription's queue, which is created again if it is missing."""
        queue = subscription_queue(job.name)
        try:
            return (await self.queues.streams.info(queue.stream)).state.last_seq
        except UnknownStream:
            if await self.find(job) is None:
                raise
            await restore_queue(self.queues, job.name, job.incarnation, replicas=self.replicas)
            return (await self.queues.streams.info(queue.stream)).state.last_seq

    async def run_on_spark(self, work: Callable[[], T]) -> T:
        """Run a function that starts Spark jobs in a thread. Cancelling cancels the jobs and waits for the thread."""
        tag = f"purveyor-{uuid4().hex}"
        context = self.spark.sparkContext

        def tagged() -> T:
            context.setLocalProperty("spark.scheduler.pool", "prefill")  # shares fairly with the live queries
            context.addJobTag(tag)
            try:
                return work()
            finally:
                context.removeJobTag(tag)

        running = asyncio.ensure_future(asyncio.to_thread(tagged))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            while not running.done():  # repeatedly: between two Spark jobs there is none to cancel
                context.cancelJobsWithTag(tag)
                await asyncio.wait((running,), timeout=_CANCEL_INTERVAL_SECONDS)
            with contextlib.suppress(Exception, asyncio.CancelledError):
                running.result()
            raise


class Superseded(PurveyorError):
    """A newer run fills the queue: this one must stop."""


class NotStarted(Enum):
    """Why a job does not begin."""

    NOTHING = "nothing to do"
    LATER = "another job fills this queue"


Decision = PrefillState | NotStarted


def is_gone(found: Registered, job: Job) -> bool:
    """Return whether the subscription of a job is gone."""
    return found.incarnation != job.incarnation or found.record.state is RecordState.DELETING


def start_prefill(found: Registered, job: PrefillJob) -> Decision:
    """Decide about a prefill. Pure.

    The first piece begins again at each run, with a number above all before. A piece of new topics comes behind
    messages that are there already, so it keeps its run through all attempts, as a replay does.
    """
    state = found.prefill
    if state is not None and state.status is PrefillStatus.DONE:
        return NotStarted.NOTHING  # it was delivered again although it was done
    if state is not None and state.status is PrefillStatus.RUNNING and state.job not in (None, job.job):
        return NotStarted.NOTHING  # it is an old one: another was requested since
    fresh = state is None or state.status is PrefillStatus.PENDING
    if state is None:
        state = PrefillState(incarnation=job.incarnation, status=PrefillStatus.PENDING, position=job.position)
    return PrefillState(
        incarnation=job.incarnation,
        status=PrefillStatus.RUNNING,
        position=state.position,
        attempt=state.attempt if fresh or not is_first(found.record, state) else state.attempt + 1,
        job=job.job,
        through=state.through,
    )


def start_replay(found: Registered, job: ReplayJob) -> Decision:
    """Decide about a replay. It continues where its last attempt stopped, with the same rows, so it keeps its run.

    Pure.
    """
    state = found.prefill
    if state is None:
        begin = found.record.begin or 0
        state = PrefillState(incarnation=job.incarnation, status=PrefillStatus.DONE, position=begin, attempt=0)
    match state.status:
        case PrefillStatus.DONE if state.job == job.job:
            return NotStarted.NOTHING
        case PrefillStatus.DONE:
            return replace(
                state,
                status=PrefillStatus.RUNNING,
                attempt=state.attempt + 1,
                total=None,
                written=0,
                reason=None,
                job=job.job,
            )
        case PrefillStatus.RUNNING if state.job == job.job:
            return state
        case PrefillStatus.FAILED:
            raise InvalidInput(
                f"the prefill of {job.name!r} failed, and a replay comes after it: {state.reason}",
                fix=f"`purveyor subscription prefill {job.name}` tries again; then ask for the replay again",
            )
        case _:
            return NotStarted.LATER


class Claim:
    """The state as this run wrote it last. Another writer ends the claim."""

    def __init__(self, registry: Registry, name: str, state: PrefillState, revision: int) -> None:
        self._registry = registry
        self._name = name
        self.state = state
        self._revision = revision

    async def update(self, **changes: Any) -> None:
        """Write the state with these changes; raise Superseded if another run has it."""
        state = replace(self.state, **changes)
        if state == self.state:
            return
        try:
            self._revision = await self._registry.put_prefill(self._name, state, self._revision)
        except WrongRevision as error:
            raise Superseded(f"another run fills the queue of {self._name!r} now") from error
        self.state = state


async def claim_run(
    registry: Registry, found: Registered, job: Job, decide: Callable[[Registered], Decision]
) -> Claim | NotStarted:
    """Claim the queue for a run.

    A state that stays the same is written too, so that an older run of it loses its claim.
    """
    while True:
        decision = decide(found)
        if isinstance(decision, NotStarted):
            return decision
        try:
            revision = await registry.put_prefill(found.name, decision, found.prefill_revision)
        except WrongRevision:
            found = await registry.get(found.name, ("prefill",))
            if is_gone(found, job):
                raise UnknownSubscription(f"subscription {found.name!r} is gone") from None
            continue
        return Claim(registry, found.name, decision, revision)

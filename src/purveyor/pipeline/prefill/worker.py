"""The worker of the queue `prefill`: takes jobs, runs several at once on Spark, and answers each.

A job ends in one of these ways, and in no other:

    done, or its subscription is gone          acknowledged
    another job of the subscription is first   delivered again after a pause that grows
    this worker does not understand it         delivered again after a while: an upgraded worker does
    failed                                     delivered again after a pause, up to `attempts` times
    failed too often, or cannot be right       its state says failed with the reason, it goes to `prefill-failures`

While a job runs, in-progress answers hold its message. A worker that dies loses it to another after ack wait.

Jobs that wait stay on the queue without an acknowledgement. The worker keeps none of them in memory. The server
delivers such a job again before it delivers new ones, so the pause grows with the number of waiting jobs: however many
they are, all workers together check `checks_per_second` of them, and have the rest of the time for other jobs.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Final, assert_never

from pyspark.sql import SparkSession

from purveyor.jetstream.address import Address
from purveyor.jetstream.messages import Message
from purveyor.jetstream.publisher import Expect
from purveyor.model import json_fields
from purveyor.model.control_events import JOB, CatchUpJob, Job, PrefillJob, ReplayJob, decode_job
from purveyor.model.errors import (
    InvalidInput,
    InvalidName,
    Unavailable,
    UnknownSubscription,
    UnreadableRecord,
    WrongRevision,
)
from purveyor.model.registration import PrefillState, PrefillStatus
from purveyor.model.retries import Backoff
from purveyor.model.tracing import carrier_from_headers
from purveyor.pipeline.archive.reader import ArchiveSource
from purveyor.pipeline.job_failures import Failure, explain
from purveyor.pipeline.prefill.job_context import JobContext, JobResult
from purveyor.pipeline.prefill.jobs import run_job
from purveyor.queues.catalogue import PREFILL, PREFILL_FAILURES
from purveyor.queues.client import Queues, connect
from purveyor.queues.dead_letters.letter import DeadLetter
from purveyor.queues.registry import Registered, Registry
from purveyor.queues.waiting_replays import WaitingReplay

_log = logging.getLogger(__name__)

_DURABLE: Final = PREFILL.readers[0].durable
_IN_PROGRESS_SECONDS: Final = PREFILL.readers[0].ack_wait.total_seconds() / 4
_FETCH_WAIT_SECONDS: Final = 5.0
_STOP_POLL_SECONDS: Final = 0.1
_MAX_REMEMBERED_FAILURES: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """How jobs run."""

    at_once: int = 2
    attempts: int = 3
    """How often a job may fail."""
    deliveries: int = 20
    """How often a job may be delivered in all. It ends a job that kills its worker each time."""
    first_pause_seconds: float = 2.0
    """Before the second attempt; the pause doubles."""
    turn_seconds: float = 2.0
    """The first pause of a job that waits for another of its subscription. The pause grows by this each time."""
    longest_turn_seconds: float = 30.0
    upgrade_seconds: float = 15.0
    """The pause before a worker checks a job again that it does not understand."""
    waiting: timedelta = timedelta(days=1)
    """How long a job may wait for another, or for an upgrade."""
    checks_per_second: float = 20.0
    """How many waiting jobs all workers together check per second; a check takes a few milliseconds."""
    progress_seconds: float = 1.0
    patience_seconds: float = 60.0
    replicas: int = 1

    def pause(self, seconds: float, waiting: int) -> float:
        """Return the pause before a worker checks a waiting job again: these seconds, or longer if many jobs wait.

        Pure.

        >>> [WorkerOptions().pause(2.0, waiting) for waiting in (1, 40, 6000)]
        [2.0, 2.0, 300.0]
        """
        return max(seconds, waiting / self.checks_per_second)

    def turn_delay(self, delivered: int) -> float:
        """Return the seconds that a job waits for another of its subscription, by the number of its deliveries.

        Pure.

        >>> [WorkerOptions().turn_delay(delivered) for delivered in (1, 2, 100)]
        [2.0, 4.0, 30.0]
        """
        return min(self.turn_seconds * delivered, self.longest_turn_seconds)


class PrefillWorker:
    """Takes jobs from `prefill` until it is stopped. Any number of workers share the queue.

    >>> worker = PrefillWorker(spark, address, archive)  # doctest: +SKIP
    >>> worker.start()  # doctest: +SKIP
    >>> worker.stop()  # doctest: +SKIP
    """

    def __init__(
        self,
        spark: SparkSession,
        address: Address,
        archive: ArchiveSource,
        options: WorkerOptions | None = None,
    ) -> None:
        self._spark = spark
        self._address = address
        self._archive = archive
        self._options = options or WorkerOptions()
        self._failed: dict[int, int] = {}
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self.handled = 0
        """How many messages were answered."""

    def start(self) -> None:
        """Start in a thread."""
        self._stopping.clear()
        self._thread = threading.Thread(target=self._run_and_log, name="prefill-worker", daemon=True)
        self._thread.start()

    def stop(self, timeout_seconds: float = 30.0) -> None:
        """Stop; running jobs are cancelled on Spark and given back."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout_seconds)

    def run(self, stopping: threading.Event) -> None:
        """Work until the event is set; raise what makes that impossible."""
        asyncio.run(self._run_until(stopping))

    def _run_and_log(self) -> None:
        try:
            self.run(self._stopping)
        except Exception:  # noqa: BLE001 - a thread has no caller that could log it
            _log.exception("the prefill worker ended")

    async def _run_until(self, stopping: threading.Event) -> None:
        options = self._options
        async with connect(self._address, name="purveyor-prefill", patience_seconds=options.patience_seconds) as queues:
            for queue in (PREFILL, PREFILL_FAILURES):
                (await queues.ensure(queue, replicas=options.replicas)).require_usable()
            context = JobContext(
                spark=self._spark,
                archive=self._archive,
                queues=queues,
                registry=await Registry.open(queues, replicas=options.replicas),
                replicas=options.replicas,
                progress_seconds=options.progress_seconds,
                patience_seconds=options.patience_seconds,
            )
            tasks = [asyncio.create_task(self._work(context)) for _ in range(options.at_once)]
            try:
                ended: set[asyncio.Task[None]] = set()
                while not stopping.is_set() and not ended:
                    ended, _ = await asyncio.wait(
                        tasks, timeout=_STOP_POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED
                    )
            finally:
                for task in tasks:
                    task.cancel()
                results = await asyncio.gather(*tasks, return_exceptions=True)
            for error in results:
                if isinstance(error, Exception):
                    raise error

    async def _work(self, context: JobContext) -> None:
        """Run one job at a time."""
        while True:
            try:
                for message in await context.queues.fetch(
                    PREFILL.stream, _DURABLE, 1, wait_seconds=_FETCH_WAIT_SECONDS
                ):
                    await self._handle(context, message)
            except Unavailable as error:  # the server delivers a job without an answer again
                _log.warning("waiting for the server: %s", error)
                await asyncio.sleep(1.0)

    async def _handle(self, context: JobContext, message: Message) -> None:
        try:
            job = decode_job(message.data)
        except UnreadableRecord as error:
            await self._wait_for_upgrade(context, message, None, error)
            return
        except InvalidInput as error:
            await self._give_up(context, message, None, explain(error))
            return
        try:
            async with _keep_in_progress(message):
                result = await run_job(replace(context, trace=carrier_from_headers(message.headers)), job)
                if isinstance(job, ReplayJob):
                    await record_replay(context, message, job, result)
        except asyncio.CancelledError:
            await message.nak()
            raise
        except Unavailable:
            await message.nak(delay=timedelta(seconds=self._options.first_pause_seconds))
            raise
        except UnreadableRecord as error:
            await self._wait_for_upgrade(context, message, job, error)
            return
        except Exception as error:  # noqa: BLE001 - every job must get an answer
            await self._handle_failure(context, message, job, error)
            return
        self._failed.pop(message.sequence, None)
        await self._answer(context, message, job, result)

    async def _answer(self, context: JobContext, message: Message, job: Job, result: JobResult) -> None:
        match result:
            case JobResult.DONE:
                await message.ack(confirm=True)
            case JobResult.LATER if datetime.now(UTC) - message.delivery.timestamp > self._options.waiting:
                await self._give_up(context, message, job, Failure("another job of this subscription did not end"))
            case JobResult.LATER:
                await self._redeliver_later(context, message, self._options.turn_delay(message.delivery.delivered))
            case JobResult.LEFT:
                pass
            case _:
                assert_never(result)
        self.handled += 1

    async def _handle_failure(self, context: JobContext, message: Message, job: Job, error: Exception) -> None:
        failure = explain(error)
        if len(self._failed) > _MAX_REMEMBERED_FAILURES:  # jobs that failed here can end in another worker
            self._failed.pop(next(iter(self._failed)))
        failed = self._failed[message.sequence] = self._failed.get(message.sequence, 0) + 1
        too_often = failed >= self._options.attempts or message.delivery.delivered >= self._options.deliveries
        if isinstance(error, InvalidInput) or too_often:  # lost or refused data may be there at the next attempt
            await self._give_up(context, message, job, failure)
            return
        _log.warning("%s of %s failed, attempt %d: %s", job.kind.value, job.name, failed, failure)
        delay_seconds = Backoff(self._options.first_pause_seconds).delay_seconds(failed)
        await message.nak(delay=timedelta(seconds=delay_seconds))
        self.handled += 1

    async def _wait_for_upgrade(
        self, context: JobContext, message: Message, job: Job | None, error: UnreadableRecord
    ) -> None:
        """Leave a job to a worker that understands it. That does not count as a failure of the job."""
        if datetime.now(UTC) - message.delivery.timestamp > self._options.waiting:
            await forget_replay(context, job)
            await self._give_up(context, message, None, explain(error))
            return
        _log.warning("a job of the queue prefill waits, sequence %d: %s", message.sequence, error)
        await record_waiting_reason(
            context, job.name if job is not None else _subscription_name_in(message.data), str(error)
        )
        await self._redeliver_later(context, message, self._options.upgrade_seconds)
        self.handled += 1

    async def _redeliver_later(self, context: JobContext, message: Message, seconds: float) -> None:
        """Give a waiting job back, to be delivered again after these seconds, or later if many jobs wait."""
        waiting = (await context.queues.consumers.info(PREFILL.stream, _DURABLE)).num_ack_pending
        await message.nak(delay=timedelta(seconds=self._options.pause(seconds, waiting)))

    async def _give_up(self, context: JobContext, message: Message, job: Job | None, failure: Failure) -> None:
        """Write the state, then the failure, then the answer: after a crash between them the job runs again."""
        attempts = max(self._failed.pop(message.sequence, 0), 1)
        if job is not None:
            with contextlib.suppress(UnreadableRecord):  # then the state stays, and `prefill-failures` has the reason
                await record_failure(context, job, failure)
        await forget_replay(context, job)
        await park_job(context.queues, message, str(failure), attempts)
        await message.ack(confirm=True)
        self.handled += 1


@contextlib.asynccontextmanager
async def _keep_in_progress(message: Message) -> AsyncIterator[None]:
    """Keep a message from being delivered to other workers."""

    async def hold() -> None:
        while True:
            await asyncio.sleep(_IN_PROGRESS_SECONDS)
            with contextlib.suppress(Unavailable):
                await message.in_progress()

    holding = asyncio.create_task(hold())
    try:
        yield
    finally:
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)


async def park_job(queues: Queues, message: Message, reason: str, attempts: int) -> None:
    """Put a job that failed for good into `prefill-failures`, in the form of a dead letter."""
    now = datetime.now(UTC)
    letter = DeadLetter(
        reason=reason,
        origin=PREFILL.name,
        subject=message.subject,
        data=message.data,
        failed_first=message.delivery.timestamp,
        failed_last=now,
        headers=message.headers,
        position=message.sequence,
        attempts=attempts,
    )
    _, data, headers = letter.to_message()
    expect = Expect(stream=PREFILL_FAILURES.stream)
    await queues.publish(PREFILL_FAILURES.subjects[0], data, headers=dict(headers), msg_id=letter.id, expect=expect)


async def record_replay(context: JobContext, message: Message, job: ReplayJob, result: JobResult) -> None:
    """Update the record of the waiting replay by the result of the job."""
    match result:
        case JobResult.LATER:
            found = WaitingReplay(
                incarnation=job.incarnation, job=job.job, at=message.delivery.timestamp, sequence=message.sequence
            )
            await context.registry.waiting_replays.adopt(job.name, found)
        case JobResult.DONE:  # usually deleted by now; not if the subscription was deleted before the job began
            await forget_replay(context, job)
        case JobResult.LEFT:
            pass
        case _:
            assert_never(result)


async def forget_replay(context: JobContext, job: Job | None) -> None:
    """Delete the record of a replay that waits no longer. One that is not understood stays."""
    if isinstance(job, ReplayJob):
        with contextlib.suppress(UnreadableRecord):
            await context.registry.waiting_replays.forget(job.name, job.job)


async def record_waiting_reason(context: JobContext, name: str | None, reason: str) -> None:
    """Write to the registry why a prefill does not begin, if it is pending and its record is understood."""
    if name is None:
        return
    with contextlib.suppress(UnknownSubscription, InvalidName, UnreadableRecord, WrongRevision):
        found = await context.registry.get(name, ("prefill",))
        state = found.prefill
        if state is not None and state.status is PrefillStatus.PENDING and state.reason != reason:
            await context.registry.put_prefill(name, replace(state, reason=reason), found.prefill_revision)


def _subscription_name_in(job: bytes) -> str | None:
    """Return the subscription of a job, also of a job that cannot be read otherwise."""
    try:
        name = json_fields.parse(job, JOB.what).get("name")
    except InvalidInput:
        return None
    return name if isinstance(name, str) else None


async def record_failure(context: JobContext, job: Job, failure: Failure) -> None:
    """Write to the registry that a job failed for good, if the subscription and its state still belong to the job."""
    while (found := await context.find(job)) is not None:
        try:
            match job:
                case PrefillJob() | ReplayJob():
                    state = after_failure(found, job, str(failure))
                    if state is not None:
                        await context.registry.put_prefill(job.name, state, found.prefill_revision)
                case CatchUpJob():
                    if found.dispatch is not None and found.dispatch.suspended is not None:
                        # No group any more: an operator has to act.
                        why = f"catch-up failed: {failure}"
                        suspended = replace(found.dispatch.suspended, reason=why, group=None)
                        failed = replace(found.dispatch, suspended=suspended)
                        await context.registry.put_dispatch(job.name, failed, found.dispatch_revision)
                case _:
                    assert_never(job)
        except WrongRevision:
            continue
        return


def after_failure(found: Registered, job: PrefillJob | ReplayJob, reason: str) -> PrefillState | None:
    """Return the prefill state after a job failed for good; None if it belongs to another job. Pure.

    A replay that failed must not hold back live events: the state is done again, with the reason.
    """
    state = found.prefill
    if isinstance(job, PrefillJob):
        if state is None or state.status is PrefillStatus.DONE or state.job not in (job.job, None):
            return None
        return replace(state, status=PrefillStatus.FAILED, reason=reason)
    if state is None or state.job != job.job or state.status is not PrefillStatus.RUNNING:
        return None
    return replace(state, status=PrefillStatus.DONE, reason=f"replay failed: {reason}")

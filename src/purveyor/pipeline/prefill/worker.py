"""The worker behind the queue `prefill`: takes jobs, runs several at once on Spark, and answers for each.

A job ends in one of these ways, and in no other:

    done, or its subscription is gone          acknowledged
    another job of the subscription is first   delivered again after a pause that grows
    this worker does not understand it         delivered again after a while: an upgraded worker does
    failed                                     delivered again after a pause, at most so many times
    failed too often, or cannot be right       its state says failed with the reason, it goes to `prefill-failures`

While a job runs its message is held by in-progress answers, so a worker that dies loses it to another after ack wait.

Jobs that wait stay on the queue without an acknowledgement. The worker keeps none of them in memory. The server
delivers such a job again before it delivers new ones, so the pause grows with the number of jobs that wait: however
many they are, all workers together look at `looks_per_second` of them, and have the rest of the time for other jobs.
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
from purveyor.model.tracing import of_headers
from purveyor.pipeline.archive.reader import ArchiveSource
from purveyor.pipeline.error_summary import Failure, explain
from purveyor.pipeline.prefill.job_context import Ending, Workshop
from purveyor.pipeline.prefill.jobs import run_job
from purveyor.queues.catalogue import PREFILL, PREFILL_FAILURES
from purveyor.queues.client import Queues, connect
from purveyor.queues.dead_letters.letter import DeadLetter
from purveyor.queues.registry import Registered, Registry
from purveyor.queues.waiting_replays import WaitingReplay

_log = logging.getLogger(__name__)

_DURABLE: Final = PREFILL.readers[0].durable
_HOLD_SECONDS: Final = PREFILL.readers[0].ack_wait.total_seconds() / 4
_ASK_SECONDS: Final = 5.0
_LOOK_SECONDS: Final = 0.1
_MOST_REMEMBERED: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """How jobs are run."""

    at_once: int = 2
    attempts: int = 3
    """How often a job may fail."""
    deliveries: int = 20
    """How often a job may be delivered in all: one that kills its worker each time does not go on for ever."""
    first_pause_seconds: float = 2.0
    """Before the second attempt; the pause doubles."""
    turn_seconds: float = 2.0
    """The first pause of a job that waits for another of its subscription. The pause grows by this each time."""
    longest_turn_seconds: float = 30.0
    upgrade_seconds: float = 15.0
    """How soon a job is looked at again that this worker does not understand."""
    waiting: timedelta = timedelta(days=1)
    """For how long a job may wait for another, or for an upgrade."""
    looks_per_second: float = 20.0
    """How many waiting jobs all workers together look at in a second; a look takes a few milliseconds."""
    progress_seconds: float = 1.0
    patience_seconds: float = 60.0
    replicas: int = 1

    def pause(self, seconds: float, waiting: int) -> float:
        """The pause before a worker looks at a waiting job again: these seconds, or longer if many jobs wait. Pure.

        >>> [WorkerOptions().pause(2.0, waiting) for waiting in (1, 40, 6000)]
        [2.0, 2.0, 300.0]
        """
        return max(seconds, waiting / self.looks_per_second)

    def turn(self, delivered: int) -> float:
        """The seconds that a job waits for another job of its subscription, by the number of its deliveries. Pure.

        >>> [WorkerOptions().turn(delivered) for delivered in (1, 2, 100)]
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
        """Begin, in a thread."""
        self._stopping.clear()
        self._thread = threading.Thread(target=self._run_logged, name="prefill-worker", daemon=True)
        self._thread.start()

    def stop(self, timeout_seconds: float = 30.0) -> None:
        """End; jobs that are under way are cancelled on Spark and given back."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout_seconds)

    def run(self, stopping: threading.Event) -> None:
        """Work until the event is set; raises what makes it impossible."""
        asyncio.run(self._until(stopping))

    def _run_logged(self) -> None:
        try:
            self.run(self._stopping)
        except Exception:  # noqa: BLE001 - nobody else would tell
            _log.exception("the prefill worker ended")

    async def _until(self, stopping: threading.Event) -> None:
        options = self._options
        async with connect(self._address, name="purveyor-prefill", patience_seconds=options.patience_seconds) as queues:
            for queue in (PREFILL, PREFILL_FAILURES):
                (await queues.ensure(queue, replicas=options.replicas)).require_usable()
            shop = Workshop(
                spark=self._spark,
                archive=self._archive,
                queues=queues,
                registry=await Registry.open(queues, replicas=options.replicas),
                replicas=options.replicas,
                progress_seconds=options.progress_seconds,
                patience_seconds=options.patience_seconds,
            )
            places = [asyncio.create_task(self._work(shop)) for _ in range(options.at_once)]
            try:
                ended: set[asyncio.Task[None]] = set()
                while not stopping.is_set() and not ended:
                    ended, _ = await asyncio.wait(places, timeout=_LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for place in places:
                    place.cancel()
                results = await asyncio.gather(*places, return_exceptions=True)
            for error in results:
                if isinstance(error, Exception):
                    raise error

    async def _work(self, shop: Workshop) -> None:
        """One place: a job at a time."""
        while True:
            try:
                for message in await shop.queues.fetch(PREFILL.stream, _DURABLE, 1, wait_seconds=_ASK_SECONDS):
                    await self._handle(shop, message)
            except Unavailable as error:  # what was not answered is delivered again
                _log.warning("waiting for the server: %s", error)
                await asyncio.sleep(1.0)

    async def _handle(self, shop: Workshop, message: Message) -> None:
        try:
            job = decode_job(message.data)
        except UnreadableRecord as error:
            await self._wait_for_upgrade(shop, message, None, error)
            return
        except InvalidInput as error:
            await self._give_up(shop, message, None, explain(error))
            return
        try:
            async with _held(message):
                ending = await run_job(replace(shop, trace=of_headers(message.headers)), job)
                if isinstance(job, ReplayJob):
                    await note_replay(shop, message, job, ending)
        except asyncio.CancelledError:
            await message.nak()
            raise
        except Unavailable:
            await message.nak(delay=timedelta(seconds=self._options.first_pause_seconds))
            raise
        except UnreadableRecord as error:
            await self._wait_for_upgrade(shop, message, job, error)
            return
        except Exception as error:  # noqa: BLE001 - whatever it is, the job has to end in a word
            await self._failed_with(shop, message, job, error)
            return
        self._failed.pop(message.sequence, None)
        await self._answer(shop, message, job, ending)

    async def _answer(self, shop: Workshop, message: Message, job: Job, ending: Ending) -> None:
        match ending:
            case Ending.DONE:
                await message.ack(confirm=True)
            case Ending.LATER if datetime.now(UTC) - message.delivery.timestamp > self._options.waiting:
                await self._give_up(shop, message, job, Failure("another job of this subscription did not end"))
            case Ending.LATER:
                await self._look_later(shop, message, self._options.turn(message.delivery.delivered))
            case Ending.LEFT:
                pass
            case _:
                assert_never(ending)
        self.handled += 1

    async def _failed_with(self, shop: Workshop, message: Message, job: Job, error: Exception) -> None:
        failure = explain(error)
        if len(self._failed) > _MOST_REMEMBERED:  # of jobs that failed here and ended elsewhere nobody tells us
            self._failed.pop(next(iter(self._failed)))
        failed = self._failed[message.sequence] = self._failed.get(message.sequence, 0) + 1
        too_often = failed >= self._options.attempts or message.delivery.delivered >= self._options.deliveries
        if isinstance(error, InvalidInput) or too_often:  # what was lost or refused may be there at the next attempt
            await self._give_up(shop, message, job, failure)
            return
        _log.warning("%s of %s failed, attempt %d: %s", job.kind.value, job.name, failed, failure)
        pause = self._options.first_pause_seconds * 2 ** (failed - 1)
        await message.nak(delay=timedelta(seconds=pause))
        self.handled += 1

    async def _wait_for_upgrade(
        self, shop: Workshop, message: Message, job: Job | None, error: UnreadableRecord
    ) -> None:
        """Leave a job to a worker that understands it. That is no failure of the job, and counts as none."""
        if datetime.now(UTC) - message.delivery.timestamp > self._options.waiting:
            await forget_replay(shop, job)
            await self._give_up(shop, message, None, explain(error))
            return
        _log.warning("a job of the queue prefill waits, sequence %d: %s", message.sequence, error)
        await tell_waiting(shop, job.name if job is not None else _name_in(message.data), str(error))
        await self._look_later(shop, message, self._options.upgrade_seconds)
        self.handled += 1

    async def _look_later(self, shop: Workshop, message: Message, seconds: float) -> None:
        """Give a job that waits back, to be delivered again after these seconds, or later if many wait."""
        waiting = (await shop.queues.consumers.info(PREFILL.stream, _DURABLE)).num_ack_pending
        await message.nak(delay=timedelta(seconds=self._options.pause(seconds, waiting)))

    async def _give_up(self, shop: Workshop, message: Message, job: Job | None, failure: Failure) -> None:
        """State first, then the failures, then the answer: after a crash between them the job is tried once more."""
        attempts = max(self._failed.pop(message.sequence, 0), 1)
        if job is not None:
            with contextlib.suppress(UnreadableRecord):  # then it stays as it is, and the failures tell
                await tell_failure(shop, job, failure)
        await forget_replay(shop, job)
        await park_job(shop.queues, message, str(failure), attempts)
        await message.ack(confirm=True)
        self.handled += 1


@contextlib.asynccontextmanager
async def _held(message: Message) -> AsyncIterator[None]:
    """Keep a message from being delivered to others."""

    async def hold() -> None:
        while True:
            await asyncio.sleep(_HOLD_SECONDS)
            with contextlib.suppress(Unavailable):
                await message.in_progress()

    holding = asyncio.create_task(hold())
    try:
        yield
    finally:
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)


async def park_job(queues: Queues, message: Message, reason: str, attempts: int) -> None:
    """Put a job that failed for good where people find it, in the shape of a dead letter."""
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


async def note_replay(shop: Workshop, message: Message, job: ReplayJob, ending: Ending) -> None:
    """Bring the record of the waiting replay to what became of the job."""
    match ending:
        case Ending.LATER:
            found = WaitingReplay(
                incarnation=job.incarnation, job=job.job, at=message.delivery.timestamp, sequence=message.sequence
            )
            await shop.registry.waiting_replays.adopt(job.name, found)
        case Ending.DONE:  # usually deleted by now; not if the subscription was deleted before the job began
            await forget_replay(shop, job)
        case Ending.LEFT:
            pass
        case _:
            assert_never(ending)


async def forget_replay(shop: Workshop, job: Job | None) -> None:
    """Delete the record of a replay that waits no longer. One that is not understood stays."""
    if isinstance(job, ReplayJob):
        with contextlib.suppress(UnreadableRecord):
            await shop.registry.waiting_replays.forget(job.name, job.job)


async def tell_waiting(shop: Workshop, name: str | None, reason: str) -> None:
    """Say in the registry why a prefill does not begin, if one is waited for and all of that is understood."""
    if name is None:
        return
    with contextlib.suppress(UnknownSubscription, InvalidName, UnreadableRecord, WrongRevision):
        found = await shop.registry.get(name, ("prefill",))
        state = found.prefill
        if state is not None and state.status is PrefillStatus.PENDING and state.reason != reason:
            await shop.registry.put_prefill(name, replace(state, reason=reason), found.prefill_revision)


def _name_in(job: bytes) -> str | None:
    """The subscription that a job is for, whatever else it says."""
    try:
        name = json_fields.parse(job, JOB.what).get("name")
    except InvalidInput:
        return None
    return name if isinstance(name, str) else None


async def tell_failure(shop: Workshop, job: Job, failure: Failure) -> None:
    """Say in the registry that a job failed for good, if the subscription and its state are still the job's."""
    while (found := await shop.find(job)) is not None:
        try:
            match job:
                case PrefillJob() | ReplayJob():
                    state = after_failure(found, job, str(failure))
                    if state is not None:
                        await shop.registry.put_prefill(job.name, state, found.prefill_revision)
                case CatchUpJob():
                    if found.dispatch is not None and found.dispatch.suspended is not None:
                        # Of no group any more: somebody has to act.
                        why = f"catch-up failed: {failure}"
                        suspended = replace(found.dispatch.suspended, reason=why, group=None)
                        told = replace(found.dispatch, suspended=suspended)
                        await shop.registry.put_dispatch(job.name, told, found.dispatch_revision)
                case _:
                    assert_never(job)
        except WrongRevision:
            continue
        return


def after_failure(found: Registered, job: PrefillJob | ReplayJob, reason: str) -> PrefillState | None:
    """The prefill state when a job failed for good; None when it is not the job's. Pure.

    A replay that failed must not keep live events back: the state is done again, and tells the reason.
    """
    state = found.prefill
    if isinstance(job, PrefillJob):
        if state is None or state.status is PrefillStatus.DONE or state.job not in (job.job, None):
            return None
        return replace(state, status=PrefillStatus.FAILED, reason=reason)
    if state is None or state.job != job.job or state.status is not PrefillStatus.RUNNING:
        return None
    return replace(state, status=PrefillStatus.DONE, reason=f"replay failed: {reason}")

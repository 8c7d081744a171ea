"""The worker behind the queue `prefill`: takes jobs, runs several at once on Spark, and answers for each.

A job ends in one of these ways, and in no other:

    done, or its subscription is gone          acknowledged
    another job of the subscription is first   delivered again in a few seconds
    failed                                     delivered again after a pause, at most so many times
    failed too often, or cannot be right       its state says failed with the reason, it goes to `prefill-failures`

While a job runs its message is held by in-progress answers, so a worker that dies loses it to another after ack wait.
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

from purveyor.model.control import CatchUpJob, Job, PrefillJob, ReplayJob, decode_job
from purveyor.model.errors import InvalidInput, Unavailable, WrongRevision
from purveyor.model.registration import PrefillState, PrefillStatus
from purveyor.model.tracing import of_headers
from purveyor.pipeline.archive.read import ArchiveSource
from purveyor.pipeline.failures import Failure, explain
from purveyor.pipeline.prefill.jobs import run_job
from purveyor.pipeline.prefill.workshop import Ending, Workshop
from purveyor.queues.address import Address
from purveyor.queues.catalogue import PREFILL, PREFILL_FAILURES
from purveyor.queues.client import Queues, connect
from purveyor.queues.dead_letters import DeadLetter
from purveyor.queues.messages import Message
from purveyor.queues.publisher import Expect
from purveyor.queues.registry import Registered, Registry

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
    """How soon a job that waits for another of its subscription is looked at again."""
    waiting: timedelta = timedelta(days=1)
    """For how long it may wait so."""
    progress_seconds: float = 1.0
    patience_seconds: float = 60.0
    replicas: int = 1


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
        except InvalidInput as error:
            await self._give_up(shop, message, None, explain(error))
            return
        try:
            async with _held(message):
                ending = await run_job(replace(shop, trace=of_headers(message.headers)), job)
        except asyncio.CancelledError:
            await message.nak()
            raise
        except Unavailable:
            await message.nak(delay=timedelta(seconds=self._options.first_pause_seconds))
            raise
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
                await message.nak(delay=timedelta(seconds=self._options.turn_seconds))
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

    async def _give_up(self, shop: Workshop, message: Message, job: Job | None, failure: Failure) -> None:
        """State first, then the failures, then the answer: after a crash between them the job is tried once more."""
        attempts = max(self._failed.pop(message.sequence, 0), 1)
        if job is not None:
            await tell_failure(shop, job, failure)
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
                        suspended = replace(found.dispatch.suspended, reason=f"catch-up failed: {failure}")
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

"""What every job works with: Spark, the archive, queues and registry; and how work on Spark is begun and ended."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import TypeVar
from uuid import uuid4

from pyspark.sql import SparkSession

from purveyor.model.control_events import CatchUpJob, Job
from purveyor.model.errors import UnknownStream, UnknownSubscription
from purveyor.model.tracing import Carrier
from purveyor.pipeline.archive.reader import ArchiveSource
from purveyor.pipeline.prefill.run_claims import is_gone
from purveyor.queues.catalogue import subscription_queue
from purveyor.queues.client import Queues
from purveyor.queues.registry import Registered, Registry
from purveyor.queues.subscriptions import make_queue_again

T = TypeVar("T")
_CANCEL_AGAIN_SECONDS = 0.2


class Ending(Enum):
    """How a job ended, as far as its message is concerned."""

    DONE = "done"
    """Acknowledge it: all is written, or there is nobody any more to write it for."""
    LATER = "later"
    """Another job of this subscription comes first: deliver it again after a while."""
    LEFT = "left"
    """A newer run of the same job has it: say nothing, the answer is that one's to give."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workshop:
    """See the module."""

    spark: SparkSession
    archive: ArchiveSource
    queues: Queues
    registry: Registry
    replicas: int = 1
    progress_seconds: float = 1.0
    patience_seconds: float = 60.0
    trace: Carrier = field(default_factory=dict)
    """The trace of whoever asked for the job."""

    async def find(self, job: Job) -> Registered | None:
        """The subscription that a job is for, with the state that it changes; None when it is gone."""
        state = "dispatch" if isinstance(job, CatchUpJob) else "prefill"
        try:
            found = await self.registry.get(job.name, (state,))
        except UnknownSubscription:
            return None
        return None if is_gone(found, job) else found

    async def last_sequence(self, job: Job) -> int:
        """The end of the subscription's queue, which is made again if it is missing."""
        queue = subscription_queue(job.name)
        try:
            return (await self.queues.streams.info(queue.stream)).state.last_seq
        except UnknownStream:
            if await self.find(job) is None:
                raise
            make_again = partial(make_queue_again, self.queues.address, job.name, job.incarnation)
            await asyncio.to_thread(make_again, replicas=self.replicas)
            return (await self.queues.streams.info(queue.stream)).state.last_seq

    async def on_spark(self, work: Callable[[], T]) -> T:
        """Run what starts Spark jobs in a thread. When we are cancelled they are, and the thread has ended."""
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
            while not running.done():  # again and again: between two Spark jobs there is none to cancel
                context.cancelJobsWithTag(tag)
                await asyncio.wait((running,), timeout=_CANCEL_AGAIN_SECONDS)
            with contextlib.suppress(Exception, asyncio.CancelledError):
                running.result()
            raise

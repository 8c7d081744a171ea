"""The jobs prefill and replay, step by step. A crash between two steps leaves a job that is delivered again.

Prefill, exact at the position L where the subscription begins:

    1 note where the queue ends      nothing is changed yet
    2 claim the next run by CAS      an older run can neither finish nor write behind this one any more
    3 purge `.prefill` up to 1       what an older run left; never what a newer one writes, which lies behind
    4 write all objects as of L      see `queue_writer`
    5 count                          messages that an older run wrote between 2 and 4 are found: then once more
    6 done, by CAS                   delivery begins

Replay claims the state in the same way, keeps its run through all attempts, and writes behind what is there.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial
from typing import assert_never

from purveyor.jetstream.bulk import Target
from purveyor.jetstream.headers import first
from purveyor.model import tracing
from purveyor.model.control_events import CatchUpJob, Job, PrefillJob, ReplayJob, ReplayPoint
from purveyor.model.errors import PurveyorError, Unavailable, UnknownSubscription, UnreadableRecord
from purveyor.model.registration import PrefillStatus
from purveyor.pipeline.prefill import archive_queries
from purveyor.pipeline.prefill.catch_up import catch_up
from purveyor.pipeline.prefill.job_context import (
    Claim,
    JobContext,
    JobResult,
    NotStarted,
    Superseded,
    claim_run,
    start_prefill,
    start_replay,
)
from purveyor.pipeline.prefill.queue_writer import NUMBER, NUMBERS_PER_RUN, FillSpec, fill_queue
from purveyor.queues.catalogue import subscription_queue
from purveyor.queues.registry import Registered


class Incomplete(PurveyorError):
    """The queue does not hold what was written; another attempt begins again."""

    retryable = True


async def run_job(context: JobContext, job: Job) -> JobResult:
    """Run a job. Raise what made it fail; a subscription that is gone, also in the middle of it, is not a failure."""
    found = await context.find(job)
    if found is None:
        return JobResult.DONE
    try:
        match job:
            case PrefillJob():
                return await prefill(context, job, found)
            case ReplayJob():
                return await replay(context, job, found)
            case CatchUpJob():
                return await catch_up(context, job)
            case _:
                assert_never(job)
    except Superseded:
        return JobResult.DONE if await context.find(job) is None else JobResult.LEFT
    except UnknownSubscription:
        return JobResult.DONE
    except Exception:
        if await context.find(job) is None:
            return JobResult.DONE
        raise


async def prefill(context: JobContext, job: PrefillJob, found: Registered) -> JobResult:
    """Write all objects as of the job's position, in the order of the subscription's topics."""
    stream, subject = subscription_queue(job.name).stream, f"{job.name}.prefill"
    end = await context.last_sequence(job)
    claim = await claim_run(context.registry, found, job, lambda now: start_prefill(now, job))
    if isinstance(claim, NotStarted):
        return _result_of(claim)
    await context.queues.streams.purge(stream, subject=subject, before_sequence=end + 1)
    run = claim.state.attempt
    spec = FillSpec(
        address=context.queues.address,
        target=Target(subject=subject, stream=stream, owner=job.incarnation, position_header=NUMBER),
        origin=job.name,
        hidden=found.record.definition.hidden_fields,
        run=run,
        id_prefix=f"prefill:{run}",
        patience_seconds=context.patience_seconds,
        traces=tracing.is_enabled(),
    )

    def write() -> int:
        objects = archive_queries.objects(context.spark, context.archive, found.record.definition, job.position)
        return fill_queue(objects, spec)

    async def count() -> int:
        return (await context.queues.streams.subjects(stream, subject)).get(subject, 0)

    with tracing.span("prefill", context.trace, subscription=job.name, position=job.position):
        written = await _write_with_progress(context, claim, context.run_on_spark(write), count)
        await _check(context, spec, written, await count())
    await claim.update(status=PrefillStatus.DONE, total=written, written=written)
    return JobResult.DONE


async def _check(context: JobContext, spec: FillSpec, written: int, there: int) -> None:
    """Raise Incomplete unless the queue holds this run's messages and no others."""
    problem = f"{there} messages where {written} were written" if there != written else None
    if problem is None and written:
        begins = await context.queues.streams.get_next(spec.target.stream, 1, spec.target.subject)
        if first(begins.headers, NUMBER) != str(spec.run * NUMBERS_PER_RUN + 1):
            problem = f"the first message has the number {first(begins.headers, NUMBER)}"
    if problem is not None:
        raise Incomplete(f"run {spec.run} of {spec.target.subject!r}: {problem}", fix="the worker tries again")


async def replay(context: JobContext, job: ReplayJob, found: Registered) -> JobResult:
    """Write the events of a range that the subscription gets once more, in their order, behind what is there.

    First it checks whether it has to wait: a job that waits must not start work on Spark at each check. Raise
    UnreadableRecord if the record of the waiting replay is not understood: then no replay of this subscription begins.
    """
    if start_replay(found, job) is NotStarted.LATER:
        return JobResult.LATER
    waiting = context.registry.waiting_replays
    if found.prefill is None or found.prefill.job != job.job:
        await waiting.find(job.name)
    stream, subject = subscription_queue(job.name).stream, f"{job.name}.prefill"
    begin, end = await resolve(context, job)
    await context.last_sequence(job)
    claim = await claim_run(context.registry, found, job, lambda now: start_replay(now, job))
    if isinstance(claim, NotStarted):
        return _result_of(claim)
    with contextlib.suppress(UnreadableRecord):  # a newer program wrote it since: it belongs to another job
        await waiting.forget(job.name, job.job)  # from here on another replay may wait
    spec = FillSpec(
        address=context.queues.address,
        target=Target(subject=subject, stream=stream, owner=job.incarnation, position_header=NUMBER),
        origin=job.name,
        hidden=found.record.definition.hidden_fields,
        run=claim.state.attempt,
        id_prefix=f"replay:{job.job}",
        replay=job.job,
        by_position=True,
        patience_seconds=context.patience_seconds,
        traces=tracing.is_enabled(),
    )

    def write() -> int:
        return fill_queue(
            archive_queries.history(context.spark, context.archive, found.record.definition, job, (begin, end)), spec
        )

    before = (await context.queues.streams.subjects(stream, subject)).get(subject, 0)

    async def count() -> int:
        return max((await context.queues.streams.subjects(stream, subject)).get(subject, 0) - before, 0)

    with tracing.span("replay", context.trace, subscription=job.name, first=begin, last=end):
        written = await _write_with_progress(context, claim, context.run_on_spark(write), count)
    await claim.update(status=PrefillStatus.DONE, total=written, written=written)
    return JobResult.DONE


async def resolve(context: JobContext, job: ReplayJob) -> tuple[int, int]:
    """Return the first and last position of a replay; a time itself is not included at the end."""
    newest = (await context.queues.streams.info(context.archive.stream)).state.last_seq
    begin = await _position(context, job.from_, newest)
    if job.to is None:
        return begin, newest
    return begin, min(job.to, newest) if isinstance(job.to, int) else await _position(context, job.to, newest) - 1


async def _position(context: JobContext, moment_or_position: ReplayPoint, newest: int) -> int:
    """Return the first position stored at or after a time."""
    if isinstance(moment_or_position, int):
        return max(moment_or_position, 1)
    stored = partial(archive_queries.first_stored_at, context.spark, context.archive, moment_or_position, newest)
    found = await context.run_on_spark(stored)
    return found if found is not None else newest + 1


async def _write_with_progress(
    context: JobContext, claim: Claim, work: Awaitable[int], count: Callable[[], Awaitable[int]]
) -> int:
    """Return the result of the write.

    Meanwhile the state shows the progress, and the write ends when the claim does.
    """
    ended = asyncio.Event()

    async def report_progress() -> None:
        # The event ends this task; it is never cancelled. An interrupted report may be stored under a revision that the
        # claim does not know, and would then look like that of another run.
        while not await _set_within(ended, context.progress_seconds):
            with contextlib.suppress(Unavailable):  # only a report; the write itself waits for the server
                await claim.update(written=await count())

    writing, reporting = asyncio.ensure_future(work), asyncio.ensure_future(report_progress())
    try:
        await asyncio.wait((writing, reporting), return_when=asyncio.FIRST_COMPLETED)
        if reporting.done():
            reporting.result()
        return await writing
    finally:
        ended.set()
        writing.cancel()
        await asyncio.gather(reporting, writing, return_exceptions=True)


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
    return event.is_set()


def _result_of(reason: NotStarted) -> JobResult:
    match reason:
        case NotStarted.NOTHING:
            return JobResult.DONE
        case NotStarted.LATER:
            return JobResult.LATER
        case _:
            assert_never(reason)

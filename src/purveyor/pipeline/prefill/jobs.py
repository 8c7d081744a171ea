"""Prefill and replay, step by step. A crash between two steps leaves a job that is delivered again.

Prefill, exact at the position L where the subscription begins:

    1 note where the queue ends      nothing is changed yet
    2 take the next run by CAS       an older run can neither finish nor write behind us any more
    3 purge `.prefill` up to 1       what an older run left; never what a newer one writes, which lies behind
    4 write all objects as of L      see `fill`
    5 count                          messages that an older run slipped in between 2 and 4 are found: then once more
    6 done, by CAS                   delivery begins

Replay takes the state in the same way, keeps its run through all attempts, and writes behind what is there.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial
from typing import assert_never

from purveyor.jetstream.bulk import Target
from purveyor.jetstream.headers import first
from purveyor.model import tracing
from purveyor.model.control_events import CatchUpJob, Job, Place, PrefillJob, ReplayJob
from purveyor.model.errors import PurveyorError, Unavailable, UnknownSubscription, UnreadableRecord
from purveyor.model.registration import PrefillStatus
from purveyor.pipeline.prefill import archive_queries
from purveyor.pipeline.prefill.catch_up import catch_up
from purveyor.pipeline.prefill.job_context import Ending, Workshop
from purveyor.pipeline.prefill.queue_writer import NUMBER, RUN, Filling, fill
from purveyor.pipeline.prefill.run_claims import (
    Claim,
    Superseded,
    Verdict,
    begin_prefill,
    begin_replay,
    take,
)
from purveyor.queues.catalogue import subscription_queue
from purveyor.queues.registry import Registered


class Incomplete(PurveyorError):
    """The queue does not hold what was written; another attempt begins anew."""

    retryable = True


async def run_job(shop: Workshop, job: Job) -> Ending:
    """Do a job. Raises what made it fail; a subscription that is gone, also in the midst of it, is no failure."""
    found = await shop.find(job)
    if found is None:
        return Ending.DONE
    try:
        match job:
            case PrefillJob():
                return await prefill(shop, job, found)
            case ReplayJob():
                return await replay(shop, job, found)
            case CatchUpJob():
                return await catch_up(shop, job)
            case _:
                assert_never(job)
    except Superseded:
        return Ending.DONE if await shop.find(job) is None else Ending.LEFT
    except UnknownSubscription:
        return Ending.DONE
    except Exception:
        if await shop.find(job) is None:
            return Ending.DONE
        raise


async def prefill(shop: Workshop, job: PrefillJob, found: Registered) -> Ending:
    """All objects as of the job's position, in the order of the subscription's topics."""
    stream, subject = subscription_queue(job.name).stream, f"{job.name}.prefill"
    end = await shop.last_sequence(job)
    claim = await take(shop.registry, found, job, lambda now: begin_prefill(now, job))
    if isinstance(claim, Verdict):
        return _ending(claim)
    await shop.queues.streams.purge(stream, subject=subject, before_sequence=end + 1)
    run = claim.state.attempt
    filling = Filling(
        address=shop.queues.address,
        target=Target(subject=subject, stream=stream, owner=job.incarnation, position_header=NUMBER),
        origin=job.name,
        hidden=found.record.definition.hidden_fields,
        run=run,
        id_prefix=f"prefill:{run}",
        patience_seconds=shop.patience_seconds,
        traces=tracing.enabled(),
    )

    def write() -> int:
        objects = archive_queries.objects(shop.spark, shop.archive, found.record.definition, job.position)
        return fill(objects, filling)

    async def count() -> int:
        return (await shop.queues.streams.subjects(stream, subject)).get(subject, 0)

    with tracing.span("prefill", shop.trace, subscription=job.name, position=job.position):
        written = await _watched(shop, claim, shop.on_spark(write), count)
        await _check(shop, filling, written, await count())
    await claim.update(status=PrefillStatus.DONE, total=written, written=written)
    return Ending.DONE


async def _check(shop: Workshop, filling: Filling, written: int, there: int) -> None:
    """Whether the queue holds this run's messages and no others."""
    problem = f"{there} messages where {written} were written" if there != written else None
    if problem is None and written:
        begins = await shop.queues.streams.get_next(filling.target.stream, 1, filling.target.subject)
        if first(begins.headers, NUMBER) != str(filling.run * RUN + 1):
            problem = f"the first message has the number {first(begins.headers, NUMBER)}"
    if problem is not None:
        raise Incomplete(f"run {filling.run} of {filling.target.subject!r}: {problem}", fix="it is tried again")


async def replay(shop: Workshop, job: ReplayJob, found: Registered) -> Ending:
    """The events of a range that the subscription asks for, once more, in their order, behind what is there.

    Whether it has to wait is the first question: a job that waits must not start work on Spark at each look.
    UnreadableRecord if the record of the waiting replay is not understood: then no replay of this subscription begins.
    """
    if begin_replay(found, job) is Verdict.LATER:
        return Ending.LATER
    waiting = shop.registry.waiting_replays
    if found.prefill is None or found.prefill.job != job.job:
        await waiting.find(job.name)
    stream, subject = subscription_queue(job.name).stream, f"{job.name}.prefill"
    begin, end = await resolve(shop, job)
    await shop.last_sequence(job)
    claim = await take(shop.registry, found, job, lambda now: begin_replay(now, job))
    if isinstance(claim, Verdict):
        return _ending(claim)
    with contextlib.suppress(UnreadableRecord):  # a newer program wrote it since: it is that of another job
        await waiting.forget(job.name, job.job)  # from here on another replay may wait
    filling = Filling(
        address=shop.queues.address,
        target=Target(subject=subject, stream=stream, owner=job.incarnation, position_header=NUMBER),
        origin=job.name,
        hidden=found.record.definition.hidden_fields,
        run=claim.state.attempt,
        id_prefix=f"replay:{job.job}",
        replay=job.job,
        by_position=True,
        patience_seconds=shop.patience_seconds,
        traces=tracing.enabled(),
    )

    def write() -> int:
        return fill(
            archive_queries.history(shop.spark, shop.archive, found.record.definition, job, (begin, end)), filling
        )

    before = (await shop.queues.streams.subjects(stream, subject)).get(subject, 0)

    async def count() -> int:
        return max((await shop.queues.streams.subjects(stream, subject)).get(subject, 0) - before, 0)

    with tracing.span("replay", shop.trace, subscription=job.name, first=begin, last=end):
        written = await _watched(shop, claim, shop.on_spark(write), count)
    await claim.update(status=PrefillStatus.DONE, total=written, written=written)
    return Ending.DONE


async def resolve(shop: Workshop, job: ReplayJob) -> tuple[int, int]:
    """The positions between which a replay goes, both included; a time ends before it."""
    newest = (await shop.queues.streams.info(shop.archive.stream)).state.last_seq
    begin = await _position(shop, job.from_, newest)
    if job.to is None:
        return begin, newest
    return begin, min(job.to, newest) if isinstance(job.to, int) else await _position(shop, job.to, newest) - 1


async def _position(shop: Workshop, place: Place, newest: int) -> int:
    """The first position stored at or after a time."""
    if isinstance(place, int):
        return max(place, 1)
    stored = partial(archive_queries.first_stored_at, shop.spark, shop.archive, place, newest)
    found = await shop.on_spark(stored)
    return found if found is not None else newest + 1


async def _watched(shop: Workshop, claim: Claim, work: Awaitable[int], count: Callable[[], Awaitable[int]]) -> int:
    """The result of the write; meanwhile the state tells how far it is, and the write ends when the claim does."""
    ended = asyncio.Event()

    async def tell() -> None:
        # Ended by the event and never cancelled: a report cut off on its way may be stored under a revision that the
        # claim does not know, and would then look like somebody else's.
        while not await _set_within(ended, shop.progress_seconds):
            with contextlib.suppress(Unavailable):  # only a report; the write waits for the server itself
                await claim.update(written=await count())

    writing, telling = asyncio.ensure_future(work), asyncio.ensure_future(tell())
    try:
        await asyncio.wait((writing, telling), return_when=asyncio.FIRST_COMPLETED)
        if telling.done():
            telling.result()
        return await writing
    finally:
        ended.set()
        writing.cancel()
        await asyncio.gather(telling, writing, return_exceptions=True)


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
    return event.is_set()


def _ending(verdict: Verdict) -> Ending:
    match verdict:
        case Verdict.NOTHING:
            return Ending.DONE
        case Verdict.LATER:
            return Ending.LATER
        case _:
            assert_never(verdict)

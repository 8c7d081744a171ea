"""The jobs prefill, replay and catch-up, step by step. A crash between two steps leaves a job that is delivered again.

Prefill, exact at the position L where the subscription begins:

    1 note where the queue ends      nothing is changed yet
    2 claim the next run by CAS      an older run can neither finish nor write behind this one any more
    3 purge `.prefill` up to 1       what an older run left; never what a newer one writes, which lies behind
    4 write all objects as of L      see `queue_writer`
    5 count                          messages that an older run wrote between 2 and 4 are found: then all again
    6 done, by CAS                   delivery begins

Replay claims the state in the same way, keeps its run through all attempts, and writes behind what is there. So does
the prefill of topics that a change of the subscription added at a later L: only objects of topics that are new.

What is selected at L, and at each position that a catch-up writes, is decided by `Record.definition_at`. A replay uses
the current definition: it can deliver events that the definition did not select when they came.

Catch-up writes what a suspended subscription missed from the archive into `<name>.main`, until dispatch takes over. A
round writes the rows from `next` on with the same watermark that dispatch uses, then moves `next` by compare-and-set. A
crash between the two repeats the round, which finds its rows in the queue. The dispatcher leaves the subscription out
until the gap before its own batch is small, then closes that gap itself.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Final, assert_never

from purveyor.jetstream.bulk import AppendOptions, Refusal, RefusalKind, Target
from purveyor.jetstream.headers import first
from purveyor.model import tracing
from purveyor.model.control_events import CatchUpJob, Job, PrefillJob, ReplayJob, ReplayPoint
from purveyor.model.errors import (
    InvalidInput,
    PurveyorError,
    Unavailable,
    UnknownSubscription,
    UnreadableRecord,
    WrongRevision,
)
from purveyor.model.registration import DispatchState, PrefillStatus, Record, Suspension
from purveyor.model.subscription import Subscription
from purveyor.pipeline.archive.layout import PositionRange
from purveyor.pipeline.archive.reader import events
from purveyor.pipeline.dispatch.batch_job import BatchJob, Isolation, WriteOutcome, archived_topic_batches
from purveyor.pipeline.dispatch.batch_plan import SMALL_GAP_POSITIONS, PlannedTarget, in_force
from purveyor.pipeline.dispatch.suspensions import suspension_reason
from purveyor.pipeline.dispatch.topic_prefill import begin_prefill, is_first, next_piece
from purveyor.pipeline.prefill import archive_queries
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
from purveyor.pipeline.prefill.queue_writer import NUMBER, NUMBERS_PER_RUN, FillSpec, fill_queue, refusal_error
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
    """Write the pieces of a prefill, one after the other (see `dispatch.topic_prefill`)."""
    end = await context.last_sequence(job)
    claim = await claim_run(context.registry, found, job, lambda now: start_prefill(now, job))
    if isinstance(claim, NotStarted):
        return _result_of(claim)
    record = (await context.registry.get(job.name, ())).record  # with every change that the claimed state is about
    if record.incarnation != job.incarnation:
        raise UnknownSubscription(f"subscription {job.name!r} is gone")
    total = 0
    while True:
        piece = partial(_first_piece, end=end) if is_first(record, claim.state) else _piece_of_new_topics
        with tracing.span("prefill", context.trace, subscription=job.name, position=claim.state.position):
            total += await piece(context, record, claim)
        following = next_piece(record, claim.state)
        if following is None:
            break
        await claim.update(position=following, attempt=claim.state.attempt + 1)
    await claim.update(status=PrefillStatus.DONE, total=total, written=total)
    return JobResult.DONE


async def _first_piece(context: JobContext, record: Record, claim: Claim, *, end: int) -> int:
    """Write all objects as of the begin, in the order of the topics; return how many. `end` is the end of the queue."""
    position, definition = claim.state.position, record.definition_at(claim.state.position + 1)
    spec = _prefill_spec(context, record, definition, claim.state.attempt)
    stream, subject = spec.target.stream, spec.target.subject
    await context.queues.streams.purge(stream, subject=subject, before_sequence=end + 1)

    def write() -> int:
        return fill_queue(archive_queries.objects(context.spark, context.archive, definition, position), spec)

    async def count() -> int:
        return (await context.queues.streams.subjects(stream, subject)).get(subject, 0)

    written = await _write_with_progress(context, claim, context.run_on_spark(write), count)
    await _check(context, spec, written, await count())
    return written


async def _piece_of_new_topics(context: JobContext, record: Record, claim: Claim) -> int:
    """Write the objects of the topics that a change added, as of its position, behind what is there."""
    position = claim.state.position
    before = next((each.selection for each in record.past if each.until == position), None)
    if before is None:
        raise InvalidInput(
            f"subscription {record.name!r} has no change at position {position} whose topics could be prefilled",
            fix="remove the topics and add them again with a prefill",
        )
    definition = record.definition_at(position + 1)
    spec = _prefill_spec(context, record, definition, claim.state.attempt)

    def write() -> int:
        objects = archive_queries.new_objects(
            context.spark, context.archive, definition, before.for_dispatch(record.name), position
        )
        return fill_queue(objects, spec)

    count = await _counter(context, spec)
    return await _write_with_progress(context, claim, context.run_on_spark(write), count)


def _prefill_spec(context: JobContext, record: Record, definition: Subscription, run: int) -> FillSpec:
    stream, subject = subscription_queue(record.name).stream, f"{record.name}.prefill"
    return FillSpec(
        address=context.queues.address,
        target=Target(subject=subject, stream=stream, owner=record.incarnation, position_header=NUMBER),
        origin=record.name,
        hidden=definition.hidden_fields,
        run=run,
        id_prefix=f"prefill:{run}",
        patience_seconds=context.patience_seconds,
        traces=tracing.is_enabled(),
    )


async def _counter(context: JobContext, spec: FillSpec) -> Callable[[], Awaitable[int]]:
    """Return a function that counts what is written behind the messages that are there now."""
    stream, subject = spec.target.stream, spec.target.subject
    before = (await context.queues.streams.subjects(stream, subject)).get(subject, 0)

    async def count() -> int:
        return max((await context.queues.streams.subjects(stream, subject)).get(subject, 0) - before, 0)

    return count


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
    """Write again the events of a range that the subscription gets, in their order, behind what is there.

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

    count = await _counter(context, spec)
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


ROUND_POSITIONS: Final = 200_000


def next_round(state: DispatchState, newest: int) -> PositionRange | None:
    """Return what to write next; None if the dispatcher writes the rest. Pure.

    >>> state = DispatchState(incarnation="i", next=1)
    >>> next_round(state, 30_000), next_round(state, 20_000), next_round(state, 1_000_000)
    (PositionRange(first=1, last=30000), None, PositionRange(first=1, last=200000))
    """
    if state.suspended is None and newest - state.next + 1 <= SMALL_GAP_POSITIONS:
        return None
    return PositionRange(state.next, max(min(newest, state.next + ROUND_POSITIONS - 1), state.next - 1))


def after_round(state: DispatchState, done: PositionRange, refusal: Refusal | None) -> DispatchState:
    """Return the state after a round that was written, or refused at a position. Pure except for the clock."""
    if refusal is None:
        return DispatchState(incarnation=state.incarnation, next=done.last + 1)
    suspended = Suspension(position=refusal.position, reason=suspension_reason(refusal), at=datetime.now(UTC))
    return DispatchState(incarnation=state.incarnation, next=refusal.position, suspended=suspended)


async def catch_up(context: JobContext, job: CatchUpJob) -> JobResult:
    """Write rounds until dispatch can take over. A queue that still refuses stays suspended, which is not a failure."""
    while True:
        # In this order: a subscription that gets the name after this read begins behind all that is written here.
        newest = (await context.queues.streams.info(context.archive.stream)).state.last_seq
        found = await context.find(job)
        if found is None or found.dispatch is None:
            break
        wanted = next_round(found.dispatch, newest)
        if wanted is None:
            break
        changes = found.record.changes_in(wanted.first, wanted.last)
        wanted = PositionRange(wanted.first, min([*changes, wanted.last]))  # one selection is in force in a round
        await context.last_sequence(job)
        if found.record.past and wanted.first <= wanted.last:
            await begin_prefill(context.queues, job.name, job.incarnation, wanted.last)
        with tracing.span("catch-up", context.trace, subscription=job.name, first=wanted.first, last=wanted.last):
            refusal = await _write(context, found, wanted)
        if refusal is not None and refusal.kind is RefusalKind.MISSING_STREAM:
            raise refusal_error(refusal, subscription_queue(job.name).stream)
        try:
            await context.registry.put_dispatch(
                job.name, after_round(found.dispatch, wanted, refusal), found.dispatch_revision
            )
        except WrongRevision:
            continue  # the dispatcher, or another catch-up, has moved it: read it again
        if refusal is not None:
            break
    return JobResult.DONE


async def _write(context: JobContext, found: Registered, wanted: PositionRange) -> Refusal | None:
    """Write one round as dispatch does: same rows, same headers, same watermark; rows that are too large are parked."""
    if wanted.last < wanted.first:
        return None
    [caught_up] = in_force([PlannedTarget(found, max(wanted.first - 1, found.record.begin or 0))], wanted.first)
    refusals: list[Refusal] = []
    batch_job = BatchJob(context.queues.address, AppendOptions(patience_seconds=context.patience_seconds))

    def attempt(positions: PositionRange, targets: Sequence[PlannedTarget]) -> WriteOutcome:
        if not targets:
            return WriteOutcome()
        rows = archived_topic_batches(events(context.spark, context.archive, positions.first, positions.last))
        report = batch_job.run(rows, targets, writers=1, in_order=False)
        refusals.extend(refusal for target, refusal in report.refusals if target is caught_up)
        return WriteOutcome(report, {target.incarnation: refusal.position for target, refusal in report.refusals})

    def work() -> Refusal | None:
        isolation = Isolation(context.spark, context.archive, attempt, lambda _, refusal: refusals.append(refusal))
        report = isolation.write(PositionRange(caught_up.floor + 1, wanted.last), [caught_up]).report
        tracing.link([{tracing.TRACEPARENT: trace} for trace in report.traces])
        return min(refusals, key=lambda refusal: refusal.position, default=None)

    return await context.run_on_spark(work)

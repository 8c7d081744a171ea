"""Catch-up: writes what a suspended subscription missed from the archive into `<name>.main`, until dispatch takes over.

A round writes the rows from `next` on with the same watermark that dispatch uses, then moves `next` by compare-and-set.
A crash between the two repeats the round, which finds its rows in the queue. The dispatcher leaves the subscription out
until the gap before its own batch is small, then closes that gap itself.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from purveyor.jetstream.bulk import AppendOptions, Refusal, RefusalKind
from purveyor.model import tracing
from purveyor.model.control_events import CatchUpJob
from purveyor.model.errors import WrongRevision
from purveyor.model.registration import DispatchState, Suspension
from purveyor.pipeline.archive.layout import PositionRange
from purveyor.pipeline.archive.reader import events
from purveyor.pipeline.dispatch.batch_job import BatchJob, archived_topic_batches
from purveyor.pipeline.dispatch.batch_plan import SMALL_GAP, PlannedTarget
from purveyor.pipeline.dispatch.isolation import Isolation, WriteOutcome
from purveyor.pipeline.dispatch.suspensions import suspension_reason
from purveyor.pipeline.prefill.job_context import JobContext, JobResult
from purveyor.pipeline.prefill.queue_writer import refusal_error
from purveyor.queues.catalogue import subscription_queue
from purveyor.queues.registry import Registered

ROUND_POSITIONS: Final = 200_000


def next_round(state: DispatchState, newest: int) -> PositionRange | None:
    """Return what to write next; None if the dispatcher writes the rest. Pure.

    >>> state = DispatchState(incarnation="i", next=1)
    >>> next_round(state, 30_000), next_round(state, 20_000), next_round(state, 1_000_000)
    (PositionRange(first=1, last=30000), None, PositionRange(first=1, last=200000))
    """
    if state.suspended is None and newest - state.next + 1 <= SMALL_GAP:
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
        await context.last_sequence(job)
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
    caught_up = PlannedTarget(found, max(wanted.first - 1, found.record.begin or 0))
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

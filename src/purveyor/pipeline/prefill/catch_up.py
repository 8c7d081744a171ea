"""Catch-up: what a suspended subscription missed, from the archive into `<name>.main`, until dispatch can take over.

A round writes the rows from `next` on with the same watermark that dispatch goes by, then moves `next` by
compare-and-set. A crash between the two repeats the round, whose rows are found there. The dispatcher leaves the
subscription out until the gap before its own batch is small, then closes that gap itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from purveyor.jetstream.bulk import AppendOptions, Refusal, RefusalKind
from purveyor.model import tracing
from purveyor.model.control_events import CatchUpJob
from purveyor.model.errors import WrongRevision
from purveyor.model.registration import DispatchState, Suspension
from purveyor.pipeline.archive.reader import events
from purveyor.pipeline.dispatch.batch_job import Deliverer
from purveyor.pipeline.dispatch.batch_plan import SMALL_GAP, Seat, Span
from purveyor.pipeline.dispatch.isolation import Isolation, Written
from purveyor.pipeline.dispatch.planned_rows import archived
from purveyor.pipeline.dispatch.rejected_targets import why_suspended
from purveyor.pipeline.prefill.job_context import Ending, Workshop
from purveyor.pipeline.prefill.queue_writer import refused
from purveyor.queues.catalogue import subscription_queue
from purveyor.queues.registry import Registered

ROUND: Final = 200_000


@dataclass(frozen=True, slots=True)
class Round:
    """Positions to write at once, both included."""

    first: int
    last: int


def next_round(state: DispatchState, newest: int) -> Round | None:
    """What to write next; None when the rest is the dispatcher's. Pure.

    >>> state = DispatchState(incarnation="i", next=1)
    >>> next_round(state, 30_000), next_round(state, 20_000), next_round(state, 1_000_000)
    (Round(first=1, last=30000), None, Round(first=1, last=200000))
    """
    if state.suspended is None and newest - state.next + 1 <= SMALL_GAP:
        return None
    return Round(state.next, max(min(newest, state.next + ROUND - 1), state.next - 1))


def after_round(state: DispatchState, done: Round, refusal: Refusal | None) -> DispatchState:
    """The state after a round that was written, or refused at a position. Pure but for the clock."""
    if refusal is None:
        return DispatchState(incarnation=state.incarnation, next=done.last + 1)
    suspended = Suspension(position=refusal.position, reason=why_suspended(refusal), at=datetime.now(UTC))
    return DispatchState(incarnation=state.incarnation, next=refusal.position, suspended=suspended)


async def catch_up(shop: Workshop, job: CatchUpJob) -> Ending:
    """Round after round. A queue that still refuses stays suspended, with the new reason, and that is no failure."""
    while True:
        # In this order: whoever takes the name after that look at the registry begins behind all that is written here.
        newest = (await shop.queues.streams.info(shop.archive.stream)).state.last_seq
        found = await shop.find(job)
        if found is None or found.dispatch is None:
            break
        wanted = next_round(found.dispatch, newest)
        if wanted is None:
            break
        await shop.last_sequence(job)
        with tracing.span("catch-up", shop.trace, subscription=job.name, first=wanted.first, last=wanted.last):
            refusal = await _write(shop, found, wanted)
        if refusal is not None and refusal.kind is RefusalKind.MISSING_STREAM:
            raise refused(refusal, subscription_queue(job.name).stream)
        try:
            await shop.registry.put_dispatch(
                job.name, after_round(found.dispatch, wanted, refusal), found.dispatch_revision
            )
        except WrongRevision:
            continue  # the dispatcher, or another catch-up, has moved it: look again
        if refusal is not None:
            break
    return Ending.DONE


async def _write(shop: Workshop, found: Registered, wanted: Round) -> Refusal | None:
    """One round, by the same hands that dispatch: same rows, same headers, same watermark, too large ones parked."""
    if wanted.last < wanted.first:
        return None
    mine = Seat(found, max(wanted.first - 1, found.record.begin or 0))
    refusals: list[Refusal] = []
    deliverer = Deliverer(shop.queues.address, AppendOptions(patience_seconds=shop.patience_seconds))

    def attempt(span: Span, seats: Sequence[Seat]) -> Written:
        if not seats:
            return Written()
        rows = archived(events(shop.spark, shop.archive, span.first, span.last))
        report = deliverer.deliver(rows, seats, writers=1, in_order=False)
        refusals.extend(refusal for seat, refusal in report.refusals if seat is mine)
        return Written(report, {seat.incarnation: refusal.position for seat, refusal in report.refusals})

    def work() -> Refusal | None:
        isolation = Isolation(shop.spark, shop.archive, attempt, lambda _, refusal: refusals.append(refusal))
        report = isolation.write(Span(mine.floor + 1, wanted.last), [mine]).report
        tracing.link([{tracing.TRACEPARENT: trace} for trace in report.traces])
        return min(refusals, key=lambda refusal: refusal.position, default=None)

    return await shop.on_spark(work)

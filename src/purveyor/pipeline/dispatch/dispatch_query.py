"""The dispatcher: a streaming query that writes the batches of `stream:incoming` to the queues of subscriptions.

The steps of a batch, and what a crash after each step means:

    1. settle beginnings and changes           the registry is right, nothing is written
    2. suspend those not understood            the same, and the registry has where they stop
    3. request prefills of new topics          delivery waits for them, and their job is or will be queued
    4. fill small gaps before the batch        these queues have more of their events
    5. write the batch (see `Isolation`)       queues have all or a part of the batch
    6. settle refusals                         the same, or a suspension is noted
    7. note the progress of once-suspended     the same
    8. Spark commits the batch                 it is done

A batch that runs again passes all steps again and writes what is missing: `append_once` sees in each queue how far it
is. The same holds for two groups, each of which gets all of `incoming` and writes to the same queues.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk import AppendOptions, Refusal, RefusalKind
from purveyor.jetstream.bulk.net.pool import request_api
from purveyor.model import tracing
from purveyor.model.errors import InvalidConfig, UnreadableRecord, WrongRevision
from purveyor.model.metrics import DEAD_LETTERS
from purveyor.model.registration import DispatchState
from purveyor.model.tracing import Value
from purveyor.pipeline.archive.layout import PositionRange
from purveyor.pipeline.archive.reader import ArchiveSource, events
from purveyor.pipeline.checkpoints import dispatch_rule, recover
from purveyor.pipeline.dispatch.batch_job import (
    Attempt,
    BatchJob,
    BatchReport,
    Isolation,
    WriteOutcome,
    archived_topic_batches,
    may_get,
)
from purveyor.pipeline.dispatch.batch_plan import (
    STREAM,
    PlannedTarget,
    SubscriptionTracker,
    divide,
    in_force,
    is_note_due,
    plan_batch,
)
from purveyor.pipeline.dispatch.subscriber_messages import ORIGIN
from purveyor.pipeline.dispatch.suspensions import CatchUpRequests, RejectedTargets, UnreadableSubscriptions
from purveyor.pipeline.dispatch.topic_prefill import needs_prefill, request_prefill
from purveyor.pipeline.event_sources import topic_batch_format
from purveyor.queues.catalogue import DEFAULT_GROUP
from purveyor.queues.sync_client import update_dispatch
from purveyor.spark.checkpoint_files import batch_end
from purveyor.spark.offsets import ROWS_PER_PARTITION
from purveyor.spark.options import connection_options, read_settings

SMALL_BATCH_POSITIONS: Final = 5000
"""Up to this many positions, one task writes a batch in the order of the source."""
ROWS_PER_SEND: Final = 10_000
BYTES_PER_SEND: Final = 8 << 20
"""The most that Spark sends to the writing task at a time: while the task writes, Spark prepares the next."""
_MAX_WRITE_ATTEMPTS: Final = 3

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchSettings:
    """The settings of a dispatcher. The queues exist already (`ensure`)."""

    address: Address
    checkpoint: Path
    archive: ArchiveSource
    """Where the events of a gap are read again."""
    group: str = DEFAULT_GROUP
    """Also the durable. Each group gets all events; one checkpoint belongs to one group."""
    max_offsets: int = ROWS_PER_PARTITION
    batch_seconds: int = 10
    """About how long a batch of a backlog takes, for one subscription or a thousand."""
    writers: int | None = None
    """How many tasks write a large batch; by default one for every two cores, because the server needs some too."""
    replicas: int = 1
    append: AppendOptions = field(default_factory=AppendOptions)
    is_traced: bool = True
    """Whether each batch is a span."""

    def __post_init__(self) -> None:
        if self.max_offsets < 1 or (self.writers is not None and self.writers < 1):
            raise InvalidConfig("a batch has at least one position and one writer", fix="leave them at their default")


def start_dispatch(spark: SparkSession, settings: DispatchSettings) -> StreamingQuery:
    """Start the query; it continues where its checkpoint ends.

    It ends with an error when the server is away for longer than the patience, or when the stream is not the one of the
    checkpoint. Started again, it repeats its last batch. A checkpoint that does not fit the stream is replaced (see
    `checkpoints`).
    """
    options = connection_options(settings.address) | {"stream": STREAM, "durable": settings.group}
    recover(settings.checkpoint, read_settings(options), dispatch_rule)
    source = (
        spark.readStream.format(topic_batch_format(spark))
        .options(**options)
        .option("syncCheckpoint", str(settings.checkpoint.absolute()))
        .option("maxOffsetsPerTrigger", settings.max_offsets)
        .option("batchSeconds", settings.batch_seconds)
    )
    dispatcher = Dispatcher(spark, settings)
    query = (
        source.load()
        .writeStream.foreachBatch(dispatcher.dispatch)
        .option("checkpointLocation", str(settings.checkpoint))
        .queryName(f"dispatch-{settings.group}")
        .start()
    )
    dispatcher.catch_up_requests.start_watching(query)
    return query


class Dispatcher:
    """One run of a dispatcher, on the driver. It remembers up to which position it has written each queue."""

    def __init__(self, spark: SparkSession, settings: DispatchSettings) -> None:
        self._settings = settings
        self._tracker = SubscriptionTracker(settings.address)
        self._unreadable = UnreadableSubscriptions(settings.address, self._tracker, settings.group)
        self._rejected_targets = RejectedTargets(settings.address, self._tracker, replicas=settings.replicas)
        self.catch_up_requests = CatchUpRequests(settings.address, settings.group)
        self._live_job = BatchJob(settings.address, settings.append)
        self._repair_job = BatchJob(settings.address, settings.append)
        self._writers = settings.writers or max(1, spark.sparkContext.defaultParallelism // 2)
        self._written_up_to: dict[str, int] = {}
        self._dispatched_up_to: int | None = None

    def dispatch(self, frame: DataFrame, number: int) -> None:
        """Dispatch one batch."""
        if self._dispatched_up_to is None:  # Spark gives each query its own session
            frame.sparkSession.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", ROWS_PER_SEND)
            frame.sparkSession.conf.set("spark.sql.execution.arrow.maxBytesPerBatch", BYTES_PER_SEND)
        began = time.monotonic()
        batch = self._batch_range(number)
        self._tracker.update()
        self._unreadable.suspend(self._written_up_to, batch)
        plan = plan_batch(self._tracker.snapshot, self._written_up_to, batch)
        for found in plan.far_behind:
            self.catch_up_requests.request(found)
        targets = self._request_prefills(plan.targets, batch)
        behind = self._request_prefills(plan.behind, batch)
        if behind:
            gap = PositionRange(min(target.floor + 1 for target in behind), batch.first - 1)
            targets += self._fill_gap(frame.sparkSession, behind, gap)
        outcome = self._write_divided(self._live_isolation(frame, batch), batch, targets)
        report = outcome.report
        self._live_job.add_known_topics(report.topics)
        self._record_progress(targets, outcome.stopped, batch.last)
        self._dispatched_up_to = batch.last
        self._report_batch(batch, report, time.monotonic() - began)
        if report.invalid:
            DEAD_LETTERS.add(ORIGIN, by=report.invalid)
            _log.warning(
                "%d messages in %s to %s are not events and were parked", report.invalid, batch.first, batch.last
            )

    def _request_prefills(self, targets: tuple[PlannedTarget, ...], batch: PositionRange) -> tuple[PlannedTarget, ...]:
        """Request prefills of new topics, before any event behind them is written; return the targets that go on."""
        if not any(target.found.record.past for target in targets):
            return targets
        going_on = []
        for target in targets:
            try:
                if needs_prefill(target.found, batch.last):
                    request_prefill(self._settings.address, target.found, batch.last)
                going_on.append(target)
            except UnreadableRecord as error:
                first = target.floor + 1 if target.floor > 0 else batch.first
                why = f"its new topics cannot be prefilled: {error.message}"
                self._rejected_targets.settle([(target, Refusal(first, why, 0, RefusalKind.OTHER))], again=False)
        return tuple(going_on)

    def _write_divided(
        self, isolation: Isolation, positions: PositionRange, targets: Sequence[PlannedTarget]
    ) -> WriteOutcome:
        """Write positions, each part with the selections in force in it. Nearly always there is one part."""
        outcome = WriteOutcome()
        for part in divide(positions, targets):
            going_on = targets if part == positions else [each for each in targets if may_get(each, part, outcome)]
            outcome += isolation.write(part, in_force(going_on, part.first))
        return outcome

    def _report_batch(self, batch: PositionRange, report: BatchReport, seconds: float) -> None:
        """Record a span that is linked to the traces of the events, and a log line."""
        attributes: dict[str, Value] = {
            "first": batch.first,
            "last": batch.last,
            "stored": report.stored,
            "group": self._settings.group,
        }
        links = [{tracing.TRACEPARENT: trace} for trace in report.traces[: tracing.MOST_LINKS]]
        if self._settings.is_traced:
            tracing.record("dispatch", seconds, tracing.NO_TRACE, links=links, **attributes)
        _log.debug("dispatched %d to %d in %.3f s", batch.first, batch.last, seconds, extra=attributes)

    def _batch_range(self, number: int) -> PositionRange:
        """Return the positions of a batch, from Spark's log: without a job, and the same when the batch runs again."""
        last = batch_end(self._settings.checkpoint, number).sequence
        if self._dispatched_up_to is None and number > 0:
            self._dispatched_up_to = batch_end(self._settings.checkpoint, number - 1).sequence
        if self._dispatched_up_to is None:
            # The first batch ever: it begins with the first message that the stream kept for the durable.
            state = request_api(self._settings.address, f"STREAM.INFO.{STREAM}")["state"]
            self._dispatched_up_to = min(int(state["first_seq"]) - 1, last)
        return PositionRange(self._dispatched_up_to + 1, last)

    def _live_isolation(self, frame: DataFrame, batch: PositionRange) -> Isolation:
        """Build the isolation that writes Spark's batch, or parts of it, which are read again."""

        def attempt(positions: PositionRange, targets: Sequence[PlannedTarget]) -> WriteOutcome:
            if positions == batch:
                return self._write(self._live_job, frame, targets, positions)
            return self._write(self._repair_job, self._read_part(frame.sparkSession, positions), targets, positions)

        return self._isolation(frame.sparkSession, attempt)

    def _read_part(self, spark: SparkSession, positions: PositionRange) -> DataFrame:
        wanted = {"stream": STREAM, "startingOffsets": str(positions.first), "endingOffsets": str(positions.last)}
        options = connection_options(self._settings.address) | wanted
        return spark.read.format(topic_batch_format(spark)).options(**options).load()

    def _isolation(self, spark: SparkSession, attempt: Attempt) -> Isolation:
        def on_rejected(target: PlannedTarget, refusal: Refusal) -> None:
            self._rejected_targets.settle([(target, refusal)], again=False)

        return Isolation(spark, self._settings.archive, attempt, on_rejected)

    def _fill_gap(
        self, spark: SparkSession, behind: Sequence[PlannedTarget], gap: PositionRange
    ) -> tuple[PlannedTarget, ...]:
        """Write the positions before the batch to the targets behind; return those that take part in the batch.

        A target that refuses does not take part. If the archive is not understood, none of them takes part: they stay
        behind.
        """

        def attempt(positions: PositionRange, targets: Sequence[PlannedTarget]) -> WriteOutcome:
            if not targets:
                return WriteOutcome()
            found = archived_topic_batches(events(spark, self._settings.archive, positions.first, positions.last))
            return self._write(self._repair_job, found, targets, positions, in_order=False)

        try:
            stopped = self._write_divided(self._isolation(spark, attempt), gap, behind).stopped
        except UnreadableRecord as error:
            _log.error("%s wait at position %d: %s", ", ".join(target.name for target in behind), gap.first, error)
            return ()
        _log.info("filled positions %d to %d of %s", gap.first, gap.last, ", ".join(target.name for target in behind))
        self._record_progress(behind, stopped, gap.last)
        return tuple(target for target in behind if target.incarnation not in stopped)

    def _write(
        self,
        batch_job: BatchJob,
        frame: DataFrame,
        targets: Sequence[PlannedTarget],
        positions: PositionRange,
        *,
        in_order: bool = True,
    ) -> WriteOutcome:
        """Write rows to all targets."""
        in_order = in_order and len(positions) <= ROWS_PER_PARTITION
        writers = 1 if len(positions) <= SMALL_BATCH_POSITIONS else max(1, min(self._writers, len(targets)))
        report = batch_job.run(frame, targets, writers=writers, in_order=in_order)
        if batch_job is not self._live_job:  # it may have tried the expressions of some targets only
            report = replace(report, topics={})
        stopped: dict[str, int] = {}
        refusals = report.refusals
        for attempt in range(_MAX_WRITE_ATTEMPTS):
            if not refusals:
                break
            settled = self._rejected_targets.settle(refusals, again=attempt + 1 < _MAX_WRITE_ATTEMPTS)
            stopped |= {target.incarnation: position for target, position in settled.stopped}
            if not settled.again:
                break
            refusals = self._repair_job.run(frame, settled.again, writers=1, in_order=in_order).refusals
        return WriteOutcome(report, stopped)

    def _record_progress(self, targets: Sequence[PlannedTarget], stopped: Mapping[str, int], last: int) -> None:
        for target in targets:
            written_up_to = stopped.get(target.incarnation, last + 1) - 1
            self._written_up_to[target.incarnation] = max(written_up_to, target.floor)
            if target.incarnation not in stopped and is_note_due(target.found, written_up_to, self._settings.group):
                self._note_progress(target, written_up_to)
        snapshot = self._tracker.snapshot
        if len(self._written_up_to) > 2 * (len(snapshot.subscriptions) + len(snapshot.unreadable)) + 100:
            known = {found.incarnation for found in snapshot.subscriptions.values()}
            known |= {unread.incarnation for unread in snapshot.unreadable.values() if unread.incarnation is not None}
            self._written_up_to = {key: value for key, value in self._written_up_to.items() if key in known}

    def _note_progress(self, target: PlannedTarget, written_up_to: int) -> None:
        """Note how far a queue was written. A note that another group does not understand the record stays."""
        suspended = target.found.suspended
        others = suspended if suspended is not None and suspended.group != self._settings.group else None
        state = DispatchState(incarnation=target.incarnation, next=written_up_to + 1, suspended=others)
        try:
            update_dispatch(self._settings.address, target.name, state, target.found.dispatch_revision)
        except WrongRevision:
            _log.debug("subscription %s was noted by another process", target.name)

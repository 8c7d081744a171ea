"""The dispatcher: `stream:incoming` as a streaming query whose batches go to the queues of subscriptions.

A batch, step by step, and what a crash behind each step means:

    1. settle beginnings, read subscriptions   the registry is right, nothing is written
    2. suspend those not understood            the same, and it says where they stop
    3. fill small gaps before the batch        these queues have more of what is theirs
    4. write the batch (see `isolation`)       queues have all or a part of the batch
    5. settle refusals                         the same, or a suspension is noted
    6. note how far once-suspended queues are  the same
    7. Spark commits the batch                 it is done

A batch that is run again passes all steps again and writes what is missing: `append_once` sees in each queue how far it
is. So do two groups, each of which gets all of `incoming` and writes the same queues.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk import AppendOptions, Refusal
from purveyor.jetstream.bulk.net.api_request import ask
from purveyor.model import tracing
from purveyor.model.errors import InvalidConfig, UnreadableRecord, WrongRevision
from purveyor.model.metrics import DEAD_LETTERS
from purveyor.model.registration import DispatchState
from purveyor.model.tracing import Value
from purveyor.pipeline.archive.checkpoint_log import batch_end
from purveyor.pipeline.archive.reader import ArchiveSource, events
from purveyor.pipeline.checkpoint_recovery import dispatch_rule, recover
from purveyor.pipeline.dispatch.batch_job import Deliverer, Report
from purveyor.pipeline.dispatch.batch_plan import Seat, Span, call, note_due
from purveyor.pipeline.dispatch.catch_ups import CatchUps
from purveyor.pipeline.dispatch.isolation import Attempt, Isolation, Written
from purveyor.pipeline.dispatch.planned_rows import archived
from purveyor.pipeline.dispatch.rejected_targets import Refusals
from purveyor.pipeline.dispatch.subscriber_messages import ORIGIN
from purveyor.pipeline.dispatch.subscription_snapshot import STREAM, Registrations
from purveyor.pipeline.dispatch.unreadable import Unread
from purveyor.pipeline.topic_batch_source import pack_format
from purveyor.queues.catalogue import DEFAULT_GROUP
from purveyor.queues.registry import update_dispatch
from purveyor.spark.offsets import ROWS_PER_PARTITION
from purveyor.spark.options import connection_options, read_settings

SMALL_BATCH: Final = 5000
"""Up to so many positions one task writes a batch, as it comes from the source."""
PACKS_SENT: Final = 10_000
BYTES_SENT: Final = 8 << 20
"""So much at most goes to the writing task at a time: while it writes, Spark makes the next."""
_TRIES: Final = 3

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchSettings:
    """How a dispatcher runs. The queues are there already (`ensure`)."""

    address: Address
    checkpoint: Path
    archive: ArchiveSource
    """Where the events of a gap are read again."""
    group: str = DEFAULT_GROUP
    """Also the durable. Each group gets all events; one checkpoint belongs to one group."""
    max_offsets: int = ROWS_PER_PARTITION
    batch_seconds: int = 10
    """About how long a batch of a backlog takes, whether there is one subscription or a thousand."""
    writers: int | None = None
    """How many tasks write a large batch; by default one for every two cores, because the server needs some too."""
    replicas: int = 1
    append: AppendOptions = field(default_factory=AppendOptions)

    def __post_init__(self) -> None:
        if self.max_offsets < 1 or (self.writers is not None and self.writers < 1):
            raise InvalidConfig("a batch has at least one position and one writer", fix="leave them at their default")


def start_dispatch(spark: SparkSession, settings: DispatchSettings) -> StreamingQuery:
    """Start the query; it goes on where its checkpoint ends.

    It ends with an error when the server is away for longer than the patience, or the stream is another one than the
    checkpoint speaks of. Started again, it repeats the batch it was at. A checkpoint that does not belong to the stream
    is replaced (see `checkpoint_recovery`).
    """
    options = connection_options(settings.address) | {"stream": STREAM, "durable": settings.group}
    recover(settings.checkpoint, read_settings(options), dispatch_rule)
    source = (
        spark.readStream.format(pack_format(spark))
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
    dispatcher.catch_ups.watch(query)
    return query


class Dispatcher:
    """One run of a dispatcher, on the driver. `covered` is its account: up to where it has written which queue."""

    def __init__(self, spark: SparkSession, settings: DispatchSettings) -> None:
        self._settings = settings
        self._registrations = Registrations(settings.address)
        self._unread = Unread(settings.address, self._registrations, settings.group)
        self._refusals = Refusals(settings.address, self._registrations, replicas=settings.replicas)
        self.catch_ups = CatchUps(settings.address, settings.group)
        self._deliverer = Deliverer(settings.address, settings.append)
        self._repairs = Deliverer(settings.address, settings.append)
        self._writers = settings.writers or max(1, spark.sparkContext.defaultParallelism // 2)
        self._covered: dict[str, int] = {}
        self._done: int | None = None

    def dispatch(self, frame: DataFrame, number: int) -> None:
        """One batch."""
        if self._done is None:  # the session of this query alone
            frame.sparkSession.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", PACKS_SENT)
            frame.sparkSession.conf.set("spark.sql.execution.arrow.maxBytesPerBatch", BYTES_SENT)
        began = time.monotonic()
        batch = self._span(number)
        self._registrations.look()
        self._unread.suspend(self._covered, batch)
        roster = call(self._registrations.snapshot, self._covered, batch)
        for found in roster.far_behind:
            self.catch_ups.ask(found)
        seats = roster.seats
        if roster.behind:
            seats += self._fill(frame.sparkSession, roster.behind, Span(roster.gap_first, batch.first - 1))
        written = self._live(frame, batch).write(batch, seats)
        report = written.report
        self._deliverer.learn(report.topics)
        self._account(seats, written.stopped, batch.last)
        self._done = batch.last
        self._tell(batch, report, time.monotonic() - began)
        if report.invalid:
            DEAD_LETTERS.add(ORIGIN, by=report.invalid)
            _log.warning(
                "%d messages in %s to %s are no events and were parked", report.invalid, batch.first, batch.last
            )

    def _tell(self, batch: Span, report: Report, seconds: float) -> None:
        """For those who watch: a span that is linked to the traces of its events, and a line."""
        told: dict[str, Value] = {
            "first": batch.first,
            "last": batch.last,
            "stored": report.stored,
            "group": self._settings.group,
        }
        links = [{tracing.TRACEPARENT: trace} for trace in report.traces[: tracing.MOST_LINKS]]
        tracing.record("dispatch", seconds, tracing.NONE, links=links, **told)
        _log.debug("dispatched %d to %d in %.3f s", batch.first, batch.last, seconds, extra=told)

    def _span(self, number: int) -> Span:
        """The positions of a batch, from Spark's own log: no job, and the same when it is run again."""
        last = batch_end(self._settings.checkpoint, number).sequence
        if self._done is None and number > 0:
            self._done = batch_end(self._settings.checkpoint, number - 1).sequence
        if self._done is None:
            # The first batch ever: it begins with what the stream has kept for our durable.
            state = ask(self._settings.address, f"STREAM.INFO.{STREAM}")["state"]
            self._done = min(int(state["first_seq"]) - 1, last)
        return Span(self._done + 1, last)

    def _live(self, frame: DataFrame, batch: Span) -> Isolation:
        """What writes the batch that Spark gave, or parts of it, which are read once more."""

        def attempt(span: Span, seats: Sequence[Seat]) -> Written:
            if span == batch:
                return self._write(self._deliverer, frame, seats, span)
            return self._write(self._repairs, self._part(frame.sparkSession, span), seats, span)

        return self._isolation(frame.sparkSession, attempt)

    def _part(self, spark: SparkSession, span: Span) -> DataFrame:
        wanted = {"stream": STREAM, "startingOffsets": str(span.first), "endingOffsets": str(span.last)}
        options = connection_options(self._settings.address) | wanted
        return spark.read.format(pack_format(spark)).options(**options).load()

    def _isolation(self, spark: SparkSession, attempt: Attempt) -> Isolation:
        def refuse(seat: Seat, refusal: Refusal) -> None:
            self._refusals.settle([(seat, refusal)], again=False)

        return Isolation(spark, self._settings.archive, attempt, refuse)

    def _fill(self, spark: SparkSession, behind: Sequence[Seat], gap: Span) -> tuple[Seat, ...]:
        """Write what those behind are missing before the batch; who refuses does not take part in it.

        If the archive is not understood, none of them takes part: they stay behind.
        """

        def attempt(span: Span, seats: Sequence[Seat]) -> Written:
            if not seats:
                return Written()
            found = archived(events(spark, self._settings.archive, span.first, span.last))
            return self._write(self._repairs, found, seats, span, in_order=False)

        try:
            stopped = self._isolation(spark, attempt).write(gap, behind).stopped
        except UnreadableRecord as error:
            _log.error("%s wait at position %d: %s", ", ".join(seat.name for seat in behind), gap.first, error)
            return ()
        _log.info("filled positions %d to %d of %s", gap.first, gap.last, ", ".join(seat.name for seat in behind))
        self._account(behind, stopped, gap.last)
        return tuple(seat for seat in behind if seat.incarnation not in stopped)

    def _write(
        self, deliverer: Deliverer, frame: DataFrame, seats: Sequence[Seat], span: Span, *, in_order: bool = True
    ) -> Written:
        """Write rows to all who take part."""
        in_order = in_order and len(span) <= ROWS_PER_PARTITION
        writers = 1 if len(span) <= SMALL_BATCH else max(1, min(self._writers, len(seats)))
        report = deliverer.deliver(frame, seats, writers=writers, in_order=in_order)
        stopped: dict[str, int] = {}
        refusals = report.refusals
        for attempt in range(_TRIES):
            if not refusals:
                break
            verdict = self._refusals.settle(refusals, again=attempt + 1 < _TRIES)
            stopped |= {seat.incarnation: position for seat, position in verdict.stopped}
            if not verdict.again:
                break
            refusals = self._repairs.deliver(frame, verdict.again, writers=1, in_order=in_order).refusals
        return Written(report, stopped)

    def _account(self, seats: Sequence[Seat], stopped: Mapping[str, int], last: int) -> None:
        for seat in seats:
            covered = stopped.get(seat.incarnation, last + 1) - 1
            self._covered[seat.incarnation] = max(covered, seat.floor)
            if seat.incarnation not in stopped and note_due(seat.found, covered, self._settings.group):
                self._note(seat, covered)
        snapshot = self._registrations.snapshot
        if len(self._covered) > 2 * (len(snapshot.subscriptions) + len(snapshot.unreadable)) + 100:
            known = {found.incarnation for found in snapshot.subscriptions.values()}
            known |= {unread.incarnation for unread in snapshot.unreadable.values() if unread.incarnation is not None}
            self._covered = {key: value for key, value in self._covered.items() if key in known}

    def _note(self, seat: Seat, covered: int) -> None:
        """Note how far a queue was written. That another group does not understand its record stays noted."""
        suspended = seat.found.suspended
        others = suspended if suspended is not None and suspended.group != self._settings.group else None
        state = DispatchState(incarnation=seat.incarnation, next=covered + 1, suspended=others)
        try:
            update_dispatch(self._settings.address, seat.name, state, seat.found.dispatch_revision)
        except WrongRevision:
            _log.debug("subscription %s was noted by somebody else", seat.name)

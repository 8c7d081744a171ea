"""The readers of the `jetstream` format: the driver plans ranges, executors read them in parallel as Arrow batches."""

import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from purveyor.jetstream.bulk import ReadOptions, read_range
from purveyor.model.errors import DataLost, PlanOutdated
from purveyor.spark.arrival_signal import ArrivalWait
from purveyor.spark.offsets import (
    ROWS_PER_PARTITION,
    BatchSizer,
    Offset,
    StreamView,
    check_identity,
    data_lost_error,
    lost_range,
    next_end,
    split_range,
)
from purveyor.spark.options import NamedOffset, ReadSettings
from purveyor.spark.stream_control import LONG_MOVE_MESSAGES, DurableMover, Releases, StreamControl
from purveyor.spark.task_tuning import freeze_imports

_log = logging.getLogger(__name__)
_DRAIN_INTERVAL_SECONDS = 1.0
_SYNC_INTERVAL_SECONDS = 1.0
_MAX_BATCH_ROWS = ROWS_PER_PARTITION


class RangePartition(InputPartition):
    """The range that one task reads."""

    def __init__(self, first: int, last: int, created: str) -> None:
        super().__init__((first, last))
        self.first = first
        self.last = last
        self.created = created


def read_partition(settings: ReadSettings, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """Yield the rows of one range, on an executor. The same range gives the same rows, however often it is read."""
    freeze_imports()
    if not isinstance(partition, RangePartition):  # Spark plans one empty partition when there are none
        return
    rows = 0
    options = ReadOptions(
        subjects=settings.subjects,
        columns=settings.columns,
        raw_headers=settings.raw_headers,
        retained_by_durable=settings.durable is not None,
        patience_seconds=settings.patience_seconds,
    )
    for batch in read_range(settings.address, settings.stream, partition.first, partition.last, options):
        rows += batch.num_rows
        yield batch
    _check_read(settings, partition, rows)


def _check_read(settings: ReadSettings, partition: RangePartition, rows: int) -> None:
    """Raise DataLost if rows are missing because of a purge or because the stream was replaced.

    Deleted messages are fine.
    """
    view = StreamControl(settings).view()
    start = Offset(settings.stream, partition.created, partition.first - 1)
    check_identity(start, view)
    if rows == partition.last - partition.first + 1:
        return
    gone = lost_range(start, view)
    if gone is not None and settings.fail_on_data_loss:
        raise data_lost_error(view, gone)
    if gone is not None:
        _log.warning("%s", data_lost_error(view, gone).message)


class JetStreamReader(DataSourceReader):
    """A batch read. The state of the stream at the time of planning fixes the range."""

    def __init__(self, settings: ReadSettings) -> None:
        self._settings = settings

    def partitions(self) -> Sequence[InputPartition]:
        """Divide the range among the executors."""
        settings, control = self._settings, StreamControl(self._settings)
        view = control.view()
        first = control.sequence_before(settings.starting, view) + 1
        last = control.sequence_until(settings.ending, view)
        start = Offset(settings.stream, view.created, first - 1)
        gone = lost_range(start, view)
        if isinstance(settings.starting, int) and gone is not None:
            if settings.fail_on_data_loss:
                raise _plan_outdated_error(data_lost_error(view, gone))
            _log.warning("%s", data_lost_error(view, gone).message)
        pieces = split_range(max(first, view.begins), last, settings.min_partitions, max_rows=view.messages)
        return [RangePartition(piece.first, piece.last, view.created) for piece in pieces]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one partition, on an executor."""
        try:
            yield from read_partition(self._settings, partition)
        except DataLost as error:
            raise _plan_outdated_error(error) from error


def _plan_outdated_error(error: DataLost) -> PlanOutdated:
    """Build the error for messages that were there when they were planned: another plan may find them elsewhere."""
    return PlanOutdated(error.message, fix="read again; or set failOnDataLoss to false")


class JetStreamStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A streaming read. Lives on the driver, in a process that Spark starts for it; only `read` runs on executors.

    When there is no new message, `latestOffset` waits a little before it returns (see `arrival_signal`): an idle query
    costs next to nothing, and still sees a new message at once.
    """

    def __init__(self, settings: ReadSettings) -> None:
        self._settings = settings
        self._control = StreamControl(settings)
        self._mover = DurableMover(self._control)
        self._releases = Releases(
            hold_seconds=settings.hold_seconds,
            interval_seconds=_SYNC_INTERVAL_SECONDS if settings.sync_checkpoint else 0.0,
        )
        self._stop_at: int | None = None
        self._durable_made = False
        self._begun_at = 0
        self._committed = 0
        self._latest: StreamView | None = None
        self._arrivals = ArrivalWait(settings.address)
        self._drain_at = 0.0
        self._sizer = (
            BatchSizer(settings.batch_seconds, settings.max_offsets or _MAX_BATCH_ROWS)
            if settings.batch_seconds
            else None
        )

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Return where a query without a checkpoint begins."""
        start, view = self._find_start()
        self._control.check_start(start, view)
        self._create_durable(start)
        if isinstance(self._settings.starting, NamedOffset):
            start, _ = self._find_start()  # until the durable existed, an interest stream kept nothing for it
        return start.to_json()

    def _find_start(self) -> tuple[Offset, StreamView]:
        view = self._control.view()
        sequence = self._control.sequence_before(self._settings.starting, view)
        return Offset(self._settings.stream, view.created, sequence), view

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Return the limit of `maxOffsetsPerTrigger`, or no limit."""
        max_rows = self._settings.max_offsets
        return ReadAllAvailable() if max_rows is None else ReadMaxRows(max_rows)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Fix the end of the read: the messages that are there now."""
        self._stop_at = self._control.view().last

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Return the end of the next batch."""
        begin = Offset.from_json(start)
        self._create_durable(begin)
        max_rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        if self._sizer is not None:
            paced = self._sizer.limit(time.monotonic())
            max_rows = paced if max_rows is None else min(max_rows, paced)
        deadline = time.monotonic() + self._settings.idle_wait_seconds
        while True:
            end = self._next_end(begin, max_rows)
            if end != begin:
                self._arrivals.found()
                if self._sizer is not None:
                    self._sizer.begin(end.sequence - begin.sequence, time.monotonic())
                return end.to_json()
            # Spark commits a batch only when it begins the next one. It asks for more only when the last one is done
            # and logged, so when there is no more, this is the moment to let the durable catch up.
            self._release(begin, idle=True)
            self._drain_if_sealed(begin)
            left = deadline - time.monotonic()
            if self._stop_at is not None or left <= 0:
                self._arrivals.found_nothing()
                return end.to_json()
            self._arrivals.pause(self._signal_subjects(), left)

    def _signal_subjects(self) -> tuple[str, ...]:
        """Return the subjects whose messages the query reads."""
        return self._settings.subjects or (self._latest.subjects if self._latest is not None else ())

    def _drain_if_sealed(self, begin: Offset) -> None:
        """Try to complete the migration of a stream that has nothing left to read."""
        view, now = self._latest, time.monotonic()
        if view is not None and view.sealed and now >= self._drain_at:
            self._drain_at = now + _DRAIN_INTERVAL_SECONDS
            self._control.drain(begin)

    def _next_end(self, begin: Offset, max_rows: int | None) -> Offset:
        view = self._latest = self._control.view()
        check_identity(begin, view)
        gone = lost_range(begin, view)
        if gone is not None and self._settings.fail_on_data_loss:
            raise data_lost_error(view, gone)
        end = next_end(begin, view, max_offsets=max_rows, stop_at=self._stop_at)
        if gone is not None and end != begin:
            _log.warning("%s", data_lost_error(view, gone).message)
        return end

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802 - Spark's name
        """Return the newest offset of the stream, for the lag in the query's progress."""
        view = self._latest
        return Offset(view.name, view.created, view.last).to_json() if view is not None else None

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Divide a batch among the executors. Its rows depend only on the two offsets."""
        begin, finish = Offset.from_json(start), Offset.from_json(end)
        skipped = finish.lost - begin.lost
        view = self._latest or self._control.view()
        first = begin.sequence + skipped + 1
        pieces = split_range(first, finish.sequence, self._settings.min_partitions, max_rows=view.messages)
        return [RangePartition(piece.first, piece.last, finish.created) for piece in pieces]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one partition, on an executor."""
        return read_partition(self._settings, partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Record that the batch that ended there is done; the next one begins.

        A crash before this leaves the durable behind: the next start moves it.
        """
        self._release(Offset.from_json(end), idle=False)

    def _release(self, done: Offset, *, idle: bool) -> None:
        """Move the durable if a move is due. A long move runs beside the next batch or the next poll."""
        now = time.monotonic()
        self._releases.add(done, now)
        ending = self._stop_at is not None  # a query that ends has moved it all the way
        if idle and not ending and self._mover.is_moving():
            return
        due = self._releases.due(now, idle=idle)
        if due is None:
            return
        passed = due.sequence - max(self._committed, self._begun_at)
        takes_long = passed >= LONG_MOVE_MESSAGES or self._settings.sync_checkpoint is not None
        move = self._mover.begin if takes_long and not (idle and ending) else self._mover.move
        move(due)
        self._committed = due.sequence

    def stop(self) -> None:
        """Let a move in progress complete. The process keeps its connections for requests."""
        self._arrivals.close()
        self._mover.end()

    def _create_durable(self, start: Offset) -> None:
        if not self._durable_made:
            self._control.create_durable(start)
            self._durable_made = True
            self._begun_at = start.sequence

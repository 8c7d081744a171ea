"""Reading: ranges are planned on the driver and read by executors in parallel, as Arrow record batches."""

import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from purveyor.jetstream.bulk import ReadOptions, read_range
from purveyor.model.errors import DataLost, PlanOutdated
from purveyor.spark.batch_sizer import Pace
from purveyor.spark.durable_commit import LONG_MOVE, Mover, Releases
from purveyor.spark.gc_tuning import spare_imports
from purveyor.spark.offsets import (
    ROWS_PER_PARTITION,
    Offset,
    StreamView,
    advance,
    check_identity,
    loss,
    lost_range,
    split,
)
from purveyor.spark.options import ReadSettings, Word
from purveyor.spark.stream_control import Control

_log = logging.getLogger(__name__)
_SHORTEST_POLL_SECONDS = 0.004
_IDLE_POLL_SECONDS = 0.03
_LONGEST_POLL_SECONDS = 0.1
_DRAIN_SECONDS = 1.0
_SYNC_INTERVAL_SECONDS = 1.0
_MOST = ROWS_PER_PARTITION


class RangePartition(InputPartition):
    """What one task reads."""

    def __init__(self, first: int, last: int, created: str) -> None:
        super().__init__((first, last))
        self.first = first
        self.last = last
        self.created = created


def read_partition(settings: ReadSettings, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """The rows of one range, on an executor. The same range gives the same rows, however often it is read."""
    spare_imports()
    if not isinstance(partition, RangePartition):  # Spark plans one empty partition when there are none
        return
    rows = 0
    options = ReadOptions(
        subjects=settings.subjects,
        columns=settings.columns,
        raw_headers=settings.raw_headers,
        kept_for_us=settings.durable is not None,
        patience_seconds=settings.patience_seconds,
    )
    for batch in read_range(settings.address, settings.stream, partition.first, partition.last, options):
        rows += batch.num_rows
        yield batch
    _check_read(settings, partition, rows)


def _check_read(settings: ReadSettings, partition: RangePartition, rows: int) -> None:
    """Fewer rows than sequences: deleted messages are fine; a purge or another stream under our feet is not."""
    view = Control(settings).view()
    start = Offset(settings.stream, partition.created, partition.first - 1)
    check_identity(start, view)
    if rows == partition.last - partition.first + 1:
        return
    gone = lost_range(start, view)
    if gone is not None and settings.fail_on_data_loss:
        raise loss(view, gone)
    if gone is not None:
        _log.warning("%s", loss(view, gone).message)


class JetStreamReader(DataSourceReader):
    """A batch read: one look at the stream fixes the range."""

    def __init__(self, settings: ReadSettings) -> None:
        self._settings = settings

    def partitions(self) -> Sequence[InputPartition]:
        """The range cut for the executors."""
        settings, control = self._settings, Control(self._settings)
        view = control.view()
        first = control.sequence_before(settings.starting, view) + 1
        last = control.sequence_until(settings.ending, view)
        start = Offset(settings.stream, view.created, first - 1)
        gone = lost_range(start, view)
        if isinstance(settings.starting, int) and gone is not None:
            if settings.fail_on_data_loss:
                raise _outdated(loss(view, gone))
            _log.warning("%s", loss(view, gone).message)
        pieces = split(max(first, view.begins), last, settings.min_partitions, most_rows=view.messages)
        return [RangePartition(piece.first, piece.last, view.created) for piece in pieces]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """One piece."""
        try:
            yield from read_partition(self._settings, partition)
        except DataLost as error:
            raise _outdated(error) from error


def _outdated(error: DataLost) -> PlanOutdated:
    """What is gone was there when somebody asked for it by number: another plan may find it elsewhere."""
    return PlanOutdated(error.message, fix="read again what is there now; or set failOnDataLoss to false")


class JetStreamStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A streaming read. Lives on the driver, in a process of its own; only `read` runs on executors.

    When nothing is new, `latestOffset` waits a little before it says so, asking at growing intervals: an idle query
    costs next to nothing, and a message that ends the idle time is still seen within a tenth of a second.
    """

    def __init__(self, settings: ReadSettings) -> None:
        self._settings = settings
        self._control = Control(settings)
        self._mover = Mover(self._control)
        self._releases = Releases(
            hold_seconds=settings.hold_seconds,
            interval_seconds=_SYNC_INTERVAL_SECONDS if settings.sync_checkpoint else 0.0,
        )
        self._stop_at: int | None = None
        self._durable_made = False
        self._begun_at = 0
        self._committed = 0
        self._latest: StreamView | None = None
        self._first_pause = _SHORTEST_POLL_SECONDS
        self._drain_at = 0.0
        self._pace = Pace(settings.batch_seconds, settings.max_offsets or _MOST) if settings.batch_seconds else None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Where a query without checkpoint begins."""
        start, view = self._look_for_start()
        self._control.check_start(start, view)
        self._make_durable(start)
        if isinstance(self._settings.starting, Word):
            start, _ = self._look_for_start()  # before the durable was there, an interest stream may have kept nothing
        return start.to_json()

    def _look_for_start(self) -> tuple[Offset, StreamView]:
        view = self._control.view()
        sequence = self._control.sequence_before(self._settings.starting, view)
        return Offset(self._settings.stream, view.created, sequence), view

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """`maxOffsetsPerTrigger`, or everything there is."""
        most = self._settings.max_offsets
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """What is there now is what will be read."""
        self._stop_at = self._control.view().last

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """The end of the next batch."""
        begin = Offset.from_json(start)
        self._make_durable(begin)
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        if self._pace is not None:
            paced = self._pace.limit(time.monotonic())
            most = paced if most is None else min(most, paced)
        deadline = time.monotonic() + self._settings.idle_wait_seconds
        pause = self._first_pause
        while True:
            end = self._next_end(begin, most)
            if end != begin:
                self._first_pause = _SHORTEST_POLL_SECONDS
                if self._pace is not None:
                    self._pace.begin(end.sequence - begin.sequence, time.monotonic())
                return end.to_json()
            # Spark commits a batch only when it begins the next one. It asks for more only when the last one is done
            # and logged, so when there is no more, this is the moment to let the durable catch up.
            self._release(begin, idle=True)
            self._drain_if_sealed(begin)
            if self._stop_at is not None or time.monotonic() + pause > deadline:
                self._first_pause = _IDLE_POLL_SECONDS
                return end.to_json()
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_POLL_SECONDS)

    def _drain_if_sealed(self, begin: Offset) -> None:
        """Nothing is left to read of a stream that is being migrated: look whether it can be made anew."""
        view, now = self._latest, time.monotonic()
        if view is not None and view.sealed and now >= self._drain_at:
            self._drain_at = now + _DRAIN_SECONDS
            self._control.drain(begin)

    def _next_end(self, begin: Offset, most: int | None) -> Offset:
        view = self._latest = self._control.view()
        check_identity(begin, view)
        gone = lost_range(begin, view)
        if gone is not None and self._settings.fail_on_data_loss:
            raise loss(view, gone)
        end = advance(begin, view, max_offsets=most, stop_at=self._stop_at)
        if gone is not None and end != begin:
            _log.warning("%s", loss(view, gone).message)
        return end

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802 - Spark's name
        """The newest message there is, for the lag in the query's progress."""
        view = self._latest
        return Offset(view.name, view.created, view.last).to_json() if view is not None else None

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """A batch cut for the executors. Its rows depend on nothing but the two offsets."""
        begin, finish = Offset.from_json(start), Offset.from_json(end)
        skipped = finish.lost - begin.lost
        view = self._latest or self._control.view()
        first = begin.sequence + skipped + 1
        pieces = split(first, finish.sequence, self._settings.min_partitions, most_rows=view.messages)
        return [RangePartition(piece.first, piece.last, finish.created) for piece in pieces]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """One piece, on an executor."""
        return read_partition(self._settings, partition)

    def commit(self, end: dict[str, Any]) -> None:
        """The batch that ended there is done, and the next one begins.

        A crash before this leaves the durable behind: it is moved next time.
        """
        self._release(Offset.from_json(end), idle=False)

    def _release(self, done: Offset, *, idle: bool) -> None:
        """Move the durable, if it is time. What takes long runs beside the next batch or the next look for news."""
        now = time.monotonic()
        self._releases.add(done, now)
        ending = self._stop_at is not None  # a query that ends has moved it all the way
        if idle and not ending and self._mover.is_moving():
            return
        due = self._releases.due(now, idle=idle)
        if due is None:
            return
        passed = due.sequence - max(self._committed, self._begun_at)
        takes_long = passed >= LONG_MOVE or self._settings.sync_checkpoint is not None
        move = self._mover.begin if takes_long and not (idle and ending) else self._mover.move
        move(due)
        self._committed = due.sequence

    def stop(self) -> None:
        """What is under way may end; links are kept by the process."""
        self._mover.end()

    def _make_durable(self, start: Offset) -> None:
        if not self._durable_made:
            self._control.make_durable(start)
            self._durable_made = True
            self._begun_at = start.sequence

"""The work beside the archive's query: releasing the stream, merging small ranges, and making snapshots.

**Release.** The maintenance thread does not move the durable of the archive when a batch is done but a while later: a
reader that planned to take positions from the stream, because they were not archived yet, still finds them there. It
never moves the durable past what the query's log has as done and the disk has stored: a batch that Spark will run again
must still be readable.

**Compaction** merges small neighbouring ranges, so that an archive of any age has few files. It is size-tiered: a run
of `FAN_IN` neighbours of about one size (or smaller) becomes one range. So an event is rewritten once per tier, and
each tier has at most `FAN_IN` ranges, beside those that are large enough.

**Snapshots** hold the objects as of a position, so that a query for the current state does not read all of history.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from purveyor.model.errors import PurveyorError
from purveyor.pipeline.archive.layout import (
    ORDER,
    SCHEMA,
    PositionRange,
    archived_until,
    select_ranges,
    snapshots_in,
    superseded,
)
from purveyor.pipeline.archive.range_store import RangeStore
from purveyor.pipeline.archive.reader import ArchiveSource, objects_at
from purveyor.spark.checkpoint_files import committed_offset
from purveyor.spark.offsets import Offset
from purveyor.spark.options import read_settings
from purveyor.spark.progress import is_active
from purveyor.spark.stream_control import Releases, StreamControl

FAN_IN = 8
FILE_BYTES = 128 << 20
_SMALLEST_TIER_BYTES = 64 << 10
KEPT_SNAPSHOTS = 2
"""The snapshot before the last is kept for queries that were planned on it."""
_WORTHWHILE_BYTES = 64 << 20
_log = logging.getLogger(__name__)
_RELEASE_INTERVAL_SECONDS = 1.0
_COMPACTION_INTERVAL_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class SizedRange:
    """A range and its size in bytes."""

    range: PositionRange
    size: int


def next_merge(
    ranges: Sequence[SizedRange], *, fan_in: int = FAN_IN, file_bytes: int = FILE_BYTES
) -> list[PositionRange]:
    """Return the neighbours to merge next, smallest tier first; none if no merge is worthwhile. Pure.

    >>> small = [SizedRange(PositionRange(number, number), 100) for number in range(1, 4)]
    >>> [each.first for each in next_merge(small, fan_in=3)]
    [1, 2, 3]
    """
    limit = _SMALLEST_TIER_BYTES
    while limit < file_bytes * fan_in:
        largest = min(limit, file_bytes)
        run: list[SizedRange] = []
        for each in ranges:
            if each.size >= largest:
                run = []
                continue
            run = [*run, each] if run and run[-1].range.last + 1 == each.range.first else [each]
            if len(run) == fan_in or (len(run) > 1 and sum(one.size for one in run) >= file_bytes):
                return [one.range for one in run]
        limit *= fan_in
    return []


def compact(spark: SparkSession, store: RangeStore, *, fan_in: int = FAN_IN, file_bytes: int = FILE_BYTES) -> int:
    """Merge ranges while it is worthwhile; return how many were replaced."""
    replaced = 0
    while parts := next_merge(sized_ranges(store), fan_in=fan_in, file_bytes=file_bytes):
        files = [path for part in parts for path in store.files(part)]
        pieces = max(1, round(sum(path.stat().st_size for path in files) / file_bytes))
        rows = spark.read.schema(SCHEMA).parquet(*(str(path) for path in files))
        if not store.replace(sort_rows(rows, pieces), parts):
            break  # another process compacts this archive
        replaced += len(parts)
    return replaced


def sized_ranges(store: RangeStore) -> list[SizedRange]:
    """Return the ranges that are not superseded, in order."""
    ranges = store.ranges()
    old = set(superseded(ranges))
    return [SizedRange(each, store.size(each)) for each in ranges if each not in old]


def sort_rows(rows: DataFrame, files: int) -> DataFrame:
    """Sort the rows as in the archive and distribute them to this number of files."""
    spread = rows.coalesce(1) if files == 1 else rows.repartitionByRange(files, *ORDER)
    return spread.sortWithinPartitions(*ORDER)


def snapshot(spark: SparkSession, store: RangeStore) -> int:
    """Make a snapshot of the archive if there is none yet; return its position, 0 for an empty archive."""
    position = archived_until(store.directory)
    newest = max(snapshots_in(store.directory), default=0)
    if position > newest:
        objects = objects_at(spark, ArchiveSource(None, store.directory), position)
        files = max(1, round((_bytes_after(store, newest) + store.snapshot_size(newest)) / FILE_BYTES))
        store.add_snapshot(sort_rows(objects, files), position, keep=KEPT_SNAPSHOTS)
    return position


def snapshot_if_worthwhile(spark: SparkSession, store: RangeStore) -> int | None:
    """Make a snapshot if the events after the last one are larger than it; return its position if it was made."""
    newest = max(snapshots_in(store.directory), default=0)
    if _bytes_after(store, newest) < max(_WORTHWHILE_BYTES, store.snapshot_size(newest)):
        return None
    return snapshot(spark, store)


def _bytes_after(store: RangeStore, position: int) -> int:
    pieces = select_ranges(store.ranges(), position + 1, archived_until(store.directory))
    return sum(store.size(piece.range) for piece in pieces if piece.range.first > position)


class ArchiveMaintenance:
    """The maintenance thread of one run of the query."""

    def __init__(self, spark: SparkSession, store: RangeStore, checkpoint: Path, *, hold_seconds: float) -> None:
        self._spark = spark
        self._store = store
        self._checkpoint = checkpoint
        self._hold_seconds = hold_seconds
        self._control: StreamControl | None = None
        self._releases = Releases(hold_seconds=hold_seconds)

    def create_durable(self, connection: Mapping[str, str], durable: str) -> None:
        """Create the durable if it does not exist: from now on the stream keeps everything for the archive."""
        settings = read_settings({**connection, "durable": durable, "syncCheckpoint": str(self._checkpoint.absolute())})
        self._control = StreamControl(settings)
        view = self._control.view()
        self._control.create_durable(Offset(settings.stream, view.created, view.begins - 1))

    def start(self, query: StreamingQuery) -> None:
        """Run until the query ends."""
        threading.Thread(target=self._run, args=(query,), name="archive-maintenance", daemon=True).start()

    def _run(self, query: StreamingQuery) -> None:
        self._spark.sparkContext.setLocalProperty("spark.scheduler.pool", "archive")
        next_housekeeping = time.monotonic() + _COMPACTION_INTERVAL_SECONDS
        tick = min(_RELEASE_INTERVAL_SECONDS, max(self._hold_seconds / 4, 0.05))
        while is_active(query):
            time.sleep(tick)
            try:
                self.release(time.monotonic())
                if time.monotonic() > next_housekeeping:
                    self._compact_and_snapshot()
                    next_housekeeping = time.monotonic() + _COMPACTION_INTERVAL_SECONDS
            except Exception as error:  # noqa: BLE001 - the server is away or a job failed: try again
                if is_active(query):  # else the engine is stopping, which ends the job
                    _log.warning("maintenance of the archive: %s", _first_line(error))

    def release(self, now: float) -> None:
        """Move the durable to where the query was done `hold_seconds` ago."""
        end = committed_offset(self._checkpoint)
        if end is not None:
            self._releases.add(end, now)
        if self._control is None or not self._releases.pending:
            return
        sealed = (
            self._control.view().sealed
        )  # the stream is being migrated: publishers wait until everything is released
        due = self._releases.due(now, hold=not sealed)
        if due is not None:
            try:
                self._control.move_durable(due)
            except Exception:
                self._releases.give_back(due, now)
                raise

    def _compact_and_snapshot(self) -> None:
        compact(self._spark, self._store)
        snapshot_if_worthwhile(self._spark, self._store)
        self._store.clean_up()


def _first_line(error: Exception) -> str:
    """Return an error in short: an error of Spark contains pages of its stack trace."""
    return str(error) if isinstance(error, PurveyorError) else next(iter(str(error).splitlines()), repr(error))

"""Reads the archive: all messages of a range of positions, and the objects as of a position.

Archived messages come from Parquet; others come from the stream, which keeps every message for the archive until it is
archived, and a while longer (see `maintenance`), so that a query planned in between finds it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the usual alias

from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk import ReadOptions, read_range
from purveyor.jetstream.bulk.net.pool import request_api
from purveyor.jetstream.headers import MSG_ID
from purveyor.model.control_events import CONTROL_SUBJECT
from purveyor.model.message_headers import EVENT_ID
from purveyor.pipeline.archive.layout import (
    COLUMNS,
    CONTROL,
    EVENT,
    INVALID,
    SCHEMA,
    Piece,
    archived_until,
    end_position,
    select_ranges,
    snapshots_in,
)
from purveyor.pipeline.archive.range_store import RangeStore
from purveyor.pipeline.event_sources import event_format
from purveyor.spark.options import connection_options

__all__ = ["ArchiveSource", "archived_until", "events", "objects_at"]

_OBJECT_KEY = ("realm", "topic", "key")
_FEW_MESSAGES = 100
_ONE_TASK_POSITIONS = 500_000
"""Up to this many positions, one task groups faster than several that exchange their results."""
_MAX_BROADCAST_POSITIONS = 2_000_000
"""Up to this many positions are sent to every executor, about 50 MB."""


@dataclass(frozen=True, slots=True)
class ArchiveSource:
    """Where events are: the archive's directory (`<data_dir>/archive`), and the stream for those not archived yet.

    Without an address only archived events are seen.
    """

    address: Address | None
    directory: Path
    stream: str = "stream:incoming"


def events(
    spark: SparkSession, source: ArchiveSource, first: int, last: int, *, with_control: bool = True
) -> DataFrame:
    """Return all messages with positions first..last, both included, in the archive's columns and in no order.

    Control events and messages that are not events are among them: see column `kind`. Without `with_control`, the
    stream is not scanned if only control events wait there: behind the archive of a quiet system there is only the
    control event of the subscription that is to be filled.

    The plan is fixed by what is archived now. Run it within the time that the stream holds archived messages (two
    minutes). Later the part from the stream may be gone: then it raises PlanOutdated and never returns too few rows. A
    new call finds the rows in the archive.
    """
    store = RangeStore(source.directory)
    ranges = store.ranges()
    not_archived = _not_archived(source, end_position(ranges))
    while not_archived is None:  # the archive moved on in the meantime
        ranges = store.ranges()
        not_archived = _not_archived(source, end_position(ranges))
    frames = _read_archived(spark, store, select_ranges(ranges, first, last))
    begin, end = max(first, not_archived.first), min(last, not_archived.last)
    if begin <= end and (with_control or not _is_all_control(source, begin, end)):
        frames.append(_read_stream(spark, source, begin, end))
    return reduce(DataFrame.unionAll, frames) if frames else spark.createDataFrame([], SCHEMA)


def objects_at(spark: SparkSession, source: ArchiveSource, position: int) -> DataFrame:
    """Return the objects as of a position: for each (realm, topic, key) its last event up to there, without deletions.

    The rows are those of the events: `data` has the object and `position` its last change. An event without a key is
    not an object. The rows come from the newest snapshot up to the position and the events after it.
    """
    start = max((found for found in snapshots_in(source.directory) if found <= position), default=0)
    rows = events(spark, source, start + 1, position, with_control=False)
    rows = rows.where((F.col("kind") == EVENT) & F.col("key").isNotNull())
    at_most = position - start
    if start:
        files = RangeStore(source.directory).snapshot_files(start)
        rows = rows.unionAll(_scan(spark, files))
        at_most += sum(pq.read_metadata(path).num_rows for path in files)
    # Only the narrow columns are grouped; the objects themselves are read once and never sorted.
    narrow = rows.select(*_OBJECT_KEY, "position")
    if at_most <= _ONE_TASK_POSITIONS:  # one task is faster than an exchange
        narrow = narrow.coalesce(1)
    latest = narrow.groupBy(*_OBJECT_KEY).agg(F.max("position").alias("position")).select("position")
    if at_most <= _MAX_BROADCAST_POSITIONS:  # else Spark, which does not know the size, would shuffle the objects too
        latest = F.broadcast(latest)
    # Each position is there once, so this is a semi join; written as one it would be planned once for each scan.
    return rows.where(F.col("operation") != "delete").join(latest, "position")


def as_archived(incoming: DataFrame) -> DataFrame:
    """Return the archive's columns from all columns of the format `jetstream-events`.

    >>> as_archived(spark.read.format("jetstream-events").options(stream="stream:incoming"))  # doctest: +SKIP
    """
    control = F.col("subject") == F.lit(CONTROL_SUBJECT)
    kind = F.when(control, CONTROL).when(F.col("realm").isNotNull(), EVENT).otherwise(INVALID)
    made = {
        "position": F.col("sequence"),
        "stored": F.col("timestamp"),
        "kind": kind,
        "id": F.coalesce(*(F.get(F.col("headers")[name], F.lit(0)) for name in (EVENT_ID, MSG_ID))),
    }
    return incoming.select(*(made[name].alias(name) if name in made else name for name in COLUMNS))


def _read_archived(spark: SparkSession, store: RangeStore, pieces: Sequence[Piece]) -> list[DataFrame]:
    """Read whole ranges in one scan, and a range at either end with its own condition."""
    whole = [path for piece in pieces if _is_whole(piece) for path in store.files(piece.range)]
    cut = [piece for piece in pieces if not _is_whole(piece)]
    frames = [_scan(spark, whole)] if whole else []
    for piece in cut:
        rows = _scan(spark, store.files(piece.range))
        frames.append(rows.where(F.col("position").between(piece.first, piece.last)))
    return frames


def _is_whole(piece: Piece) -> bool:
    return (piece.first, piece.last) == (piece.range.first, piece.range.last)


def _scan(spark: SparkSession, files: Sequence[Path]) -> DataFrame:
    return spark.read.schema(SCHEMA).parquet(*(str(path) for path in files))


@dataclass(frozen=True, slots=True)
class _NotArchived:
    """Positions in the stream that are not archived; empty if first is above last."""

    first: int
    last: int


def _not_archived(source: ArchiveSource, reached: int) -> _NotArchived | None:
    """Return the positions in the stream behind the archive; None if the archive has moved on in the meantime.

    If the stream begins later than the archive ends, and the archive is still where it was, then the messages between
    were removed before they were archived.
    """
    if source.address is None:
        return _NotArchived(1, 0)
    state = request_api(source.address, f"STREAM.INFO.{source.stream}")["state"]
    begins = max(int(state["first_seq"]), reached + 1)
    if begins > reached + 1 and archived_until(source.directory) != reached:
        return None
    return _NotArchived(begins, int(state["last_seq"]))


def _is_all_control(source: ArchiveSource, first: int, last: int) -> bool:
    """Return whether these few messages of the stream are all control events. Many messages are not checked."""
    if last - first >= _FEW_MESSAGES:
        return False
    assert source.address is not None
    options = ReadOptions(columns=("subject",))
    found = [
        subject
        for batch in read_range(source.address, source.stream, first, last, options)
        for subject in batch.column("subject").to_pylist()
    ]
    return len(found) == last - first + 1 and set(found) == {CONTROL_SUBJECT}


def _read_stream(spark: SparkSession, source: ArchiveSource, first: int, last: int) -> DataFrame:
    assert source.address is not None
    options = connection_options(source.address) | {"stream": source.stream}
    options |= {"startingOffsets": str(first), "endingOffsets": str(last)}
    return as_archived(spark.read.format(event_format(spark)).options(**options).load())

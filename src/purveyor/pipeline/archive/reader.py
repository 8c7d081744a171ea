"""Reading what was: all messages of a range of positions, and the objects as they were at a position.

What is archived comes from Parquet; what is not archived yet comes straight from the stream, which keeps every message
for the archive until it is archived, and a while longer (see `upkeep`), so that a query planned in between finds it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody writes it

from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk import ReadOptions, read_range
from purveyor.jetstream.bulk.net.api_request import ask
from purveyor.model.control_events import CONTROL_SUBJECT
from purveyor.pipeline.archive.layout import Piece, archived_until, cover, snapshots_in, until
from purveyor.pipeline.archive.range_store import Store
from purveyor.pipeline.archive.schema import EVENT, SCHEMA, as_archived
from purveyor.pipeline.event_source import event_format
from purveyor.spark.options import connection_options

__all__ = ["ArchiveSource", "archived_until", "events", "objects_at"]

_IDENTITY = ("realm", "topic", "key")
_FEW = 100
_ONE_TASK = 500_000
"""Positions that one task groups sooner than several that exchange what they found."""
_MOST_SENT_ROUND = 2_000_000
"""Positions that every executor is given whole, some 50 MB of them."""


@dataclass(frozen=True, slots=True)
class ArchiveSource:
    """Where events are: the archive's directory (`<data_dir>/archive`), and the stream for what is not archived yet.

    Without an address only what is archived is seen.
    """

    address: Address | None
    directory: Path
    stream: str = "stream:incoming"


def events(
    spark: SparkSession, source: ArchiveSource, first: int, last: int, *, with_control: bool = True
) -> DataFrame:
    """All messages with positions first..last, both included, in the archive's columns and in no order.

    Control events and messages that are no events are among them: see column `kind`. Who does not want control events
    may say so, and is spared a scan of the stream if nothing else is waiting there: behind the archive of a quiet
    system lies the message that began the subscription to be filled, and no more. The plan is fixed by what is
    archived now; run it within the time that the stream holds what was archived (two minutes). Later the part that came
    from the stream may be gone: PlanOutdated then, never a row too few. Called again, this finds it in the archive.
    """
    store = Store(source.directory)
    ranges = store.ranges()
    waiting = _waiting(source, until(ranges))
    while waiting is None:  # archived while we looked
        ranges = store.ranges()
        waiting = _waiting(source, until(ranges))
    frames = _archived(spark, store, cover(ranges, first, last))
    begin, end = max(first, waiting.first), min(last, waiting.last)
    if begin <= end and (with_control or not _is_control(source, begin, end)):
        frames.append(_tail(spark, source, begin, end))
    return reduce(DataFrame.unionAll, frames) if frames else spark.createDataFrame([], SCHEMA)


def objects_at(spark: SparkSession, source: ArchiveSource, position: int) -> DataFrame:
    """The objects as of a position: for each (realm, topic, key) its last event up to there, deletions left out.

    The rows are those of the events, so `data` has the object and `position` tells when it last changed. An event that
    has no key is no object. Read from the newest snapshot up to the position and the events behind it.
    """
    start = max((found for found in snapshots_in(source.directory) if found <= position), default=0)
    rows = events(spark, source, start + 1, position, with_control=False)
    rows = rows.where((F.col("kind") == EVENT) & F.col("key").isNotNull())
    at_most = position - start
    if start:
        files = Store(source.directory).snapshot_files(start)
        rows = rows.unionAll(_scan(spark, files))
        at_most += sum(pq.read_metadata(path).num_rows for path in files)
    # Only the narrow columns are grouped; the objects themselves are read once and never sorted.
    narrow = rows.select(*_IDENTITY, "position")
    if at_most <= _ONE_TASK:  # sooner done by one task than exchanged
        narrow = narrow.coalesce(1)
    latest = narrow.groupBy(*_IDENTITY).agg(F.max("position").alias("position")).select("position")
    if at_most <= _MOST_SENT_ROUND:  # else Spark, which cannot know, would shuffle the objects too before it sees
        latest = F.broadcast(latest)
    # Each position is there once, so this is a semi join; written as one it would be planned once for each scan.
    return rows.where(F.col("operation") != "delete").join(latest, "position")


def _archived(spark: SparkSession, store: Store, pieces: Sequence[Piece]) -> list[DataFrame]:
    """Whole ranges in one scan; the one at either end of what is asked for with a limit of its own."""
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
class _Waiting:
    """Positions in the stream that are not archived; none when first is above last."""

    first: int
    last: int


def _waiting(source: ArchiveSource, reached: int) -> _Waiting | None:
    """What the stream holds behind the archive; None when the archive has moved on meanwhile.

    If the stream begins later than the archive ends, and the archive is still where it was, then nobody has archived
    the positions between: their messages were removed.
    """
    if source.address is None:
        return _Waiting(1, 0)
    state = ask(source.address, f"STREAM.INFO.{source.stream}")["state"]
    begins = max(int(state["first_seq"]), reached + 1)
    if begins > reached + 1 and archived_until(source.directory) != reached:
        return None
    return _Waiting(begins, int(state["last_seq"]))


def _is_control(source: ArchiveSource, first: int, last: int) -> bool:
    """Whether a few messages of the stream are control events, all that are asked for; of many nobody asks."""
    if last - first >= _FEW:
        return False
    assert source.address is not None
    options = ReadOptions(columns=("subject",))
    found = [
        subject
        for batch in read_range(source.address, source.stream, first, last, options)
        for subject in batch.column("subject").to_pylist()
    ]
    return len(found) == last - first + 1 and set(found) == {CONTROL_SUBJECT}


def _tail(spark: SparkSession, source: ArchiveSource, first: int, last: int) -> DataFrame:
    assert source.address is not None
    options = connection_options(source.address) | {"stream": source.stream}
    options |= {"startingOffsets": str(first), "endingOffsets": str(last)}
    return as_archived(spark.read.format(event_format(spark)).options(**options).load())

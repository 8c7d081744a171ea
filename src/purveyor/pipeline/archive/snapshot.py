"""Snapshots: the objects as of a position, so that asking for the current state does not read all of history."""

from pyspark.sql import SparkSession

from purveyor.pipeline.archive.compaction import FILE_BYTES, in_order
from purveyor.pipeline.archive.layout import archived_until, cover, snapshots_in
from purveyor.pipeline.archive.range_store import Store
from purveyor.pipeline.archive.reader import ArchiveSource, objects_at

KEEP = 2
"""The one before the last is there for queries that were planned on it."""
_WORTHWHILE_BYTES = 64 << 20


def snapshot(spark: SparkSession, store: Store) -> int:
    """Make a snapshot of what is archived, if there is none of that yet; its position, 0 for an empty archive."""
    position = archived_until(store.directory)
    newest = max(snapshots_in(store.directory), default=0)
    if position > newest:
        objects = objects_at(spark, ArchiveSource(None, store.directory), position)
        files = max(1, round((_bytes_behind(store, newest) + store.snapshot_size(newest)) / FILE_BYTES))
        store.add_snapshot(in_order(objects, files), position, keep=KEEP)
    return position


def snapshot_if_worthwhile(spark: SparkSession, store: Store) -> int | None:
    """Make one when the events behind the last one are more than it is itself; its position if it was made."""
    newest = max(snapshots_in(store.directory), default=0)
    if _bytes_behind(store, newest) < max(_WORTHWHILE_BYTES, store.snapshot_size(newest)):
        return None
    return snapshot(spark, store)


def _bytes_behind(store: Store, position: int) -> int:
    pieces = cover(store.ranges(), position + 1, archived_until(store.directory))
    return sum(store.size(piece.range) for piece in pieces if piece.range.first > position)

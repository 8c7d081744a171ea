"""Compaction: small neighbouring ranges become one, so that an archive of any age is few files.

Size-tiered: a run of `FAN_IN` neighbours of about one size (or smaller) is merged, so an event is rewritten once per
tier, and there are at most `FAN_IN` ranges of each tier beside those that are large enough.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pyspark.sql import DataFrame, SparkSession

from purveyor.pipeline.archive.layout import PositionRange, superseded
from purveyor.pipeline.archive.range_store import Store
from purveyor.pipeline.archive.schema import ORDER, SCHEMA

FAN_IN = 8
FILE_BYTES = 128 << 20
_SMALLEST_TIER_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Sized:
    """A range and its bytes."""

    range: PositionRange
    size: int


def next_merge(ranges: Sequence[Sized], *, fan_in: int = FAN_IN, file_bytes: int = FILE_BYTES) -> list[PositionRange]:
    """The neighbours to merge next, smallest tier first; none when it is not worthwhile. Pure.

    >>> small = [Sized(PositionRange(number, number), 100) for number in range(1, 4)]
    >>> [each.first for each in next_merge(small, fan_in=3)]
    [1, 2, 3]
    """
    limit = _SMALLEST_TIER_BYTES
    while limit < file_bytes * fan_in:
        largest = min(limit, file_bytes)
        run: list[Sized] = []
        for each in ranges:
            if each.size >= largest:
                run = []
                continue
            run = [*run, each] if run and run[-1].range.last + 1 == each.range.first else [each]
            if len(run) == fan_in or (len(run) > 1 and sum(one.size for one in run) >= file_bytes):
                return [one.range for one in run]
        limit *= fan_in
    return []


def compact(spark: SparkSession, store: Store, *, fan_in: int = FAN_IN, file_bytes: int = FILE_BYTES) -> int:
    """Merge as long as it is worthwhile; how many ranges were replaced."""
    replaced = 0
    while parts := next_merge(sizes(store), fan_in=fan_in, file_bytes=file_bytes):
        files = [path for part in parts for path in store.files(part)]
        pieces = max(1, round(sum(path.stat().st_size for path in files) / file_bytes))
        rows = spark.read.schema(SCHEMA).parquet(*(str(path) for path in files))
        if not store.replace(in_order(rows, pieces), parts):
            break  # somebody else compacts this archive
        replaced += len(parts)
    return replaced


def sizes(store: Store) -> list[Sized]:
    """The ranges that count, in order."""
    ranges = store.ranges()
    old = set(superseded(ranges))
    return [Sized(each, store.size(each)) for each in ranges if each not in old]


def in_order(rows: DataFrame, files: int) -> DataFrame:
    """As rows lie in the archive, in so many files."""
    spread = rows.coalesce(1) if files == 1 else rows.repartitionByRange(files, *ORDER)
    return spread.sortWithinPartitions(*ORDER)

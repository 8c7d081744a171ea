"""An archive of one stream: fill the stream, archive it, read the files."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from purveyor.jetstream.bulk.arrow_columns import HEADERS_TYPE as HEADERS
from purveyor.pipeline.archive.layout import EVENTS, PositionRange, archived_until, ranges_in
from purveyor.pipeline.archive.range_store import RangeStore
from purveyor.pipeline.archive.reader import ArchiveSource, events
from purveyor.pipeline.archive.writer import ArchiveSettings, archive_range, start_archive
from purveyor.pipeline.event_rows import COLUMN_TYPES, parse_columns
from tests.support.broker import Broker
from tests.support.waiting import wait_until


def event(key: str, new: Any = None, *, old: Any = None, topic: str = "users/user", **more: Any) -> str:
    """Return an event as JSON; without `new` and `old` the object is new."""
    given = {"id": key} if new is None and old is None else new or {}
    body = {"old": old or {}, "new": given}
    base = {"publisher_name": "test", "ts": "2026-01-31T12:00:00+00:00", "realm": "udm", "topic": topic, "body": body}
    return json.dumps(base | {"key": key} | more)


def as_read(spark: SparkSession, texts: Sequence[str], *, first: int = 1, subject: str = "incoming") -> DataFrame:
    """Return messages as the format `jetstream-events` reads them, without a stream."""
    moment = datetime(2026, 1, 31, 12, tzinfo=UTC)
    messages = pa.record_batch(
        {
            "sequence": pa.array(range(first, first + len(texts)), pa.int64()),
            "timestamp": pa.array([moment] * len(texts), pa.timestamp("us", "UTC")),
            "subject": pa.array([subject] * len(texts), pa.string()),
            "headers": pa.array([[] for _ in texts], HEADERS),
            "data": pa.array([text.encode() for text in texts], pa.binary()),
        }
    )
    parsed = dict(zip(COLUMN_TYPES, parse_columns(messages, tuple(COLUMN_TYPES)), strict=True))
    table = pa.table(dict(zip(messages.schema.names, messages.columns, strict=True)) | parsed)
    return spark.createDataFrame(table).coalesce(1)


class Archive:
    """One stream and its archive."""

    def __init__(self, spark: SparkSession, broker: Broker, stream: str, directory: Path) -> None:
        self.spark = spark
        self.broker = broker
        self.stream = stream
        self.directory = directory / "archive"
        self.store = RangeStore(self.directory)
        self.source = ArchiveSource(broker.address, self.directory, stream)
        self.settings = ArchiveSettings(
            source=self.source, checkpoint=directory / "checkpoint", trigger_seconds=0.05, hold_seconds=0.0
        )

    def publish(self, *texts: str | bytes) -> None:
        self.broker.add(self.stream, texts)

    def last(self) -> int:
        return int(self.broker.state(self.stream)["last_seq"])

    def until(self) -> int:
        return archived_until(self.directory)

    @contextmanager
    def running(self, **changes: Any) -> Iterator[StreamingQuery]:
        settings = ArchiveSettings(**{name: getattr(self.settings, name) for name in SETTINGS} | changes)
        query = start_archive(self.spark, settings)
        try:
            yield query
        finally:
            query.stop()

    def catch_up(self, **changes: Any) -> None:
        """Archive all messages of the stream."""
        with self.running(**changes) as query:
            wait_until(lambda: self.until() == self.last() or not query.isActive)
            assert query.exception() is None

    def positions(self, first: int = 1, last: int = 1 << 40) -> list[int]:
        """Return the positions that the reader of the archive returns."""
        return sorted(row.position for row in events(self.spark, self.source, first, last).select("position").collect())

    def ranges(self) -> list[tuple[int, int]]:
        """Return the ranges in the directory."""
        return [(each.first, each.last) for each in ranges_in(self.directory / EVENTS)]

    def lying(self) -> list[int]:
        """Return the positions that another program reads from the Parquet files."""
        table = ds.dataset(self.directory / EVENTS, format="parquet").to_table(columns=["position"])
        return sorted(table["position"].to_pylist())

    def add(self, first: int, last: int, *texts: str) -> None:
        """Archive messages without a stream: one at each position, or none beyond the texts."""
        rows = as_read(self.spark, texts, first=first, subject=self.stream)
        archive_range(self.store, rows, PositionRange(first, last))


SETTINGS = ("source", "checkpoint", "trigger_seconds", "max_offsets", "durable", "hold_seconds")


@pytest.fixture
def archive(spark: SparkSession, broker: Broker, unique: str, tmp_path: Path) -> Iterator[Archive]:
    """Make an archive of an interest stream with a durable, as `stream:incoming` has one."""
    broker.make(unique, retention="interest")
    broker.durable(unique, "archive")
    yield Archive(spark, broker, unique, tmp_path)
    for query in spark.streams.active:
        query.stop()


def whole(*ranges: tuple[int, int]) -> list[PositionRange]:
    return [PositionRange(first, last) for first, last in ranges]

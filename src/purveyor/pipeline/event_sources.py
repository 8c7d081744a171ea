"""The formats by which the pipeline reads `stream:incoming`: `jetstream-events` and `jetstream-topic-batches`.

Both are the `jetstream` format of `purveyor.spark`, and both parse each message in the task that reads it: so dispatch
and archive agree on what is an event, and the JVM never parses JSON.

- `jetstream-events`, for the archive, adds the columns of `COLUMN_TYPES` to those of the message.
- `jetstream-topic-batches`, for dispatch, groups the messages of one topic into one row (see `event_rows`).
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, Final
from weakref import WeakKeyDictionary

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from purveyor.pipeline.event_rows import COLUMN_TYPES, TOPIC_BATCH_DDL, parse_columns, to_topic_batches
from purveyor.spark.options import ReadSettings
from purveyor.spark.readers import JetStreamReader, JetStreamStreamReader
from purveyor.spark.source import JetStreamDataSource

_TOPIC_BATCH_COLUMNS: Final = ("sequence", "subject", "headers", "data")
_registered: "WeakKeyDictionary[SparkSession, set[str]]" = WeakKeyDictionary()


def event_format(spark: SparkSession) -> str:
    """Register the format of events with the session and return its name."""
    return _register(spark, EventSource)


def topic_batch_format(spark: SparkSession) -> str:
    """Register the format of topic batches with the session and return its name."""
    return _register(spark, TopicBatchSource)


def _register(spark: SparkSession, source: type[JetStreamDataSource]) -> str:
    known = _registered.setdefault(spark, set())
    if source.name() not in known:
        spark.dataSource.register(source)
        known.add(source.name())
    return source.name()


class EventSource(JetStreamDataSource):
    """The options and columns of `JetStreamDataSource`, followed by the columns of `COLUMN_TYPES`."""

    @classmethod
    def name(cls) -> str:
        """Return the name for `.format(...)`."""
        return "jetstream-events"

    def schema(self) -> str:
        """Return the columns of the message and those of the event."""
        return ", ".join([super().schema(), *(f"{name} {kind}" for name, kind in COLUMN_TYPES.items())])

    def _with_schema(self, schema: StructType) -> ReadSettings:
        return super()._with_schema(StructType([each for each in schema.fields if each.name not in COLUMN_TYPES]))

    def reader(self, schema: StructType) -> "EventReader":
        """Make the reader for `spark.read`."""
        return EventReader(self._with_schema(schema))

    def streamReader(self, schema: StructType) -> "EventStreamReader":  # noqa: N802 - Spark's name
        """Make the reader for `spark.readStream`."""
        return EventStreamReader(self._with_schema(schema))


class EventReader(JetStreamReader):
    """A batch read."""

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one partition, on an executor."""
        return map(_with_event_columns, super().read(partition))


class EventStreamReader(JetStreamStreamReader):
    """A streaming read."""

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one partition, on an executor."""
        return map(_with_event_columns, super().read(partition))


def _with_event_columns(batch: pa.RecordBatch) -> pa.RecordBatch:
    arrays: list[Any] = [*batch.columns, *parse_columns(batch, tuple(COLUMN_TYPES))]
    return pa.RecordBatch.from_arrays(arrays, [*batch.schema.names, *COLUMN_TYPES])


class TopicBatchSource(JetStreamDataSource):
    """Rows of `TOPIC_BATCH_SCHEMA`; the options of `JetStreamDataSource`."""

    @classmethod
    def name(cls) -> str:
        """Return the name for `.format(...)`."""
        return "jetstream-topic-batches"

    def schema(self) -> str:
        """Return the columns of a topic batch."""
        return TOPIC_BATCH_DDL

    def reader(self, schema: StructType) -> "TopicBatchReader":
        """Make the reader for `spark.read`, with which dispatch reads a part of a batch again."""
        del schema
        return TopicBatchReader(self._settings())

    def streamReader(self, schema: StructType) -> "TopicBatchStreamReader":  # noqa: N802 - Spark's name
        """Make the reader for `spark.readStream`."""
        del schema
        return TopicBatchStreamReader(self._settings())

    def _settings(self) -> ReadSettings:
        return dataclasses.replace(self._read_settings(), columns=_TOPIC_BATCH_COLUMNS, raw_headers=True)


class TopicBatchReader(JetStreamReader):
    """A batch read."""

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one partition, on an executor."""
        return map(to_topic_batches, super().read(partition))


class TopicBatchStreamReader(JetStreamStreamReader):
    """A streaming read."""

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one partition, on an executor."""
        return map(to_topic_batches, super().read(partition))

"""The `jetstream` format with what each message says as an event: format `jetstream-events`.

A message is looked at where it is read, in the task that has its bytes in hand already: dispatch (see `pack_source`)
and archive get the same verdict because it is one, and Spark's own side of a batch never parses JSON.
"""

from collections.abc import Iterator
from typing import Any, Final
from weakref import WeakSet

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from purveyor.pipeline.event_columns import TYPES, told
from purveyor.spark.options import ReadSettings
from purveyor.spark.readers import JetStreamReader, JetStreamStreamReader
from purveyor.spark.source import JetStreamDataSource

FORMAT: Final = "jetstream-events"
_known: "WeakSet[SparkSession]" = WeakSet()


def event_format(spark: SparkSession) -> str:
    """The name of the format, which the session knows by then."""
    if spark not in _known:
        spark.dataSource.register(EventSource)
        _known.add(spark)
    return FORMAT


class EventSource(JetStreamDataSource):
    """All of `JetStreamDataSource`; the columns of `TYPES` follow those of the message."""

    @classmethod
    def name(cls) -> str:
        """The word for `.format(...)`."""
        return FORMAT

    def schema(self) -> str:
        """The columns of the message, and what it says."""
        return ", ".join([super().schema(), *(f"{name} {kind}" for name, kind in TYPES.items())])

    def _with_schema(self, schema: StructType) -> ReadSettings:
        return super()._with_schema(StructType([each for each in schema.fields if each.name not in TYPES]))

    def reader(self, schema: StructType) -> "EventReader":
        """For `spark.read`."""
        return EventReader(self._with_schema(schema))

    def streamReader(self, schema: StructType) -> "EventStreamReader":  # noqa: N802 - Spark's name
        """For `spark.readStream`."""
        return EventStreamReader(self._with_schema(schema))


class EventReader(JetStreamReader):
    """A batch read."""

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """One piece."""
        return map(_with_told, super().read(partition))


class EventStreamReader(JetStreamStreamReader):
    """A streaming read."""

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """One piece, on an executor."""
        return map(_with_told, super().read(partition))


def _with_told(batch: pa.RecordBatch) -> pa.RecordBatch:
    arrays: list[Any] = [*batch.columns, *told(batch, tuple(TYPES))]
    return pa.RecordBatch.from_arrays(arrays, [*batch.schema.names, *TYPES])

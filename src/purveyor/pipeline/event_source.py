"""The `jetstream` format with what each message says as an event: format `jetstream-events`.

A message is looked at where it is read, in the task that has its bytes in hand already: dispatch and archive get the
same verdict because it is one, and Spark's own side of a batch never parses JSON.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final
from weakref import WeakSet

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from purveyor.pipeline.event_columns import TYPES, told
from purveyor.spark.options import ReadSettings, read_settings
from purveyor.spark.read import JetStreamReader, JetStreamStreamReader
from purveyor.spark.source import JetStreamDataSource

FORMAT: Final = "jetstream-events"
_TOLD: Final = "told"
_known: "WeakSet[SparkSession]" = WeakSet()


def event_format(spark: SparkSession) -> str:
    """The name of the format, which the session knows by then."""
    if spark not in _known:
        spark.dataSource.register(EventSource)
        _known.add(spark)
    return FORMAT


class EventSource(JetStreamDataSource):
    """All of `JetStreamDataSource`; option `told` names columns of `TYPES`, which follow those of the message."""

    @classmethod
    def name(cls) -> str:
        """The word for `.format(...)`."""
        return FORMAT

    def schema(self) -> str:
        """The columns of the message, and what it says."""
        return ", ".join([super().schema(), *(f"{name} {TYPES[name]}" for name in self._told())])

    def _told(self) -> tuple[str, ...]:
        return tuple(self.options[_TOLD].split(","))

    def _read_settings(self) -> ReadSettings:
        options: Mapping[str, str] = {name: value for name, value in self.options.items() if name.lower() != _TOLD}
        return read_settings(options)

    def _with_schema(self, schema: StructType) -> ReadSettings:
        return super()._with_schema(StructType([each for each in schema.fields if each.name not in TYPES]))

    def reader(self, schema: StructType) -> "EventReader":
        """For `spark.read`."""
        return EventReader(self._with_schema(schema), self._told())

    def streamReader(self, schema: StructType) -> "EventStreamReader":  # noqa: N802 - Spark's name
        """For `spark.readStream`."""
        return EventStreamReader(self._with_schema(schema), self._told())


class EventReader(JetStreamReader):
    """A batch read."""

    def __init__(self, settings: ReadSettings, told: tuple[str, ...]) -> None:
        super().__init__(settings)
        self._told = told

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """One piece."""
        return _with_told(super().read(partition), self._told)


class EventStreamReader(JetStreamStreamReader):
    """A streaming read."""

    def __init__(self, settings: ReadSettings, told: tuple[str, ...]) -> None:
        super().__init__(settings)
        self._told = told

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """One piece, on an executor."""
        return _with_told(super().read(partition), self._told)


def _with_told(batches: Iterator[pa.RecordBatch], columns: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        arrays: list[Any] = [*batch.columns, *told(batch, columns)]
        yield pa.RecordBatch.from_arrays(arrays, [*batch.schema.names, *columns])

"""The `jetstream` format as dispatch reads it: packs of messages, told as events where they are read.

A message is looked at in the task that has its bytes in hand already, and goes on in a pack (see `packs`).
"""

import dataclasses
from collections.abc import Iterator
from typing import Final
from weakref import WeakSet

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from purveyor.pipeline.topic_batches import DDL, pack
from purveyor.spark.options import ReadSettings
from purveyor.spark.readers import JetStreamReader, JetStreamStreamReader
from purveyor.spark.source import JetStreamDataSource

FORMAT: Final = "jetstream-packs"
_COLUMNS: Final = ("sequence", "subject", "headers", "data")
_known: "WeakSet[SparkSession]" = WeakSet()


def pack_format(spark: SparkSession) -> str:
    """The name of the format, which the session knows by then."""
    if spark not in _known:
        spark.dataSource.register(PackSource)
        _known.add(spark)
    return FORMAT


class PackSource(JetStreamDataSource):
    """The stream as rows of `packs.SCHEMA`; options as those of `JetStreamDataSource`."""

    @classmethod
    def name(cls) -> str:
        """The word for `.format(...)`."""
        return FORMAT

    def schema(self) -> str:
        """That of packs."""
        return DDL

    def reader(self, schema: StructType) -> "PackBatchReader":
        """For `spark.read`: a part of a batch that is read once more."""
        del schema
        return PackBatchReader(self._settings())

    def streamReader(self, schema: StructType) -> "PackReader":  # noqa: N802 - Spark's name
        """For `spark.readStream`."""
        del schema
        return PackReader(self._settings())

    def _settings(self) -> ReadSettings:
        return dataclasses.replace(self._read_settings(), columns=_COLUMNS, raw_headers=True)


class PackBatchReader(JetStreamReader):
    """A batch read."""

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """One piece, on an executor."""
        return map(pack, super().read(partition))


class PackReader(JetStreamStreamReader):
    """A streaming read."""

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """One piece, on an executor."""
        return map(pack, super().read(partition))

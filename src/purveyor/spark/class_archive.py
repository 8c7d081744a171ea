"""Writes the archive of JVM classes that `java` uses for a fast start, once per machine, by running sample queries.

python -m purveyor.spark.class_archive        # takes about a minute
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import LongType, StructField, StructType

from purveyor.model.errors import SetupError
from purveyor.spark.java import find_java, gc_option, prepare_fast_start, user_cache_dir
from purveyor.spark.pyspark_internals import jvm_process, map_in_arrow, transform_with_state
from purveyor.spark.session import session

_SAMPLE_ROWS = 10
_STATE_ROW = StructType([StructField("count", LongType())])
_STATE_STORE = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
_TIMEOUT_SECONDS = 600


class _SampleReader(DataSourceReader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        return {"n": 0}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - Spark's name
        del start, limit
        return {"n": 1}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        pass

    def partitions(self, *_: object) -> list[InputPartition]:
        return [InputPartition(0)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        del partition
        yield pa.record_batch(
            {"key": pa.array(range(_SAMPLE_ROWS), pa.int64()), "data": pa.array([b"{}"] * _SAMPLE_ROWS)}
        )


class _SampleWriter(DataSourceArrowWriter, DataSourceStreamArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        for _ in iterator:
            pass
        return WriterCommitMessage()

    def commit(self, *_: object) -> None:
        pass

    def abort(self, *_: object) -> None:
        pass


class _SampleSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "training"

    def schema(self) -> str:
        return "key bigint, data binary"

    def reader(self, schema: StructType) -> DataSourceReader:
        del schema
        return _SampleReader()

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        del schema
        return _SampleReader()

    def writer(self, schema: StructType, overwrite: bool) -> Any:
        del schema, overwrite
        return _SampleWriter()

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:  # noqa: N802 - Spark's name
        del schema, overwrite
        return _SampleWriter()


class _SampleProcessor(StatefulProcessor):
    def init(self, handle: StatefulProcessorHandle) -> None:
        self._count = handle.getValueState("count", _STATE_ROW)
        self._keys = handle.getMapState("keys", _STATE_ROW, _STATE_ROW)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:  # noqa: N802, N803 - Spark's
        del key, timerValues
        count = sum(1 for _ in rows)
        self._count.update((count,))
        self._keys.updateValue((count,), (count,))
        yield Row(count=count)

    def close(self) -> None:
        pass


def _pass_on(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


def _collect_batch(batch: DataFrame, _number: int) -> None:
    map_in_arrow(batch.repartition(1), _pass_on, "count bigint").collect()


def run_sample_queries(spark: SparkSession, scratch: Path) -> None:
    """Do what a pipeline does: batch and stream through a Python source and sink, a shuffle, JSON, Parquet, state."""
    spark.dataSource.register(_SampleSource)
    batch = spark.read.format("training").load()
    parsed = batch.selectExpr("key", "from_json(cast(data as string), 'a string') as object")
    parsed.groupBy("key").count().write.parquet(str(scratch / "table"))
    spark.read.parquet(str(scratch / "table")).collect()
    batch.write.format("training").mode("append").save()
    stream = spark.readStream.format("training").load().repartition(2, "key")
    writing = stream.writeStream.format("training").option("checkpointLocation", str(scratch / "checkpoint"))
    writing.trigger(availableNow=True).start().awaitTermination()
    spark.conf.set("spark.sql.streaming.stateStore.providerClass", _STATE_STORE)
    kept = transform_with_state(spark.readStream.format("training").load(), "key", _SampleProcessor(), _STATE_ROW)
    writing = kept.writeStream.outputMode("append").option("checkpointLocation", str(scratch / "state"))
    writing.foreachBatch(_collect_batch).trigger(availableNow=True).start().awaitTermination()


def write_archive(archive: Path, cache: Path) -> None:
    """Run the sample queries; return when the JVM has written its archive."""
    options = {"spark.driver.extraJavaOptions": f"{gc_option()} -XX:ArchiveClassesAtExit={archive}".strip()}
    spark = session("training", master="local[2]", options=options, cache=cache)
    with tempfile.TemporaryDirectory() as scratch:
        run_sample_queries(spark, Path(scratch))
    java = jvm_process(spark)
    assert java is not None, "this process started the JVM"
    assert java.stdin is not None, "pyspark talks to it through a pipe"
    spark.stop()
    java.stdin.close()  # the JVM exits when its standard input ends, and writes the archive before
    java.wait()


def make_class_archive(cache: Path | None = None) -> Path:
    """Write the archive from another process and return its path. Sessions that start later use it."""
    cache = cache or user_cache_dir()
    fast_start = prepare_fast_start(find_java(cache), cache)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        draft = Path(scratch) / "classes.jsa"
        command = [sys.executable, "-m", "purveyor.spark.class_archive", str(draft), str(cache)]
        # The run needs the classes to be loaded, not to be optimised.
        options = f"{os.environ.get('SPARK_SUBMIT_OPTS', '')} -XX:TieredStopAtLevel=1"
        environment = {**os.environ, "SPARK_SUBMIT_OPTS": options.strip()}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False, env=environment
        )
        if done.returncode or not draft.is_file():
            last = "\n".join(done.stderr.strip().splitlines()[-5:])
            raise SetupError(f"the archive of Spark's classes was not written: {last}", fix="Spark works without it")
        draft.replace(fast_start.archive)
    return fast_start.archive


if __name__ == "__main__":
    if sys.argv[1:]:
        write_archive(*map(Path, sys.argv[1:]))
    else:
        print(f"made {make_class_archive()}")  # noqa: T201 - a command

"""Everything that Purveyor uses of pyspark although pyspark does not publish it, each with the reason.

Purveyor pins the version of pyspark. `tests/spark/test_pyspark_internals.py` fails when a new version changes one of
these names; no other module uses a private name of pyspark.

- `map_in_arrow`, `arrow_function` and `transform_with_state` do what `DataFrame.mapInArrow`, `arrow_udf` and
  `GroupedData.transformWithState` do. The public methods refuse to run without pandas, although these three use nothing
  of it. So the same user-defined functions are built here directly.
- `clone_session` does what Spark does for each streaming query, for which pyspark has no way. `SparkSession.newSession`
  does not know the data sources of its origin.
- `jvm`, `jvm_process` and `disable_checksum_files` reach the Java side, for which pyspark has no public way.
- `silence_accumulator_server` keeps pyspark from printing a stack trace when the JVM has died.
"""

import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, TypeAlias

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the usual alias
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.streaming.stateful_processor_util import TransformWithStateInPandasUdfUtils
from pyspark.sql.types import DataType, StructType
from pyspark.sql.udf import UserDefinedFunction
from pyspark.util import PythonEvalType

from purveyor.spark.task_tuning import freeze_imports

ArrowFunction: TypeAlias = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


class ArrowTask:
    """A reusable function for `map_in_arrow`. Sending a function to Spark costs a small batch some milliseconds.

    >>> task = ArrowTask(function, "rows bigint")  # doctest: +SKIP
    >>> task.apply(batch).collect()  # doctest: +SKIP
    """

    def __init__(self, function: ArrowFunction, schema: str) -> None:
        def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            freeze_imports()
            return function(batches)

        self._udf = UserDefinedFunction(task, _parse_type(schema), evalType=PythonEvalType.SQL_MAP_ARROW_ITER_UDF)
        self._names: list[str] | None = None
        self._column: Any = None

    def apply(self, frame: DataFrame) -> DataFrame:
        """Apply the function to the record batches of each partition."""
        names = frame.columns
        if names != self._names:
            self._names, self._column = names, self._udf(*map(F.col, names))
        result: Any = frame._jdf.mapInArrow(self._column._jc, False, None)  # noqa: SLF001 - see above
        return DataFrame(result, frame.sparkSession)


def map_in_arrow(frame: DataFrame, function: ArrowFunction, schema: str) -> DataFrame:
    """Apply a function to the record batches of each partition, as `DataFrame.mapInArrow` does."""
    return ArrowTask(function, schema).apply(frame)


def arrow_function(function: Callable[..., Any], return_type: str) -> Callable[..., Column]:
    """Turn a function of Arrow arrays, one for each column, into a function of columns, as `arrow_udf` does."""

    def call(*columns: Any) -> Any:
        freeze_imports()
        return function(*columns)

    udf = UserDefinedFunction(call, _parse_type(return_type), evalType=PythonEvalType.SQL_SCALAR_ARROW_UDF)
    return udf.__call__


@cache
def _parse_type(schema: str) -> DataType:
    """Parse a type or a schema. The JVM does that, and every micro-batch needs it: so the result is cached."""
    return StructType.fromDDL(schema) if " " in schema else DataType.fromDDL(schema)


def transform_with_state(frame: DataFrame, key: str, processor: StatefulProcessor, schema: StructType) -> DataFrame:
    """Run the processor on the rows of each key and return its output, in output mode Append and without timers."""
    session = frame.sparkSession
    udf = UserDefinedFunction(
        TransformWithStateInPandasUdfUtils(processor, "None").transformWithStateUDF,
        returnType=schema,
        evalType=PythonEvalType.SQL_TRANSFORM_WITH_STATE_PYTHON_ROW_UDF,
    )
    column = udf(*[frame[name] for name in frame.columns])
    result = frame.groupBy(key)._jgd.transformWithStateInPySpark(  # noqa: SLF001 - see above
        column._jc,  # noqa: SLF001
        session._jsparkSession.parseDataType(schema.json()),  # noqa: SLF001
        "Append",
        "None",
        None,
        "",
    )
    return DataFrame(result, session)


def clone_session(spark: SparkSession) -> SparkSession:
    """Return another session of the same context, with the same settings and data sources."""
    return SparkSession(spark.sparkContext, spark._jsparkSession.cloneSession())  # noqa: SLF001 - see above


def jvm(spark: SparkSession) -> Any:
    """Return the view through which Python calls classes of Java."""
    return spark.sparkContext._jvm  # noqa: SLF001 - see above


def jvm_process(spark: SparkSession) -> subprocess.Popen[bytes] | None:
    """Return the process of the JVM; None if this process did not start it."""
    return getattr(spark.sparkContext._gateway, "proc", None)  # noqa: SLF001 - see above


def disable_checksum_files(spark: SparkSession) -> None:
    """Write no checksum file beside each file on a local disk: those are half of what a micro-batch writes.

    Hadoop still checks files that have a checksum file. Other file systems are not affected.
    """
    context: Any = spark.sparkContext
    local = jvm(spark).org.apache.hadoop.fs.FileSystem.getLocal(context._jsc.hadoopConfiguration())  # noqa: SLF001 - see above
    local.setWriteChecksum(False)


def silence_accumulator_server(spark: SparkSession) -> None:
    """Keep the server that receives counters from the JVM from printing that the JVM died: Purveyor reports that."""
    server: Any = spark.sparkContext._accumulatorServer  # noqa: SLF001 - see above
    server.handle_error = _ignore_error


def _ignore_error(request: object, client_address: object) -> None:
    """Print nothing."""

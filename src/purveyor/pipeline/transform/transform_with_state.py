"""Spark's `transformWithState` for Python rows, without pandas.

`GroupedData.transformWithState` works on rows and needs pyarrow and protobuf, but wraps the processor with a function
that refuses to run when pandas is not installed, though nothing of it is used. This is the same call with the wrapping
done here. It stands on names of pyspark that are not public, which is why it is a module of its own, and why the
version of pyspark is pinned.
"""

from pyspark.sql import DataFrame, GroupedData, SparkSession
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.streaming.stateful_processor_util import TransformWithStateInPandasUdfUtils
from pyspark.sql.types import StructType
from pyspark.sql.udf import UserDefinedFunction
from pyspark.util import PythonEvalType

STATE_OPTIONS = {
    # The only store that can hold the state of such a processor.
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    # A batch uploads what changed, not a snapshot of everything.
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
}


def transform_with_state(frame: DataFrame, key: str, processor: StatefulProcessor, schema: StructType) -> DataFrame:
    """What the processor puts out for the rows of each key, in the mode Append and without timers."""
    session: SparkSession = frame.sparkSession
    grouped: GroupedData = frame.groupBy(key)
    call = UserDefinedFunction(
        TransformWithStateInPandasUdfUtils(processor, "None").transformWithStateUDF,
        returnType=schema,
        evalType=PythonEvalType.SQL_TRANSFORM_WITH_STATE_PYTHON_ROW_UDF,
    )
    column = call(*[frame[name] for name in frame.columns])
    java = grouped._jgd.transformWithStateInPySpark(  # noqa: SLF001 - see above
        column._jc,  # noqa: SLF001
        session._jsparkSession.parseDataType(schema.json()),  # noqa: SLF001
        "Append",
        "None",
        None,
        "",
    )
    return DataFrame(java, session)

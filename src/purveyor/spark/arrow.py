"""Arrow in a task without pandas: `DataFrame.mapInArrow` for an environment that has pyarrow alone.

Spark's own method makes its function through `pandas_udf`, which asks for pandas although nothing of it is used. The
function behind is made here directly.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, TypeAlias

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import DataType, StructType
from pyspark.sql.udf import UserDefinedFunction
from pyspark.util import PythonEvalType

from purveyor.spark.worker import spare_imports

Mapping: TypeAlias = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


def map_in_arrow(frame: DataFrame, function: Mapping, schema: str) -> DataFrame:
    """What the function makes of the record batches of each partition; see `DataFrame.mapInArrow`."""

    def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        spare_imports()
        return function(batches)

    made = UserDefinedFunction(task, returnType=_parsed(schema), evalType=PythonEvalType.SQL_MAP_ARROW_ITER_UDF)
    column: Any = made(*[frame[name] for name in frame.columns])
    # The door that mapInArrow itself goes through.
    result: Any = frame._jdf.mapInArrow(column._jc, False, None)  # noqa: SLF001
    return DataFrame(result, frame.sparkSession)


@cache
def _parsed(schema: str) -> DataType:
    """Asked for with every micro-batch, and answered by the JVM: so once is enough."""
    return StructType.fromDDL(schema)

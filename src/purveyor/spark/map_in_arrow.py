"""Arrow in a task without pandas: `DataFrame.mapInArrow` and `arrow_udf` for an environment that has pyarrow alone.

Spark's own methods make their functions in modules that ask for pandas although nothing of it is used. The functions
behind are made here directly.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, TypeAlias

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everybody writes it
from pyspark.sql.types import DataType, StructType
from pyspark.sql.udf import UserDefinedFunction
from pyspark.util import PythonEvalType

from purveyor.spark.gc_tuning import spare_imports

Mapping: TypeAlias = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


class ArrowTask:
    """A function for `map_in_arrow` that is used again: to send it to Spark costs a small batch some milliseconds.

    >>> task = ArrowTask(function, "rows bigint")  # doctest: +SKIP
    >>> task.on(batch).collect()  # doctest: +SKIP
    """

    def __init__(self, function: Mapping, schema: str) -> None:
        def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            spare_imports()
            return function(batches)

        self._made = UserDefinedFunction(task, _parsed(schema), evalType=PythonEvalType.SQL_MAP_ARROW_ITER_UDF)
        self._names: list[str] | None = None
        self._column: Any = None

    def on(self, frame: DataFrame) -> DataFrame:
        """What the function makes of the record batches of each partition."""
        names = frame.columns
        if names != self._names:
            self._names, self._column = names, self._made(*map(F.col, names))
        # The door that mapInArrow itself goes through.
        result: Any = frame._jdf.mapInArrow(self._column._jc, False, None)  # noqa: SLF001
        return DataFrame(result, frame.sparkSession)


def map_in_arrow(frame: DataFrame, function: Mapping, schema: str) -> DataFrame:
    """What the function makes of the record batches of each partition; see `DataFrame.mapInArrow`."""
    return ArrowTask(function, schema).on(frame)


def arrow_function(function: Callable[..., Any], kind: str) -> Callable[..., Column]:
    """A function of Arrow arrays, one for each column that is given, as a function of columns; see `arrow_udf`."""

    def called(*columns: Any) -> Any:
        spare_imports()
        return function(*columns)

    made = UserDefinedFunction(called, _parsed(kind), evalType=PythonEvalType.SQL_SCALAR_ARROW_UDF)
    return made.__call__


@cache
def _parsed(schema: str) -> DataType:
    """Asked for with every micro-batch, and answered by the JVM: so once is enough."""
    return StructType.fromDDL(schema) if " " in schema else DataType.fromDDL(schema)

"""The private members of pyspark that `purveyor.spark.pyspark_internals` uses are there, and mean what it expects.

A failure here after an upgrade of pyspark names the member that changed: adapt `pyspark_internals`, and nothing else.
"""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyspark
import pytest
from pyspark.accumulators import AccumulatorTCPServer
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the usual alias
from pyspark.sql.streaming.stateful_processor_util import TransformWithStateInPandasUdfUtils
from pyspark.sql.udf import UserDefinedFunction
from pyspark.util import PythonEvalType

import purveyor
from purveyor.spark.pyspark_internals import (
    arrow_function,
    jvm,
    jvm_process,
    map_in_arrow,
    silence_accumulator_server,
)

CHECKED_VERSION = "4.3"
PRIVATE = re.compile(
    r"\._(jvm|jsc|jdf|jc|jgd|gateway|jsparkSession|accumulatorServer)\b"
    r"|from pyspark\.(util|sql\.udf|sql\.streaming\.stateful_processor_util) import"
)


def test_pyspark_has_the_version_for_which_the_private_members_were_checked() -> None:
    assert pyspark.__version__.startswith(CHECKED_VERSION)


def test_no_other_module_uses_a_private_member_of_pyspark() -> None:
    root = Path(purveyor.__file__).parent
    users = [path.relative_to(root) for path in root.rglob("*.py") if PRIVATE.search(path.read_text())]
    assert users == [Path("spark/pyspark_internals.py")]


@pytest.mark.parametrize(
    "name", ["SQL_MAP_ARROW_ITER_UDF", "SQL_SCALAR_ARROW_UDF", "SQL_TRANSFORM_WITH_STATE_PYTHON_ROW_UDF"]
)
def test_the_types_of_functions_exist(name: str) -> None:
    assert isinstance(getattr(PythonEvalType, name), int)


def test_functions_take_the_same_arguments() -> None:
    assert list(inspect.signature(UserDefinedFunction).parameters)[:2] == ["func", "returnType"]
    assert "evalType" in inspect.signature(UserDefinedFunction).parameters
    assert list(inspect.signature(TransformWithStateInPandasUdfUtils).parameters) == ["stateful_processor", "time_mode"]
    assert callable(TransformWithStateInPandasUdfUtils.transformWithStateUDF)


def test_a_frame_takes_a_function_of_record_batches(spark: SparkSession) -> None:
    def double(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield pa.record_batch({"id": pa.array([2 * each for each in batch.column("id").to_pylist()], pa.int64())})

    rows = map_in_arrow(spark.range(4), double, "id bigint").collect()
    assert sorted(row.id for row in rows) == [0, 2, 4, 6]


def test_a_frame_takes_a_function_of_arrays(spark: SparkSession) -> None:
    length = arrow_function(lambda texts: pa.array([len(each.as_py()) for each in texts], pa.int32()), "int")
    assert spark.createDataFrame([("abc",)], "text string").select(length(F.col("text"))).collect()[0][0] == 3


def test_a_grouped_frame_takes_a_stateful_processor(spark: SparkSession) -> None:
    method = spark.range(1).groupBy("id")._jgd.transformWithStateInPySpark
    assert callable(method)
    assert spark._jsparkSession.parseDataType('"string"').simpleString() == "string"


def test_the_java_side_is_reached(spark: SparkSession) -> None:
    assert jvm(spark).java.lang.Math.max(1, 2) == 2
    process = jvm_process(spark)
    assert process is not None
    assert process.poll() is None


def test_the_server_of_counters_can_be_silenced(spark: SparkSession) -> None:
    assert callable(AccumulatorTCPServer.handle_error)
    server: Any = spark.sparkContext._accumulatorServer
    before = server.handle_error
    silence_accumulator_server(spark)
    try:
        server.handle_error(None, None)
    finally:
        server.handle_error = before

"""A Spark for one command of a person: it says nothing of its own, and leaves nothing behind."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator

from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # Spark's bridge ships no types
from pyspark.errors import PySparkException
from pyspark.logger import PySparkLogger
from pyspark.sql import SparkSession

from purveyor.model.errors import SetupError
from purveyor.spark.session import session


@contextlib.contextmanager
def quiet_spark(master: str = "local[*]") -> Iterator[SparkSession]:
    """A session while the command works: that of this process, or its own. SetupError says why there is none."""
    PySparkLogger.getLogger("SQLQueryContextLogger").disabled = True  # it writes each refused query to standard error
    there = SparkSession.getActiveSession()
    if there is not None:
        yield there
        return
    with tempfile.TemporaryDirectory(prefix="purveyor-", ignore_cleanup_errors=True) as scratch:
        options = {
            "spark.ui.enabled": "false",
            "spark.driver.memory": "2g",
            "spark.local.dir": scratch,
            "spark.sql.warehouse.dir": f"{scratch}/warehouse",
        }
        if master.startswith("local"):
            options |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
        try:
            with _silence():
                spark = session("purveyor-command", master=master, options=options)
        except (PySparkException, Py4JError, OSError) as error:
            first = str(error).strip().partition("\n")[0]
            raise SetupError(f"Spark does not start on {master}: {first}", fix="check PURVEYOR_SPARK_MASTER") from error
        spark.sparkContext.setLogLevel("OFF")
        try:
            yield spark
        finally:
            spark.stop()


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """What is started meanwhile (the JVM, and by it Python workers) has nobody to write to, for as long as it lives."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(number) for number in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for number in (1, 2):
            os.dup2(nowhere, number)
        yield
    finally:
        for number, before in zip((1, 2), kept, strict=True):
            os.dup2(before, number)
            os.close(before)
        os.close(nowhere)

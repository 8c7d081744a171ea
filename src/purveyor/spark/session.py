"""A Spark session whose settings make small micro-batches fast, and the registration of the data source."""

import os
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from pyspark import SparkContext
from pyspark.sql import SparkSession

import purveyor
from purveyor.jetstream.server import discovery_environment
from purveyor.model.errors import InvalidConfig
from purveyor.spark.java import FastStart, find_java, prepare_fast_start, user_cache_dir
from purveyor.spark.pyspark_internals import disable_checksum_files
from purveyor.spark.source import JetStreamDataSource

_PYTHON = "PYSPARK_PYTHON"
_DEFAULT_PYTHON = "python3"
"""The Python that Spark runs where `PYSPARK_PYTHON` is not set."""
_TUNED_SETTINGS = {
    # The default manager forks about ten processes for each file of a checkpoint (permissions, renames), this one one.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.python.worker.reuse": "true",
    # Two shuffle partitions per core of a laptop, not 200: a micro-batch is small.
    "spark.sql.shuffle.partitions": "4",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "20000",
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.showConsoleProgress": "false",
    # The plan of every micro-batch is written out for Spark's own pages; in full that takes some milliseconds.
    "spark.sql.ui.explainMode": "simple",
}


def session(
    app_name: str = "purveyor",
    *,
    master: str = "local[*]",
    options: Mapping[str, str] | None = None,
    cache: Path | None = None,
) -> SparkSession:
    """Return a session on this machine or on a cluster, with the data source registered.

    `local[N]` never retries a failed task, so it becomes `local[N,4]`. `options` override the settings made here.
    `cache` holds what makes a start fast (default: the user's cache directory); see `java`.
    """
    cache = cache or user_cache_dir()
    java = find_java(cache)
    os.environ["JAVA_HOME"] = str(java.home)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    # The launcher is another JVM, which lives for half a second: no time to optimise.
    os.environ.setdefault("SPARK_LAUNCHER_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
    settings = _TUNED_SETTINGS | dict(options or {})
    fast_start = prepare_fast_start(java, cache)
    here = _in_this_environment(master, fast_start)
    if here:
        os.environ["SPARK_HOME"] = str(fast_start.home)
        settings.setdefault("spark.driver.extraJavaOptions", fast_start.java_options())
    builder = SparkSession.builder.appName(app_name).master(with_retries(master))
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    if here:
        disable_checksum_files(spark)
    register(spark)
    return spark


def _in_this_environment(master: str, fast_start: FastStart) -> bool:
    """Return whether every Python worker runs here with the packages of this process, and the user chose no other."""
    local = master.startswith("local") and not master.startswith("local-cluster")
    own_home = os.environ.get("SPARK_HOME", str(fast_start.home)) == str(fast_start.home)
    return local and own_home and os.environ["PYSPARK_PYTHON"] == sys.executable


def with_retries(master: str) -> str:
    """Return a local master that retries failed tasks.

    >>> with_retries("local[2]"), with_retries("local[2,1]"), with_retries("spark://host:7077")
    ('local[2,4]', 'local[2,1]', 'spark://host:7077')
    """
    if master == "local":
        return "local[1,4]"
    if master.startswith("local[") and "," not in master:
        return f"{master[:-1]},4]"
    return master


def register(spark: SparkSession) -> None:
    """Make `.format("jetstream")` known to a session; on a cluster, send the package to its executors.

    From now on, Python workers of a local session run the Python of this process, unless `PYSPARK_PYTHON` names
    another. They also get the variables that name a server, for reads and writes without the option `servers`. Raise
    InvalidConfig if `PYSPARK_PYTHON` has to be set; see `worker_python`.
    """
    context = _context(spark)
    if context is not None:
        environment = sys.prefix if sys.prefix != sys.base_prefix else None
        context.pythonExec = worker_python(
            context.pythonExec, os.environ.get(_PYTHON), local=is_local(spark), environment=environment
        )
        # The JVM may be older than a variable of this process, and its Python workers have the environment of the JVM.
        context.environment.update(discovery_environment())
    if not is_local(spark):
        spark.sparkContext.addPyFile(str(package_zip()))
    spark.dataSource.register(JetStreamDataSource)


def worker_python(now: str, chosen: str | None, *, local: bool, environment: str | None) -> str:
    """Return the Python that workers must run, where a session would run `now`. Pure.

    Spark runs `PYSPARK_PYTHON` (`chosen`), and where that is not set the first `python3` on PATH: for a program in a
    virtual environment that is not activated, that is a Python without its packages. On this machine the Python of this
    process is right. Only the user knows which one is right for executors elsewhere.
    """
    if now != _DEFAULT_PYTHON:
        return now
    if chosen:
        return chosen
    if local:
        return sys.executable or now
    if environment is not None:
        raise InvalidConfig(
            f"this program runs in the virtual environment {environment}, and its executors run the first `python3` on "
            "their PATH, which may be another Python without the packages",
            fix="before you make the session, set PYSPARK_PYTHON to the path of the executors' Python, or to python3 "
            "if that is right",
        )
    return now


def is_local(spark: SparkSession) -> bool:
    """Return whether tasks need nothing sent: they run here, or the server of Spark Connect provides the package."""
    context = _context(spark)
    if context is None:
        return True
    master = str(context.master)
    return master.startswith("local") and not master.startswith("local-cluster")


def _context(spark: SparkSession) -> SparkContext | None:
    """Return the context of a session; None for one of Spark Connect."""
    try:
        return spark.sparkContext
    except Exception:  # noqa: BLE001 - what a session without a context raises has changed between versions
        return None


def package_zip() -> Path:
    """Write this package to a zip for executors that do not have it; they need numpy and pyarrow."""
    root = Path(purveyor.__file__).parent
    if root.parent.is_file():  # this process got the package as a zip
        return root.parent
    target = Path(tempfile.mkdtemp(prefix="purveyor-")) / "purveyor.zip"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(root.rglob("*.py")):
            archive.write(path, Path("purveyor") / path.relative_to(root))
    return target

"""The Spark engine of the pipeline, whose output goes to files and whose death is noticed, and sessions for commands.

The JVM and its Python workers inherit standard output and error when they start, so both are redirected for that
moment. Spark logs to `logs/pipeline.log`, the driver to `logs/pipeline-driver.log`; `logs/pipeline.out` has what
processes print when they start or die. A second process on the same data directory, such as a standby, logs to
`logs/pipeline-2.log` and so on.
"""

import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from itertools import count
from logging.handlers import RotatingFileHandler
from pathlib import Path

from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # Spark's bridge ships no types
from pyspark.errors import PySparkException
from pyspark.logger import PySparkLogger
from pyspark.sql import SparkSession

from purveyor.model.errors import PurveyorError, SetupError
from purveyor.model.file_lock import FileLock
from purveyor.pipeline.job_failures import explain
from purveyor.spark.pyspark_internals import jvm_process, silence_accumulator_server
from purveyor.spark.session import session

STOP_TIMEOUT_SECONDS = 10.0
_MAX_LOG_BYTES = 10 << 20
_PYTHONPATH = "PYTHONPATH"
_WORKER_STARTUP = Path(__file__).parent / "worker_startup"
_LOOPBACK = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}

_LOG4J_CONFIG = """\
rootLogger.level = warn
rootLogger.appenderRef.file.ref = file
appender.file.type = RollingFile
appender.file.name = file
appender.file.fileName = {log}
appender.file.filePattern = {log}.%i
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = %d{{yyyy-MM-dd'T'HH:mm:ss.SSSX}}{{UTC}} %p %c{{1}}: %m%n%ex
appender.file.policies.type = Policies
appender.file.policies.size.type = SizeBasedTriggeringPolicy
appender.file.policies.size.size = 10MB
appender.file.strategy.type = DefaultRolloverStrategy
appender.file.strategy.max = 5
# Purveyor restarts queries that end, and reports that.
logger.streaming.name = org.apache.spark.sql.execution.streaming
logger.streaming.level = error
"""


class EngineLost(PurveyorError):
    """The JVM is gone, and with it every query; only a new process brings them back."""


class Engine:
    """A running Spark."""

    def __init__(self, spark: SparkSession, scratch: Path, name_lock: FileLock) -> None:
        self.spark = spark
        self._name_lock = name_lock
        self.scratch = scratch
        """A directory that is removed with it."""
        self._process = jvm_process(spark)
        silence_accumulator_server(spark)

    def check(self) -> None:
        """Raise EngineLost if the JVM is gone."""
        if self._process is not None and self._process.poll() is not None:
            raise EngineLost(f"the Spark engine has ended (process {self._process.pid}, {self._process.returncode})")

    def stop(self) -> None:
        """Stop Spark. If it does not stop in time, it ends with this process."""
        ending = threading.Thread(target=self._stop, name="engine-stop", daemon=True)
        ending.start()
        ending.join(STOP_TIMEOUT_SECONDS)
        shutil.rmtree(self.scratch, ignore_errors=True)
        self._name_lock.release()

    def _stop(self) -> None:
        with contextlib.suppress(PySparkException, Py4JError, OSError):  # it was already stopping
            self.spark.stop()


def start_engine(master: str, data_dir: Path, *, ui: bool = False) -> Engine:
    """Start the session of the pipeline, with Spark's web pages if `ui` is set.

    SetupError says why Spark does not start.
    """
    logs = data_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    name_lock = _lock_name(logs)
    name = name_lock.path.stem
    scratch = _scratch_directory(data_dir / "spark" / name)
    _log_to_file(logs / f"{name}-driver.log")
    config = logs / f"{name}-log4j2.properties"
    config.write_text(_LOG4J_CONFIG.format(log=logs / f"{name}.log"), encoding="utf-8")
    options = {
        "spark.driver.defaultJavaOptions": (
            f"-Dlog4j2.configurationFile={config.absolute().as_uri()} -XX:+ExitOnOutOfMemoryError"
        ),
        # Else a stack overflow in a task ends the JVM. Only the task must fail: its batch is divided (`job_failures`).
        "spark.executor.killOnFatalError.depth": "0",
        "spark.driver.memory": "2g",
        "spark.local.dir": str(scratch),
        "spark.sql.warehouse.dir": str(scratch / "warehouse"),
        "spark.sql.streaming.stopTimeout": f"{int(STOP_TIMEOUT_SECONDS)}s",
        # Hadoop sets the mode of each file itself and ignores the umask of the process.
        "spark.hadoop.fs.permissions.umask-mode": "077",
        # The parts share the cores evenly: a prefill of millions must not delay the next batch of dispatch.
        "spark.scheduler.mode": "FAIR",
        "spark.ui.enabled": "true" if ui else "false",
    }
    if master.startswith("local"):
        options |= _LOOPBACK
    output = logs / f"{name}.out"
    if output.exists():
        output.replace(output.with_name(f"{output.name}.1"))
    try:
        with _redirect_output(output), _add_worker_startup(), _keep_sigint_handler():
            spark = session("purveyor-pipeline", master=master, options=options)
    except (PySparkException, Py4JError, OSError) as error:
        reason = explain(error).message
        name_lock.release()
        raise SetupError(f"Spark does not start on {master}: {reason}", fix=f"see {output}") from error
    return Engine(spark, scratch, name_lock)


def _lock_name(logs: Path) -> FileLock:
    """Lock the first free name of `pipeline`, `pipeline-2` and so on: two processes never use the same files."""
    for number in count(1):
        lock = FileLock(logs / ("pipeline.lock" if number == 1 else f"pipeline-{number}.lock"))
        if lock.try_lock():
            return lock
    raise AssertionError("the count has no end")


def _log_to_file(path: Path) -> None:
    """Write the warnings of Purveyor to a file and not to the terminal."""
    logger = logging.getLogger("purveyor")
    handler = RotatingFileHandler(path, maxBytes=_MAX_LOG_BYTES, backupCount=3, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handler.setLevel(logging.WARNING)
    logger.setLevel(min(logger.getEffectiveLevel(), logging.WARNING))
    logger.propagate = logger.isEnabledFor(logging.DEBUG)
    logger.addHandler(handler)


def _scratch_directory(directory: Path) -> Path:
    """Make an empty directory for shuffles: a process that died may have left one. This process has locked its name."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True, exist_ok=True)
    return directory.absolute()


@contextlib.contextmanager
def _add_worker_startup() -> Iterator[None]:
    """Let Python workers of a JVM that starts inside the block import our `sitecustomize`."""
    before = os.environ.get(_PYTHONPATH)
    os.environ[_PYTHONPATH] = os.pathsep.join(filter(None, (str(_WORKER_STARTUP), before)))
    try:
        yield
    finally:
        if before is None:
            del os.environ[_PYTHONPATH]
        else:
            os.environ[_PYTHONPATH] = before


@contextlib.contextmanager
def _keep_sigint_handler() -> Iterator[None]:
    """Restore the handler of Ctrl-C, which Spark replaces by one that cancels the jobs of every part."""
    handler_before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, handler_before)


@contextlib.contextmanager
def adhoc_session(master: str = "local[*]") -> Iterator[SparkSession]:
    """Give a CLI command a silent session: the one of this process, or a new one that leaves no files behind.

    SetupError says why Spark does not start.
    """
    PySparkLogger.getLogger("SQLQueryContextLogger").disabled = True  # it prints each failed query to standard error
    active = SparkSession.getActiveSession()
    if active is not None:
        yield active
        return
    with tempfile.TemporaryDirectory(prefix="purveyor-", ignore_cleanup_errors=True) as scratch:
        options = {
            "spark.ui.enabled": "false",
            "spark.driver.memory": "2g",
            "spark.local.dir": scratch,
            "spark.sql.warehouse.dir": f"{scratch}/warehouse",
        }
        if master.startswith("local"):
            options |= _LOOPBACK
        try:
            with _redirect_output(Path(os.devnull)):
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
def _redirect_output(path: Path) -> Iterator[None]:
    """Make processes that start inside the block print to a file as long as they live: the JVM and its workers."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(number) for number in (1, 2)]
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        for number in (1, 2):
            os.dup2(target, number)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, fd in zip((1, 2), kept, strict=True):
            os.dup2(fd, number)
            os.close(fd)
        os.close(target)

"""The Spark of the pipeline: one session whose noise goes to files, and whose death is noticed.

The JVM and its Python workers write to what was our standard output and error when it was started, so for that moment
both are a file. What Spark logs goes to `logs/pipeline.log`, what we log to `logs/pipeline-driver.log`; what processes
print as they start or die to `logs/pipeline.out`.
"""

import contextlib
import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from logging.handlers import RotatingFileHandler
from pathlib import Path

from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # Spark's bridge ships no types
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from purveyor.model.errors import PurveyorError, SetupError
from purveyor.pipeline.error_summary import explain
from purveyor.spark.session import session

STOP_SECONDS = 10.0
_LOG_BYTES = 10 << 20

_LOGGING = """\
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
# Queries that end are started again by us, and told by us.
logger.streaming.name = org.apache.spark.sql.execution.streaming
logger.streaming.level = error
"""


class EngineLost(PurveyorError):
    """The JVM is gone, and with it every query; only a new process brings them back."""


class Engine:
    """A running Spark."""

    def __init__(self, spark: SparkSession, scratch: Path) -> None:
        self.spark = spark
        self._process = getattr(spark.sparkContext._gateway, "proc", None)  # noqa: SLF001 - has no public name
        self._scratch = scratch
        # The server to which the JVM reports counters tells on standard error that the JVM died. We tell it ourselves.
        spark.sparkContext._accumulatorServer.handle_error = _quiet  # type: ignore[method-assign]  # noqa: SLF001

    def check(self) -> None:
        """EngineLost if its process is gone."""
        if self._process is not None and self._process.poll() is not None:
            raise EngineLost(f"the Spark engine has ended (process {self._process.pid}, {self._process.returncode})")

    def stop(self) -> None:
        """End it; one that does not end in time is left to end with us."""
        ending = threading.Thread(target=self._stop, name="engine-stop", daemon=True)
        ending.start()
        ending.join(STOP_SECONDS)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _stop(self) -> None:
        with contextlib.suppress(PySparkException, Py4JError, OSError):  # it was going down already
            self.spark.stop()


def _quiet(request: object, client_address: object) -> None:
    """Say nothing."""


def start_engine(master: str, data_dir: Path, *, ui: bool = False) -> Engine:
    """A session for the pipeline, with Spark's own web pages if wanted. SetupError says why there is none."""
    logs, scratch = data_dir / "logs", _scratch(data_dir / "spark")
    logs.mkdir(parents=True, exist_ok=True)
    _log_to(logs / "pipeline-driver.log")
    config = logs / "pipeline-log4j2.properties"
    config.write_text(_LOGGING.format(log=logs / "pipeline.log"), encoding="utf-8")
    options = {
        "spark.driver.defaultJavaOptions": (
            f"-Dlog4j2.configurationFile={config.absolute().as_uri()} -XX:+ExitOnOutOfMemoryError"
        ),
        # Else a stack that overflows in a task ends the JVM: the task is to fail, and its batch is divided (`faults`).
        "spark.executor.killOnFatalError.depth": "0",
        "spark.driver.memory": "2g",
        "spark.local.dir": str(scratch),
        "spark.sql.warehouse.dir": str(scratch / "warehouse"),
        "spark.sql.streaming.stopTimeout": f"{int(STOP_SECONDS)}s",
        # Hadoop sets the mode of each file itself, whatever the umask of the process is.
        "spark.hadoop.fs.permissions.umask-mode": "077",
        # The parts share the cores evenly: a prefill of millions must not hold up the next batch of dispatch.
        "spark.scheduler.mode": "FAIR",
        "spark.ui.enabled": "true" if ui else "false",
    }
    if master.startswith("local"):
        options |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    try:
        with _printing_to(logs / "pipeline.out"), _keeping_ctrl_c():
            spark = session("purveyor-pipeline", master=master, options=options)
    except (PySparkException, Py4JError, OSError) as error:
        reason = explain(error).message
        raise SetupError(f"Spark does not start on {master}: {reason}", fix=f"see {logs / 'pipeline.out'}") from error
    return Engine(spark, scratch)


def _log_to(path: Path) -> None:
    """Warnings of our own, and not on the terminal."""
    logger = logging.getLogger("purveyor")
    handler = RotatingFileHandler(path, maxBytes=_LOG_BYTES, backupCount=3, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handler.setLevel(logging.WARNING)
    logger.setLevel(min(logger.getEffectiveLevel(), logging.WARNING))
    logger.propagate = logger.isEnabledFor(logging.DEBUG)
    logger.addHandler(handler)


def _scratch(home: Path) -> Path:
    """A directory of this process for shuffles, which nobody needs after it; those of the dead are removed."""
    for left in home.glob("*") if home.is_dir() else ():
        if left.name.isdigit() and not Path(f"/proc/{left.name}").exists():
            shutil.rmtree(left, ignore_errors=True)
    mine = home / str(os.getpid())
    mine.mkdir(parents=True, exist_ok=True)
    return mine.absolute()


@contextlib.contextmanager
def _keeping_ctrl_c() -> Iterator[None]:
    """Spark puts a handler in the place of ours, which would cancel the jobs of every part."""
    ours = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, ours)


@contextlib.contextmanager
def _printing_to(path: Path) -> Iterator[None]:
    """Processes started inside print to this file; the one of the run before is kept beside it."""
    if path.exists():
        path.replace(path.with_name(f"{path.name}.1"))
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

"""Tells a Spark job that fails because of its data from one that fails because of an outage.

After an outage (a server, a disk, a worker process, the engine) the same batch succeeds: its query ends, is started
again and repeats the batch. A job that fails on its data fails each time: the batch is divided until the message is
found that it fails on (see `dispatch.isolation` and `archive.isolation`). A job that does not end is cancelled after a
long time, and counts as one that fails on its data.

Spark tells what happened in a task only as text: the trace of Python, or of Java with the causes.
"""

import errno
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pyarrow as pa
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]  # Spark's bridge ships no types
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import SparkSession

from purveyor.model.errors import InvalidConfig, InvalidInput, PurveyorError
from purveyor.pipeline.error_summary import explain, kind_of, python_kind
from purveyor.spark.map_in_arrow import map_in_arrow

LEAST_SECONDS: Final = 600.0
"""How long any batch may take. Four tries of a task that waits for a server for a minute are a part of that."""
_CANCEL_AGAIN_SECONDS: Final = 0.2
_GROUP: Final = "spark.jobGroup.id"
_JOB_FAILED: Final = (PySparkException, Py4JJavaError)
"""What a job that fails raises. If the engine itself is gone, that is another error."""
_CANCELLED: Final = "SPARK_JOB_CANCELLED"
_ENDED: Final = (_CANCELLED, "SparkContext was shut down", "stopped SparkContext", "InterruptedException")
"""What a job says that ends because its query is stopped."""
_LOST: Final = ("Python worker exited unexpectedly", "Python worker failed to connect", "ExecutorLostFailure")
"""What a job says whose worker process or executor was killed, by whomever."""
_OF_THE_DISK: Final = tuple(
    os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.EIO, errno.EROFS)
)
_OF_THE_MACHINE: Final = frozenset(
    {"OSError", "IOError", "ConnectionError", "ConnectionRefusedError", "ConnectionResetError", "BrokenPipeError"}
    | {"TimeoutError", "InterruptedError", "PermissionError", "FileNotFoundError"}
)
_OF_THE_MACHINE_IN_JAVA: Final = re.compile(
    r"java\.(?:io\.(?:IO|EOF|FileNotFound|InterruptedIO)Exception|net\.\w+Exception|nio\.(?:file|channels)\.\w+Exception)"
)
_OF_MEMORY: Final = re.compile(r"\bMemoryError\b|OutOfMemoryError|ArrowMemoryError|UNABLE_TO_ACQUIRE_MEMORY")


class TooLong(PurveyorError):
    """The jobs of a batch took longer than they may, and were cancelled."""


def data_fault(error: BaseException) -> str | None:
    """Why a job fails on its data, in one line; None if that is not the reason.

    An error of ours tells by its type: only input that is wrong lies in the data. Any other exception in a task is one
    that its code does not expect, unless it is about files, connections or processes, or the job was cancelled.
    """
    if isinstance(error, TooLong):
        return error.message
    if not isinstance(error, _JOB_FAILED):
        return None
    text = str(error)
    if any(words in text for words in (*_ENDED, *_LOST, *_OF_THE_DISK)) or _OF_THE_MACHINE_IN_JAVA.search(text):
        return None
    ours = kind_of(text)
    if ours is not None and (not issubclass(ours, InvalidInput) or issubclass(ours, InvalidConfig)):
        return None
    if ours is None and python_kind(text) in _OF_THE_MACHINE:
        return None
    return explain(error).message


def blames_data(spark: SparkSession, error: BaseException) -> bool:
    """Whether a job that fails on one message alone fails because of it, or because of who is to get it.

    Less data needs less memory, so a batch that memory does not suffice for is divided as well. A single message is
    never larger than a server takes: if memory does not suffice for that, other programs use it.
    """
    return not _OF_MEMORY.search(str(error)) and engine_works(spark)


def blames_message(spark: SparkSession, error: BaseException) -> bool:
    """Whether it fails because of the message. What no plan can be made for is the same for all messages."""
    return not isinstance(error, AnalysisException) and blames_data(spark, error)


def engine_works(spark: SparkSession) -> bool:
    """Whether a job that cannot fail on its data succeeds: a task in the JVM, and one in Python."""
    try:
        with time_limit(spark, LEAST_SECONDS):
            return map_in_arrow(spark.range(1), _unchanged, "id bigint").count() == 1
    except (*_JOB_FAILED, TooLong):
        return False


def _unchanged(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    return batches


@contextmanager
def time_limit(spark: SparkSession, seconds: float) -> Iterator[None]:
    """Cancel the jobs of this thread's job group when the block takes longer; TooLong is raised then.

    A streaming query has a job group of its own. A thread without one has no limit. A cancel that comes when the block
    has ended just now hits the next job of the query: that is an outage, and the batch is repeated.
    """
    context = spark.sparkContext
    group = context.getLocalProperty(_GROUP)
    if group is None:
        yield
        return
    over, done = threading.Event(), threading.Event()

    def cancel(group: str) -> None:
        if not done.wait(seconds):
            over.set()
            while not done.is_set():  # again and again: between two jobs there is none to cancel
                context.cancelJobGroup(group)
                done.wait(_CANCEL_AGAIN_SECONDS)

    threading.Thread(target=cancel, args=(group,), name="time-limit", daemon=True).start()
    try:
        yield
    except _JOB_FAILED as error:
        if over.is_set() and _CANCELLED in str(error):
            raise TooLong(f"it took more than {seconds:.0f} s") from error
        raise
    finally:
        done.set()

"""Why a Spark job failed, whether its data or an outage is the cause, and how the message at fault is parked.

Spark reports an error of a task only as text: it wraps what a source, a sink or a batch function raised into its own
exceptions, with the stack trace of Python, or of Java with the causes, as their message. The last line of that trace
names the error by its type; the type decides whether to try again (`explain`).

After an outage (of a server, a disk, a worker process, the JVM) the same batch succeeds: the supervisor restarts the
query, which repeats the batch. A job that fails on its data fails each time: `Isolation` of dispatch and
`RangeIsolation` of the archive divide the batch until they find the message that it fails on, and park that message. A
job that does not end is cancelled after a long time, and counts as one that fails on its data.
"""

import asyncio
import errno
import logging
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]  # Spark's bridge ships no types
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import SparkSession

from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk import ReadOptions, read_range
from purveyor.jetstream.headers import POSITION
from purveyor.model import metrics
from purveyor.model.errors import DataLost, InvalidConfig, InvalidInput, MigrationNeeded, PurveyorError, SetupError
from purveyor.model.event import SUBJECT
from purveyor.model.message_headers import PARKED_POSITION
from purveyor.queues.catalogue import DEAD_LETTERS
from purveyor.queues.client import connect
from purveyor.queues.dead_letters.letter import DeadLetter, park, subject_token
from purveyor.queues.dead_letters.store import RECEIPT_PREFIX
from purveyor.spark.pyspark_internals import map_in_arrow

_PERMANENT = (InvalidInput, MigrationNeeded, DataLost, SetupError)
_QUERY_DESCRIPTION = "\n=== Streaming Query ==="
_PURVEYOR_ERROR = re.compile(r"^(?:\w+\.)*?purveyor(?:\.\w+)*\.(?P<kind>[A-Z]\w*): (?P<message>.+)$", re.MULTILINE)
_PYTHON_ERROR = re.compile(r"^(?P<kind>(?:\w+\.)*[A-Z]\w*(?:Error|Exception)): (?P<message>.+)$", re.MULTILINE)
_TRACEBACK = "Traceback (most recent call last)"
_PY4J_PREFIX = re.compile(r"^An error occurred while calling \S+\n: ")
"""The text that Spark's bridge to Java puts before an error that it does not know."""
MIN_TIME_LIMIT_SECONDS: Final = 600.0
"""The least time limit of a batch. Four attempts of a task that waits a minute for a server fit into it."""
_CANCEL_INTERVAL_SECONDS: Final = 0.2
_JOB_GROUP_PROPERTY: Final = "spark.jobGroup.id"
_JOB_ERRORS: Final = (PySparkException, Py4JJavaError)
"""The errors of a failed job. A dead JVM raises another error."""
_CANCELLED: Final = "SPARK_JOB_CANCELLED"
_STOPPED_TEXTS: Final = (_CANCELLED, "SparkContext was shut down", "stopped SparkContext", "InterruptedException")
"""Texts of jobs that end because their query is stopped."""
_LOST_WORKER_TEXTS: Final = (
    "Python worker exited unexpectedly",
    "Python worker failed to connect",
    "ExecutorLostFailure",
)
"""Texts of jobs whose worker process or executor was killed."""
_DISK_ERROR_TEXTS: Final = tuple(
    os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.EIO, errno.EROFS)
)
_OUTAGE_ERRORS: Final = frozenset(
    {"OSError", "IOError", "ConnectionError", "ConnectionRefusedError", "ConnectionResetError", "BrokenPipeError"}
    | {"TimeoutError", "InterruptedError", "PermissionError", "FileNotFoundError"}
)
_JAVA_OUTAGE_ERROR: Final = re.compile(
    r"java\.(?:io\.(?:IO|EOF|FileNotFound|InterruptedIO)Exception|net\.\w+Exception|nio\.(?:file|channels)\.\w+Exception)"
)
_MEMORY_ERROR: Final = re.compile(r"\bMemoryError\b|OutOfMemoryError|ArrowMemoryError|UNABLE_TO_ACQUIRE_MEMORY")
PARKED_ORIGIN: Final = SUBJECT
_LAST_SEQUENCE: Final = 2**62
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a job failed, and whether another attempt can succeed."""

    message: str
    permanent: bool = False
    fix: str | None = None

    def __str__(self) -> str:
        return f"{self.message} ({self.fix})" if self.fix else self.message


def explain(error: BaseException) -> Failure:
    """Find the failure behind an error, through all wrappers."""
    if isinstance(error, PurveyorError):
        return Failure(_first_line(error.message), _is_permanent(type(error)), error.fix)
    text = _PY4J_PREFIX.sub("", str(error).partition(_QUERY_DESCRIPTION)[0].strip())
    ours = list(_PURVEYOR_ERROR.finditer(text))
    if ours:
        return Failure(_first_line(ours[-1]["message"]), _is_permanent(_error_type(ours[-1]["kind"])))
    python = list(_PYTHON_ERROR.finditer(text)) if _TRACEBACK in text else []
    if python:
        return Failure(_first_line(f"{python[-1]['kind'].rpartition('.')[2]}: {python[-1]['message']}"))
    return Failure(_first_line(text) or type(error).__name__)


def error_type_in(text: str) -> type[PurveyorError] | None:
    """Return the type of the Purveyor error that a text of Spark names; None if it names none."""
    ours = list(_PURVEYOR_ERROR.finditer(text))
    return _error_type(ours[-1]["kind"]) if ours else None


def python_error_in(text: str) -> str | None:
    """Return the name of the Python exception that a text of Spark names, without its module."""
    python = list(_PYTHON_ERROR.finditer(text)) if _TRACEBACK in text else []
    return str(python[-1]["kind"].rpartition(".")[2]) if python else None


def _is_permanent(kind: type[PurveyorError]) -> bool:
    """Return whether every further attempt must fail. Lost data stays lost, but an outdated plan is made again."""
    return issubclass(kind, _PERMANENT) and not kind.retryable


def _first_line(text: str) -> str:
    stripped = text.strip()
    return stripped.splitlines()[0].strip() if stripped else ""


def _error_type(name: str) -> type[PurveyorError]:
    """Return the error class of that name; `PurveyorError` if this process does not know the name."""
    waiting: list[type[PurveyorError]] = [PurveyorError]
    while waiting:
        kind = waiting.pop()
        if kind.__name__ == name:
            return kind
        waiting.extend(kind.__subclasses__())
    return PurveyorError


class TimeLimitExceeded(PurveyorError):
    """The jobs of a batch exceeded their time limit and were cancelled."""


def data_fault(error: BaseException) -> str | None:
    """Return why a job fails on its data, in one line; None if its data is not the reason.

    A Purveyor error decides by its type: only invalid input lies in the data. Any other exception in a task is one that
    its code does not expect, unless it is about files, connections or processes, or the job was cancelled.
    """
    if isinstance(error, TimeLimitExceeded):
        return error.message
    if not isinstance(error, _JOB_ERRORS):
        return None
    text = str(error)
    if any(
        words in text for words in (*_STOPPED_TEXTS, *_LOST_WORKER_TEXTS, *_DISK_ERROR_TEXTS)
    ) or _JAVA_OUTAGE_ERROR.search(text):
        return None
    ours = error_type_in(text)
    if ours is not None and (not issubclass(ours, InvalidInput) or issubclass(ours, InvalidConfig)):
        return None
    if ours is None and python_error_in(text) in _OUTAGE_ERRORS:
        return None
    return explain(error).message


def is_data_at_fault(spark: SparkSession, error: BaseException) -> bool:
    """Return whether a job that fails on one message fails because of it, or because of a subscription that gets it.

    Less data needs less memory, so a batch that runs out of memory is divided as well. A single message is never larger
    than the server allows: if memory does not suffice for that, other programs use it.
    """
    return not _MEMORY_ERROR.search(str(error)) and is_engine_working(spark)


def is_message_at_fault(spark: SparkSession, error: BaseException) -> bool:
    """Return whether a job fails because of the message.

    If Spark cannot plan the job, the message is not the reason.
    """
    return not isinstance(error, AnalysisException) and is_data_at_fault(spark, error)


def is_engine_working(spark: SparkSession) -> bool:
    """Return whether a job that cannot fail on its data succeeds: a task in the JVM, and one in Python."""
    try:
        with time_limit(spark, MIN_TIME_LIMIT_SECONDS):
            return map_in_arrow(spark.range(1), _unchanged, "id bigint").count() == 1
    except (*_JOB_ERRORS, TimeLimitExceeded):
        return False


def _unchanged(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    return batches


@contextmanager
def time_limit(spark: SparkSession, seconds: float) -> Iterator[None]:
    """Cancel the jobs of this thread's job group when the block takes longer, and raise TimeLimitExceeded.

    A streaming query has its own job group. A thread without one has no limit. A cancel at the moment when the block
    ends hits the next job of the query: that counts as an outage, and the batch is repeated.
    """
    context = spark.sparkContext
    group = context.getLocalProperty(_JOB_GROUP_PROPERTY)
    if group is None:
        yield
        return
    over, done = threading.Event(), threading.Event()

    def cancel(group: str) -> None:
        if not done.wait(seconds):
            over.set()
            while not done.is_set():  # repeatedly: between two jobs there is none to cancel
                context.cancelJobGroup(group)
                done.wait(_CANCEL_INTERVAL_SECONDS)

    threading.Thread(target=cancel, args=(group,), name="time-limit", daemon=True).start()
    try:
        yield
    except _JOB_ERRORS as error:
        if over.is_set() and _CANCELLED in str(error):
            raise TimeLimitExceeded(f"it took more than {seconds:.0f} s") from error
        raise
    finally:
        done.set()


def park_once(address: Address, message: Mapping[str, Any], reason: str) -> bool:
    """Park a message (position, subject, headers, data) once per position; return False if it was parked before.

    These letters are not written in the order of positions: a catch-up job can be ahead of the dispatcher, and a gap
    lies behind it. The dispatcher parks invalid messages on the same subject, and goes by the newest position there. So
    these letters carry their position in another header, and this function looks for it in all letters.

    A letter that was redriven or discarded since counts too. Two processes that park the same position at the same time
    write the same message id, so the server keeps one letter.
    """
    position = int(message["position"])
    if is_parked(address, position):
        _log.info("a dead letter about position %d is there already", position)
        return False
    now = datetime.now(UTC)
    letter = DeadLetter(
        reason=reason,
        origin=PARKED_ORIGIN,
        subject=message["subject"],
        data=message["data"],
        failed_first=now,
        failed_last=now,
        headers={name: tuple(values) for name, values in message["headers"] or ()},
        position=position,
        out_of_order=True,
    )
    asyncio.run(_park_letter(address, letter))
    metrics.DEAD_LETTERS.add(PARKED_ORIGIN)
    _log.error("the message at position %d is parked as a dead letter: %s", position, reason)
    return True


def is_parked(address: Address, position: int) -> bool:
    """Return whether there is a letter about a position of `incoming`, or the receipt of one."""
    word, wanted = subject_token(PARKED_ORIGIN), str(position)
    options = ReadOptions(subjects=(f"dead-letters.{word}", f"{RECEIPT_PREFIX}.{word}.*"), columns=("headers",))
    for batch in read_range(address, DEAD_LETTERS.stream, 1, _LAST_SEQUENCE, options):
        headers = batch.column("headers")
        for name in (PARKED_POSITION, POSITION):
            found = pc.map_lookup(headers, pa.scalar(name), "first").drop_null().to_pylist()
            if any(values[:1] == [wanted] for values in found):
                return True
    return False


async def _park_letter(address: Address, letter: DeadLetter) -> None:
    async with connect(address, name="purveyor-pipeline") as queues:
        await park(queues, letter)

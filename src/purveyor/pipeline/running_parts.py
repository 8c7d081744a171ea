"""What a keeper watches: a streaming query of Spark, or a worker in a thread of this process."""

import contextlib
import json
import threading
import time
from collections.abc import Callable
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql.streaming.query import StreamingQuery

from purveyor.pipeline.part_status import Reading
from purveyor.spark.progress import progress_of

_BUSY = "Processing new data"
_LOOK_SECONDS = 0.02


def is_active(query: StreamingQuery) -> bool:
    """Whether a query still runs; False also when the engine is gone."""
    try:
        return bool(query.isActive)
    except Exception:  # noqa: BLE001 - how it is told that the engine is gone depends on where it broke
        return False


class QueryRun:
    """A streaming query that was started."""

    def __init__(self, query: StreamingQuery) -> None:
        self._query = query

    def alive(self) -> bool:
        """Whether it still takes in batches."""
        return bool(self._query.isActive)

    def failure(self) -> BaseException | None:
        """What ended it."""
        return self._query.exception()

    def read(self) -> Reading | None:
        """Its last progress report."""
        report: Any = self._query.lastProgress
        if report is None:
            return None
        told = json.loads(report.json) if hasattr(report, "json") else report
        source = next(iter(progress_of(self._query)), None)
        batch_ms = int(told.get("batchDuration") or told["durationMs"].get("triggerExecution", 0))
        rows, rate = int(told["numInputRows"]), float(told.get("processedRowsPerSecond") or 0.0)
        if source is not None and source.taken is not None:  # a row of Spark may be many messages
            rows, rate = source.taken, source.taken * 1000 / batch_ms if batch_ms else 0.0
        return Reading(
            position=source.sequence if source else None,
            lag=source.lag if source else None,
            rows=rows,
            rows_per_second=rate,
            batch=int(told["batchId"]),
            batch_ms=batch_ms,
        )

    def stop(self, patience_seconds: float) -> None:
        """Stop between two batches if one comes to its end in time. In the middle of one it would be run again."""
        deadline = time.monotonic() + patience_seconds
        with contextlib.suppress(PySparkException):  # it ended by itself, or does not end: its process does soon
            begun = self._batch()
            while self._query.isActive and self._busy() and self._batch() == begun and time.monotonic() < deadline:
                time.sleep(_LOOK_SECONDS)
            self._query.stop()

    def _busy(self) -> bool:
        return bool(self._query.status["message"] == _BUSY)

    def _batch(self) -> int:
        report: Any = self._query.lastProgress
        return -1 if report is None else int(report["batchId"])


class ThreadRun:
    """A worker: a function that works until the event it is given is set, and raises when it cannot.

    `count` tells how much it has done.
    """

    def __init__(
        self, name: str, work: Callable[[threading.Event], None], count: Callable[[], int] = lambda: 0
    ) -> None:
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._work = work
        self._count = count
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def alive(self) -> bool:
        """Whether it still works."""
        return self._thread.is_alive()

    def failure(self) -> BaseException | None:
        """What it raised."""
        return self._error

    def read(self) -> Reading | None:
        """A worker has no position."""
        return Reading(rows=self._count())

    def stop(self, patience_seconds: float) -> None:
        """Ask it to end, and wait for that."""
        self._stopping.set()
        self._thread.join(patience_seconds)

    def _run(self) -> None:
        try:
            self._work(self._stopping)
        except Exception as error:  # noqa: BLE001 - handed to the keeper
            self._error = error

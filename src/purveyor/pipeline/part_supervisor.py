"""Keeps one part of the pipeline running: starts it, watches it, reports why it ended, and starts it again.

A part is a name and a function that starts a streaming query or a worker thread. The supervisor restarts a part that
failed after a pause that grows, without limit, because a server, a worker or an executor that is away comes back. Only
an error that no attempt can cure ends a part.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Protocol

from pyspark.errors import PySparkException
from pyspark.sql.streaming.query import StreamingQuery

from purveyor.model.retries import GiveUp, RestartPolicy, Restarts, RunEnd
from purveyor.pipeline.job_failures import Failure, explain
from purveyor.pipeline.part_status import PartProgress, PartStatus, State
from purveyor.spark.progress import progress_of

RESTART_POLICY = RestartPolicy(max_deaths=None, first_pause_seconds=1.0, max_pause_seconds=30.0)
_POLL_SECONDS = 0.2
UNRESPONSIVE_SECONDS = 30.0
"""A part that does not answer for this time is unresponsive. A pause of the JVM is shorter."""
_UNRESPONSIVE = Failure(
    "Spark does not answer",
    fix="find out whether its JVM is suspended (kill -CONT) or short of memory; else restart the pipeline",
)
_ENDED = Failure("it ended without an error")
Listener = Callable[[PartStatus], None]
_BUSY = "Processing new data"
_POLL_BATCH_SECONDS = 0.02


class RunningPart(Protocol):
    """A part that was started."""

    def is_alive(self) -> bool:
        """Return whether it still works."""

    def failure(self) -> BaseException | None:
        """Return the error that ended it."""

    def read(self) -> PartProgress | None:
        """Return its progress; None before its first step."""

    def stop(self, patience_seconds: float) -> None:
        """Stop it after its current step, or in the middle of that when `patience_seconds` are over."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part to supervise."""

    name: str
    start: Callable[[], RunningPart]


class PartSupervisor:
    """Supervises one part in a thread.

    A start may wait long for a server, and the other parts must not wait with it.
    """

    def __init__(
        self, part: Part, *, restart_policy: RestartPolicy = RESTART_POLICY, on_change: Listener | None = None
    ) -> None:
        self._part = part
        self._restart_policy = restart_policy
        self._on_change = on_change or (lambda _: None)
        self._status = PartStatus(name=part.name, state=State.STARTING, since=datetime.now(UTC))
        self._answered: tuple[float, datetime] | None = None
        """When the running part answered last, by both clocks; None while none runs."""
        self._stopping = threading.Event()
        self._patience_seconds = 0.0
        self._thread = threading.Thread(target=self._supervise, name=f"supervises-{part.name}", daemon=True)

    @property
    def status(self) -> PartStatus:
        """The status of the part. It is unresponsive if it has not answered for a while."""
        status, answered = self._status, self._answered
        if status.state is not State.RUNNING or answered is None:
            return status
        monotonic, since = answered
        if time.monotonic() - monotonic < UNRESPONSIVE_SECONDS:
            return status
        return replace(status, state=State.UNRESPONSIVE, since=since, error=_UNRESPONSIVE)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, patience_seconds: float = 10.0) -> None:
        """Ask the part to end; `join` waits for it."""
        self._patience_seconds = patience_seconds
        self._stopping.set()

    def join(self, timeout_seconds: float) -> bool:
        """Return whether the part has ended within that time."""
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _supervise(self) -> None:
        restarts = Restarts(self._restart_policy)
        while not self._stopping.is_set():
            began = time.monotonic()
            self._set_state(State.STARTING)
            failure = self._run_once()
            if failure is None:
                break
            now = time.monotonic()
            decision = restarts.decide(RunEnd(ran_seconds=now - began, is_permanent=failure.permanent), now)
            if isinstance(decision, GiveUp):
                self._set_state(State.FAILED, error=failure)
                return
            self._set_state(State.WAITING, error=failure, restarts=self._status.restarts + 1)
            self._stopping.wait(decision.pause_seconds)
        self._set_state(State.STOPPED)

    def _run_once(self) -> Failure | None:
        """Run the part until it ends; return None if the supervisor stopped it."""
        try:
            running = self._part.start()
        except Exception as error:  # noqa: BLE001 - the supervisor reports any error and tries again
            return explain(error)
        try:
            return self._watch(running)
        except Exception as error:  # noqa: BLE001 - as above
            return explain(error)
        finally:
            self._answered = None

    def _watch(self, running: RunningPart) -> Failure | None:
        well_after = time.monotonic() + self._restart_policy.window_seconds
        while running.is_alive():
            if self._stopping.wait(_POLL_SECONDS):
                running.stop(self._patience_seconds)
                return None
            progress = running.read()
            self._answered = time.monotonic(), datetime.now(UTC)
            if progress is not None:
                error = None if time.monotonic() >= well_after else self._status.error
                self._set_state(State.RUNNING, progress=progress, error=error)
        error_found = running.failure()
        if self._stopping.is_set():
            return None
        return explain(error_found) if error_found is not None else _ENDED

    def _set_state(
        self,
        state: State,
        *,
        progress: PartProgress | None = None,
        error: Failure | None = None,
        restarts: int | None = None,
    ) -> None:
        before = self._status
        kept = error if error is not None or state is State.RUNNING else before.error
        now, reached = datetime.now(UTC), progress or before.progress
        is_moved = reached.steps != before.progress.steps
        status = replace(
            before,
            state=state,
            since=before.since if state is before.state else now,
            progress=reached,
            error=kept,
            restarts=before.restarts if restarts is None else restarts,
            moved_at=now if is_moved else before.moved_at,
        )
        if status != before:
            self._status = status
            self._on_change(status)


class QueryRun:
    """A streaming query that was started."""

    def __init__(self, query: StreamingQuery) -> None:
        self._query = query

    def is_alive(self) -> bool:
        """Return whether the query is active."""
        return bool(self._query.isActive)

    def failure(self) -> BaseException | None:
        """Return the error that ended the query."""
        return self._query.exception()

    def read(self) -> PartProgress | None:
        """Return the progress of its last report."""
        report: Any = self._query.lastProgress
        if report is None:
            return None
        values = json.loads(report.json) if hasattr(report, "json") else report
        source = next(iter(progress_of(self._query)), None)
        batch_ms = int(values.get("batchDuration") or values["durationMs"].get("triggerExecution", 0))
        rows, rate = int(values["numInputRows"]), float(values.get("processedRowsPerSecond") or 0.0)
        if source is not None and source.taken is not None:  # a row of Spark may hold many messages
            rows, rate = source.taken, source.taken * 1000 / batch_ms if batch_ms else 0.0
        return PartProgress(
            position=source.sequence if source else None,
            lag=source.lag if source else None,
            rows=rows,
            rows_per_second=rate,
            batch=int(values["batchId"]),
            batch_ms=batch_ms,
        )

    def stop(self, patience_seconds: float) -> None:
        """Stop between two batches if the current one ends in time. Spark repeats a batch that is interrupted."""
        deadline = time.monotonic() + patience_seconds
        with contextlib.suppress(PySparkException):  # it has ended already, or does not end: its process ends soon
            begun = self._batch()
            while self._query.isActive and self._busy() and self._batch() == begun and time.monotonic() < deadline:
                time.sleep(_POLL_BATCH_SECONDS)
            self._query.stop()

    def _busy(self) -> bool:
        return bool(self._query.status["message"] == _BUSY)

    def _batch(self) -> int:
        report: Any = self._query.lastProgress
        return -1 if report is None else int(report["batchId"])


class ThreadRun:
    """A worker thread: runs a function until its event is set; the function raises when it cannot go on.

    `count` returns how much the worker has done.
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

    def is_alive(self) -> bool:
        """Return whether the thread runs."""
        return self._thread.is_alive()

    def failure(self) -> BaseException | None:
        """Return the error that the function raised."""
        return self._error

    def read(self) -> PartProgress | None:
        """Return how much the worker did. It has no position."""
        return PartProgress(rows=self._count())

    def stop(self, patience_seconds: float) -> None:
        """Ask the worker to end, and wait for that."""
        self._stopping.set()
        self._thread.join(patience_seconds)

    def _run(self) -> None:
        try:
            self._work(self._stopping)
        except Exception as error:  # noqa: BLE001 - the supervisor reads it
            self._error = error

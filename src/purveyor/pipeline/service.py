"""The pipeline as one program: keeps transform, dispatch, archive and prefill running in one Spark application.

The order of a start: the locks on the checkpoints, the queues (the service waits for the server if it is away), Spark,
and then each part with its supervisor, dispatch first. Parts that have nothing to do then are warmed up (`warm_up`), so
that the first event after `ready` is as quick as later ones; a part that has run a batch is warm already.

A process that finds the locks taken is a standby. It starts Spark and warms it up first, with no effect on queues,
checkpoints or archive. Then it waits for the locks: it gets them at the moment when the active process ends, and has
nothing left to load.

A crash at any point leaves nothing to clean up: locks end with their process, ensuring the queues again changes
nothing, and parts continue from their checkpoints.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Protocol

from pyspark.sql import SparkSession

from purveyor.model.errors import PurveyorError, StoreInUse, Unavailable
from purveyor.pipeline.checkpoints import CheckpointLocks, EngineLocks
from purveyor.pipeline.engine import start_engine
from purveyor.pipeline.migration_monitor import MigrationMonitor
from purveyor.pipeline.part_starts import ensure_queues
from purveyor.pipeline.part_status import (
    PartStatus,
    State,
    StatusPublisher,
    remove_status,
    standby_key,
    status_key,
    status_path,
    write_status,
)
from purveyor.pipeline.part_supervisor import Part, PartSupervisor
from purveyor.pipeline.pipeline_settings import PartName, PipelineSettings
from purveyor.pipeline.warm_up import warm_up

_log = logging.getLogger(__name__)
_POLL_SECONDS = 0.1
_STATUS_INTERVAL_SECONDS = 1.0
_STOP_TIMEOUT_SECONDS = 10.0
_RETRY_SECONDS = 1.0
_HEAD_START_SECONDS = 5.0
"""How long the other parts wait at most for the first batch of dispatch."""
WARMING: Final = "warming"
STANDBY: Final = "standby"
"""The states of a standby on the status board: it starts, and it can take over."""


class Reporter(Protocol):
    """Receives what happens in the pipeline. The service calls it from one thread."""

    def report_step(self, event: str, text: str) -> None:
        """Report a step of the service: warming, standby, waiting, starting, ready, stopping, stopped."""

    def report_parts(self, parts: Sequence[PartStatus]) -> None:
        """Report the status of the parts, several times a second."""


class RunnableEngine(Protocol):
    """A Spark engine."""

    @property
    def spark(self) -> SparkSession:
        """Its session."""

    @property
    def scratch(self) -> Path:
        """A directory that is removed with it."""

    def check(self) -> None:
        """Raise EngineLost if the JVM is gone."""

    def stop(self) -> None:
        """Stop Spark."""


MakeParts = Callable[[PipelineSettings, SparkSession], Sequence[Part]]
StartEngine = Callable[[str, Path], RunnableEngine]
WarmUp = Callable[[SparkSession, Sequence[PartName], Path, Callable[[], bool]], bool]


class StagedStart:
    """Starts the parts: dispatch first, and the others when it runs, or after some seconds.

    The first batches of all queries need much processor time. Dispatch delivers events, so it gets that time first.
    """

    def __init__(self, supervisors: Sequence[PartSupervisor]) -> None:
        self.supervisors = supervisors
        first = [each for each in supervisors if each.status.name == PartName.DISPATCH.value]
        self.started: list[PartSupervisor] = []
        self._waiting = [each for each in supervisors if each not in first]
        self._until = time.monotonic() + _HEAD_START_SECONDS
        self._start(first or self._waiting)

    def go_on(self) -> None:
        """Start the others if it is time."""
        is_starting = any(each.status.state is State.STARTING for each in self.started)
        if len(self.started) < len(self.supervisors) and (not is_starting or time.monotonic() >= self._until):
            self._start(self._waiting)

    def _start(self, chosen: Sequence[PartSupervisor]) -> None:
        for supervisor in chosen:
            supervisor.start()
            self.started.append(supervisor)


class PipelineService:
    """The pipeline, from its start to its stop."""

    def __init__(
        self,
        settings: PipelineSettings,
        make_parts: MakeParts,
        reporter: Reporter,
        *,
        start_engine: StartEngine = start_engine,
        warm_up: WarmUp = warm_up,
    ) -> None:
        self._settings = settings
        self._make_parts = make_parts
        self._reporter = reporter
        self._start_engine = start_engine
        self._warm_up = warm_up
        self._migrations = MigrationMonitor(lambda listener: ensure_queues(settings, listener), reporter.report_step)
        self._status_publisher = self._make_publisher(status_key(settings.label))
        self._is_warm = not settings.warm_up
        self._spark_ui: str | None = None
        self._status_at = 0.0
        self._written: list[PartStatus] | None = None

    def _make_publisher(self, key: str) -> StatusPublisher:
        return StatusPublisher(self._settings.find_address, key, replicas=self._settings.replicas)

    def run(self, stop: threading.Event) -> None:
        """Run until `stop` is set. Raise what ends it: a part that cannot work, StoreInUse, EngineLost."""
        with CheckpointLocks(self._settings.data_dir / "checkpoints", self._settings.locked_checkpoints) as locks:
            refused = locks.take()
            if refused is None:
                self._start(stop)
            elif self._settings.wait:
                self._stand_by(refused, locks, stop)
            else:
                raise refused

    def _start(self, stop: threading.Event) -> None:
        """Ensure the queues, start Spark, and run the parts."""
        if not self._wait_for_queues(stop):
            return
        self._reporter.report_step("starting", f"Spark on {self._settings.master}")
        engine = self._start_engine(self._settings.master, self._settings.data_dir)
        try:
            self._run_on(engine, stop)
        finally:
            engine.stop()

    def _stand_by(self, owner: StoreInUse, locks: CheckpointLocks, stop: threading.Event) -> None:
        """Start and warm up Spark, wait for the locks, and run the parts."""
        self._reporter.report_step(WARMING, f"a standby: {owner.message}; Spark on {self._settings.master}")
        engine = self._start_engine(self._settings.master, self._settings.data_dir)
        state, is_active = WARMING, False
        try:
            with self._make_publisher(standby_key(self._settings.label)) as publisher:

                def should_continue() -> bool:
                    engine.check()
                    names = [part.value for part in self._settings.parts]
                    publisher.publish({"group": self._settings.group, "state": state, "stands_by_for": names}, ())
                    return not stop.is_set()

                def should_warm() -> bool:
                    nonlocal is_active
                    is_active = is_active or locks.take() is None  # it may end before this one is warm
                    return should_continue() and not is_active

                def report_standby(owner: StoreInUse) -> None:
                    self._reporter.report_step(STANDBY, f"{owner.message}; waiting to take over")

                if should_warm():
                    self._is_warm |= self._warm_up(engine.spark, self._settings.parts, engine.scratch, should_warm)
                if not is_active:
                    state = STANDBY
                    is_active = locks.wait(should_continue, report_standby)
                publisher.end()
                engine.check()
                if is_active and self._wait_for_queues(stop):
                    self._run_on(engine, stop)
        finally:
            engine.stop()

    def _wait_for_queues(self, stop: threading.Event) -> bool:
        """Ensure all queues, however long the server is away. Return False if `stop` is set before."""
        reported = False
        while not stop.is_set():
            try:
                self._migrations.ensure()
            except Unavailable as error:
                if not reported:
                    self._reporter.report_step("waiting", f"for the NATS server: {error.message}")
                    reported = True
                stop.wait(_RETRY_SECONDS)
            else:
                return True
        return False

    def _run_on(self, engine: RunnableEngine, stop: threading.Event) -> None:
        directory = self._settings.data_dir / "checkpoints"
        engines = EngineLocks(engine.spark, directory, self._settings.locked_checkpoints)
        if not engines.wait(
            lambda: not stop.is_set(),
            lambda name: self._reporter.report_step("waiting", f"for an earlier engine to release {name}"),
        ):
            return
        self._spark_ui = engine.spark.sparkContext.uiWebUrl
        supervisors = [PartSupervisor(part) for part in self._make_parts(self._settings, engine.spark)]
        starts = StagedStart(supervisors)
        try:
            with self._status_publisher:
                self._watch(engine, starts, stop)
        finally:
            self._reporter.report_step("stopping", "after the batches that are under way")
            for supervisor in starts.started:
                supervisor.stop(_STOP_TIMEOUT_SECONDS)
            deadline = time.monotonic() + 2 * _STOP_TIMEOUT_SECONDS
            for supervisor in starts.started:
                supervisor.join(max(deadline - time.monotonic(), 0.0))
            remove_status(self._status_path)

    def _watch(self, engine: RunnableEngine, starts: StagedStart, stop: threading.Event) -> None:
        ready, warming = False, None
        while not stop.wait(_POLL_SECONDS):
            engine.check()
            self._migrations.poll()
            starts.go_on()
            parts = [supervisor.status for supervisor in starts.supervisors]
            self._write_status_if_due(parts)
            self._reporter.report_parts(parts)
            for part in parts:
                if part.state is State.FAILED and part.error is not None:
                    raise PartFailed(f"{part.name} cannot work: {part.error.message}", fix=part.error.fix)
            if not ready and all(part.state is State.RUNNING for part in parts):
                warming = warming or self._begin_warm_up(engine, parts, stop)
                if not warming.is_alive():
                    ready = True
                    self._reporter.report_step("ready", ", ".join(part.name for part in parts))

    def _begin_warm_up(
        self, engine: RunnableEngine, parts: Sequence[PartStatus], stop: threading.Event
    ) -> threading.Thread:
        """Warm up the parts that run and have had nothing to do, in a thread: the others go on meanwhile."""
        idle = {part.name for part in parts if not part.progress.rows}
        cold = [part for part in self._settings.parts if part.value in idle and not self._is_warm]

        def run() -> None:
            if cold:
                self._warm_up(engine.spark, cold, engine.scratch, lambda: not stop.is_set())

        thread = threading.Thread(target=run, name="warm-up", daemon=True)
        thread.start()
        return thread

    def _write_status_if_due(self, parts: list[PartStatus]) -> None:
        if parts != self._written or time.monotonic() >= self._status_at + _STATUS_INTERVAL_SECONDS:
            about = {"group": self._settings.group, "at": datetime.now(UTC).isoformat(timespec="milliseconds")}
            try:
                write_status(self._status_path, about, parts)
            except OSError as error:  # a full disk must not end the pipeline, which continues when there is room
                _log.warning("the status file %s cannot be written: %s", self._status_path, error)
            self._status_publisher.publish({**about, "spark_ui": self._spark_ui}, parts)
            self._status_at, self._written = time.monotonic(), parts

    @property
    def _status_path(self) -> Path:
        return status_path(self._settings.data_dir, self._settings.label)


class PartFailed(PurveyorError):
    """A part cannot work with its settings; the service has stopped the others too."""

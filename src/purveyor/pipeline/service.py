"""The pipeline as one program: keeps transform, dispatch, archive and prefill running in one Spark application.

The order of a start: the locks on the checkpoints (a second process waits here), the queues (the service waits for the
server if it is away), Spark, and then each part with its supervisor. A crash at any point leaves nothing to clean up:
locks end with their process, ensuring the queues again changes nothing, and parts continue from their checkpoints.

`make_parts` builds the parts: which settings each gets, and how it starts. Every start, also the one after a failure,
looks up the address of the server and ensures the queues again.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Protocol

from pyspark.sql import SparkSession

from purveyor.jetstream.address import Address
from purveyor.model.errors import InvalidConfig, PurveyorError, StoreInUse, Unavailable
from purveyor.pipeline.archive.reader import ArchiveSource
from purveyor.pipeline.archive.writer import ArchiveSettings, start_archive
from purveyor.pipeline.checkpoints import CheckpointLocks, EngineLocks
from purveyor.pipeline.dispatch import DispatchSettings, start_dispatch
from purveyor.pipeline.engine import start_engine
from purveyor.pipeline.migration_monitor import MigrationMonitor
from purveyor.pipeline.part_status import (
    PartStatus,
    State,
    StatusPublisher,
    remove_status,
    status_path,
    write_status,
)
from purveyor.pipeline.part_supervisor import Part, PartSupervisor, QueryRun, RunningPart, ThreadRun
from purveyor.pipeline.prefill.worker import PrefillWorker, WorkerOptions
from purveyor.pipeline.transform.mapping_file import DEFAULT_MAPPING, load_mapping
from purveyor.pipeline.transform.transform_query import TransformSettings, start_transform
from purveyor.queues.catalogue import DEFAULT_GROUP, internal_queues
from purveyor.queues.client import connect
from purveyor.queues.migration.events import EventListener, MigrationOptions, log_event
from purveyor.queues.migration.record import QueueStatus
from purveyor.queues.registry import Registry

_log = logging.getLogger(__name__)
_POLL_SECONDS = 0.1
_STATUS_INTERVAL_SECONDS = 1.0
_STOP_TIMEOUT_SECONDS = 10.0
_CONNECT_TIMEOUT_SECONDS = 2.0


class PartName(Enum):
    """The names of the parts."""

    TRANSFORM = "transform"
    DISPATCH = "dispatch"
    ARCHIVE = "archive"
    PREFILL = "prefill"


ALL_PARTS = tuple(PartName)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSettings:
    """Which parts run, and on what."""

    data_dir: Path
    find_address: Callable[[], Address] = field(repr=False)
    """Returns the address of the server: an embedded one may come back at another port."""
    parts: tuple[PartName, ...] = ALL_PARTS
    master: str = "local[*]"
    group: str = DEFAULT_GROUP
    mapping: str | Path = DEFAULT_MAPPING
    """The name of a built-in mapping of directory entries, or a TOML file."""
    archive_seconds: float = 2.0
    replicas: int = 1
    migrate: bool = True
    """Migrate a queue that exists in another shape, instead of giving up."""
    wait: bool = True
    """Wait while another process runs these parts, instead of giving up."""

    def __post_init__(self) -> None:
        if not self.parts:
            raise InvalidConfig("no part of the pipeline is chosen", fix=f"choose from {_names(ALL_PARTS)}")

    def checkpoint(self, part: PartName) -> Path:
        """Return the checkpoint directory of a part."""
        return self.data_dir / "checkpoints" / self.checkpoint_name(part)

    def checkpoint_name(self, part: PartName) -> str:
        """Return the name of a part's checkpoint. Dispatch has one for each group."""
        return f"{part.value}-{self.group}" if part is PartName.DISPATCH else part.value

    @property
    def locked_checkpoints(self) -> list[str]:
        """The checkpoints that only one process may use. Prefill workers share a queue and need none."""
        return [self.checkpoint_name(part) for part in self.parts if part is not PartName.PREFILL]

    @property
    def label(self) -> str:
        """Distinguishes this pipeline from others on the same data; empty for the usual one."""
        group = [] if self.group == DEFAULT_GROUP else [self.group]
        return "-".join(group if set(self.parts) == set(ALL_PARTS) else [*group, *(part.value for part in self.parts)])


class Reporter(Protocol):
    """Receives what happens in the pipeline. The service calls it from one thread."""

    def report_step(self, event: str, text: str) -> None:
        """Report a step of the service: standby, waiting, starting, ready, stopping, stopped."""

    def report_parts(self, parts: Sequence[PartStatus]) -> None:
        """Report the status of the parts, several times a second."""


class RunnableEngine(Protocol):
    """A Spark engine."""

    @property
    def spark(self) -> SparkSession:
        """Its session."""

    def check(self) -> None:
        """Raise EngineLost if the JVM is gone."""

    def stop(self) -> None:
        """Stop Spark."""


MakeParts = Callable[[PipelineSettings, SparkSession], Sequence[Part]]
StartEngine = Callable[[str, Path], RunnableEngine]


class PipelineService:
    """The pipeline, from its start to its stop."""

    def __init__(
        self,
        settings: PipelineSettings,
        make_parts: MakeParts,
        reporter: Reporter,
        *,
        start_engine: StartEngine = start_engine,
    ) -> None:
        self._settings = settings
        self._make_parts = make_parts
        self._reporter = reporter
        self._start_engine = start_engine
        self._migrations = MigrationMonitor(lambda listener: ensure_queues(settings, listener), reporter.report_step)
        self._status_publisher = StatusPublisher(settings.find_address, settings.label, replicas=settings.replicas)
        self._spark_ui: str | None = None
        self._status_at = 0.0
        self._written: list[PartStatus] | None = None

    def run(self, stop: threading.Event) -> None:
        """Run until `stop` is set. Raise what ends it: a part that cannot work, StoreInUse, EngineLost."""
        with (
            CheckpointLocks(self._settings.data_dir / "checkpoints", self._settings.locked_checkpoints) as locks,
        ):
            if not self._take_locks(locks, stop) or not self._wait_for_queues(stop):
                return
            self._reporter.report_step("starting", f"Spark on {self._settings.master}")
            engine = self._start_engine(self._settings.master, self._settings.data_dir)
            try:
                self._run_on(engine, stop)
            finally:
                engine.stop()
                remove_status(self._status_path)

    def _take_locks(self, locks: CheckpointLocks, stop: threading.Event) -> bool:
        if not self._settings.wait:
            refused = locks.take()
            if refused is not None:
                raise refused
            return True

        def report_standby(owner: StoreInUse) -> None:
            self._reporter.report_step("standby", f"{owner.message}; waiting to take over")

        return locks.wait(lambda: not stop.is_set(), report_standby)

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
                stop.wait(1.0)
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
        for supervisor in supervisors:
            supervisor.start()
        try:
            with self._status_publisher:
                self._watch(engine, supervisors, stop)
        finally:
            self._reporter.report_step("stopping", "after the batches that are under way")
            for supervisor in supervisors:
                supervisor.stop(_STOP_TIMEOUT_SECONDS)
            deadline = time.monotonic() + 2 * _STOP_TIMEOUT_SECONDS
            for supervisor in supervisors:
                supervisor.join(max(deadline - time.monotonic(), 0.0))

    def _watch(self, engine: RunnableEngine, supervisors: Sequence[PartSupervisor], stop: threading.Event) -> None:
        ready = False
        while not stop.wait(_POLL_SECONDS):
            engine.check()
            self._migrations.poll()
            parts = [supervisor.status for supervisor in supervisors]
            self._write_status_if_due(parts)
            self._reporter.report_parts(parts)
            for part in parts:
                if part.state is State.FAILED and part.error is not None:
                    raise PartFailed(f"{part.name} cannot work: {part.error.message}", fix=part.error.fix)
            if not ready and all(part.state is State.RUNNING for part in parts):
                ready = True
                self._reporter.report_step("ready", ", ".join(part.name for part in parts))

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


def ensure_queues(settings: PipelineSettings, on_event: EventListener = log_event) -> bool:
    """Every internal queue with the durables of its readers, before the first of them reads; whether all are ready.

    One that is not is being migrated: its readers drain it.
    """

    async def ensure() -> bool:
        where = settings.find_address()
        options = MigrationOptions(on_event=on_event)
        async with connect(
            where, name="purveyor-pipeline", patience_seconds=_CONNECT_TIMEOUT_SECONDS, migration_options=options
        ) as queues:
            ready = True
            for queue in internal_queues((settings.group,)):
                found = await queues.ensure(queue, replicas=settings.replicas, migrate=settings.migrate)
                ready &= found.require_usable().status is QueueStatus.READY
            await Registry.open(queues, replicas=settings.replicas)
            return ready

    return asyncio.run(ensure())


def _names(parts: Sequence[PartName]) -> str:
    return ", ".join(part.value for part in parts)


Start = Callable[[SparkSession, PipelineSettings, Address], RunningPart]


def make_parts(settings: PipelineSettings, spark: SparkSession) -> Sequence[Part]:
    """Build the parts that the settings choose."""
    chosen = [(part.value, _STARTS[part]) for part in settings.parts]
    return [Part(name, partial(_start, name, start, spark, settings)) for name, start in chosen]


def check_files(settings: PipelineSettings) -> None:
    """Check the files that the parts need, before Spark starts."""
    if PartName.TRANSFORM in settings.parts:
        load_mapping(settings.mapping)


def _start(name: str, start: Start, spark: SparkSession, settings: PipelineSettings) -> RunningPart:
    ensure_queues(settings)
    spark.sparkContext.setLocalProperty("spark.scheduler.pool", name)  # the jobs of this thread share the cores fairly
    return start(spark, settings, settings.find_address())


def _transform(spark: SparkSession, settings: PipelineSettings, address: Address) -> RunningPart:
    wanted = TransformSettings(
        address=address, checkpoint=str(settings.checkpoint(PartName.TRANSFORM)), mapping=settings.mapping
    )
    return QueryRun(start_transform(spark, wanted))


def _dispatch(spark: SparkSession, settings: PipelineSettings, address: Address) -> RunningPart:
    wanted = DispatchSettings(
        address=address,
        checkpoint=settings.checkpoint(PartName.DISPATCH),
        archive=archive_source(settings.data_dir, address),
        group=settings.group,
        replicas=settings.replicas,
    )
    return QueryRun(start_dispatch(spark, wanted))


def _archive(spark: SparkSession, settings: PipelineSettings, address: Address) -> RunningPart:
    wanted = ArchiveSettings(
        source=archive_source(settings.data_dir, address),
        checkpoint=settings.checkpoint(PartName.ARCHIVE),
        trigger_seconds=settings.archive_seconds,
    )
    return QueryRun(start_archive(spark, wanted))


def _prefill(spark: SparkSession, settings: PipelineSettings, address: Address) -> RunningPart:
    source = archive_source(settings.data_dir, address)
    worker = PrefillWorker(spark, address, source, WorkerOptions(replicas=settings.replicas))

    def count_handled() -> int:
        spark.sparkContext.statusTracker().getActiveJobsIds()  # a worker whose JVM hangs does not answer, but is alive
        return worker.handled

    return ThreadRun("prefill", worker.run, count_handled)


def archive_source(data_dir: Path, address: Address) -> ArchiveSource:
    """Return the archive in a data directory."""
    return ArchiveSource(address, data_dir / "archive")


_STARTS: dict[PartName, Start] = {
    PartName.TRANSFORM: _transform,
    PartName.DISPATCH: _dispatch,
    PartName.ARCHIVE: _archive,
    PartName.PREFILL: _prefill,
}

"""The pipeline as one program: transform, dispatch, archive and prefill kept running in one Spark application.

The order of a start: the locks on the checkpoints (a second process stands by here), the queues (waiting for the server
if it is away), Spark, and then each part with its keeper. A crash at any point leaves nothing to clean up: locks end
with their process, queues are made again as they are, and parts go on from their checkpoints.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Protocol

from pyspark.sql import SparkSession

from purveyor.jetstream.address import Address
from purveyor.model.errors import InvalidConfig, PurveyorError, StoreInUse, Unavailable
from purveyor.pipeline.checkpoint_locks import EngineLocks, Locks
from purveyor.pipeline.engine import start_engine
from purveyor.pipeline.migration_monitor import MigrationWatch
from purveyor.pipeline.part_status import (
    PartStatus,
    State,
    remove_status,
    status_path,
    write_status,
)
from purveyor.pipeline.part_supervisor import Keeper, Part
from purveyor.pipeline.status_publisher import Posting
from purveyor.queues.catalogue import DEFAULT_GROUP, internal_queues
from purveyor.queues.client import connect
from purveyor.queues.ensure import QueueStatus
from purveyor.queues.registry import Registry

_log = logging.getLogger(__name__)
_LOOK_SECONDS = 0.1
_STATUS_SECONDS = 1.0
_STOP_SECONDS = 10.0
_CONNECT_SECONDS = 2.0


class PartName(Enum):
    """The parts that can be chosen."""

    TRANSFORM = "transform"
    DISPATCH = "dispatch"
    ARCHIVE = "archive"
    PREFILL = "prefill"


ALL_PARTS = tuple(PartName)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSettings:
    """What the pipeline is to run, and on what."""

    data_dir: Path
    find_address: Callable[[], Address] = field(repr=False)
    """Where the server is now: one on the data directory may come back at another port."""
    parts: tuple[PartName, ...] = ALL_PARTS
    master: str = "local[*]"
    group: str = DEFAULT_GROUP
    mapping: Path | None = None
    archive_seconds: float = 2.0
    replicas: int = 1
    migrate: bool = True
    """Migrate a queue that is there in another shape, instead of giving up."""
    wait: bool = True
    """Stand by while another process runs these parts, instead of giving up."""

    def __post_init__(self) -> None:
        if not self.parts:
            raise InvalidConfig("no part of the pipeline is chosen", fix=f"choose of {_names(ALL_PARTS)}")

    def checkpoint(self, part: PartName) -> Path:
        """Where a query keeps how far it is."""
        return self.data_dir / "checkpoints" / self.checkpoint_name(part)

    def checkpoint_name(self, part: PartName) -> str:
        """Dispatch has one for each group."""
        return f"{part.value}-{self.group}" if part is PartName.DISPATCH else part.value

    @property
    def locked(self) -> list[str]:
        """The checkpoints that only one process may use; prefill jobs are shared by a queue."""
        return [self.checkpoint_name(part) for part in self.parts if part is not PartName.PREFILL]

    @property
    def label(self) -> str:
        """Tells this pipeline from others on the same data: empty for the usual one."""
        group = [] if self.group == DEFAULT_GROUP else [self.group]
        return "-".join(group if set(self.parts) == set(ALL_PARTS) else [*group, *(part.value for part in self.parts)])


class Reporter(Protocol):
    """Who is told what happens. Called from one thread."""

    def say(self, event: str, text: str) -> None:
        """A step of the whole: standby, waiting, starting, ready, stopping, stopped."""

    def show(self, parts: Sequence[PartStatus]) -> None:
        """How the parts are, several times a second."""


class AnyEngine(Protocol):
    """A Spark to run on."""

    @property
    def spark(self) -> SparkSession:
        """Its session."""

    def check(self) -> None:
        """EngineLost if it is gone."""

    def stop(self) -> None:
        """End it."""


MakeParts = Callable[[PipelineSettings, SparkSession], Sequence[Part]]
StartEngine = Callable[[str, Path], AnyEngine]


class Service:
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
        self._migrations = MigrationWatch(lambda: ensure_queues(settings), reporter.say)
        self._posting = Posting(settings.find_address, settings.label, replicas=settings.replicas)
        self._spark_ui: str | None = None
        self._status_at = 0.0
        self._written: list[PartStatus] | None = None

    def run(self, stop: threading.Event) -> None:
        """Until told to stop. Raises what ends it: a part that cannot work, StoreInUse, EngineLost."""
        with Locks(self._settings.data_dir / "checkpoints", self._settings.locked) as locks, self._migrations:
            if not self._take(locks, stop) or not self._ensure(stop):
                return
            self._reporter.say("starting", f"Spark on {self._settings.master}")
            engine = self._start_engine(self._settings.master, self._settings.data_dir)
            try:
                self._run_on(engine, stop)
            finally:
                engine.stop()
                remove_status(self._status_path)

    def _take(self, locks: Locks, stop: threading.Event) -> bool:
        if not self._settings.wait:
            refused = locks.take()
            if refused is not None:
                raise refused
            return True

        def stand_by(owner: StoreInUse) -> None:
            self._reporter.say("standby", f"{owner.message}; waiting to take over")

        return locks.wait(lambda: not stop.is_set(), stand_by)

    def _ensure(self, stop: threading.Event) -> bool:
        """All queues as declared, however long the server is away. False if told to stop before."""
        told = False
        while not stop.is_set():
            try:
                self._migrations.ensure()
            except Unavailable as error:
                if not told:
                    self._reporter.say("waiting", f"for the NATS server: {error.message}")
                    told = True
                stop.wait(1.0)
            else:
                return True
        return False

    def _run_on(self, engine: AnyEngine, stop: threading.Event) -> None:
        directory = self._settings.data_dir / "checkpoints"
        engines = EngineLocks(engine.spark, directory, self._settings.locked)
        if not engines.wait(
            lambda: not stop.is_set(),
            lambda name: self._reporter.say("waiting", f"for an earlier engine to let go of {name}"),
        ):
            return
        self._spark_ui = engine.spark.sparkContext.uiWebUrl
        keepers = [Keeper(part) for part in self._make_parts(self._settings, engine.spark)]
        for keeper in keepers:
            keeper.start()
        try:
            with self._posting:
                self._watch(engine, keepers, stop)
        finally:
            self._reporter.say("stopping", "after the batches that are under way")
            for keeper in keepers:
                keeper.stop(_STOP_SECONDS)
            deadline = time.monotonic() + 2 * _STOP_SECONDS
            for keeper in keepers:
                keeper.join(max(deadline - time.monotonic(), 0.0))

    def _watch(self, engine: AnyEngine, keepers: Sequence[Keeper], stop: threading.Event) -> None:
        ready = False
        while not stop.wait(_LOOK_SECONDS):
            engine.check()
            self._migrations.look()
            parts = [keeper.status for keeper in keepers]
            self._write(parts)
            self._reporter.show(parts)
            for part in parts:
                if part.state is State.FAILED and part.error is not None:
                    raise PartFailed(f"{part.name} cannot work: {part.error.message}", fix=part.error.fix)
            if not ready and all(part.state is State.RUNNING for part in parts):
                ready = True
                self._reporter.say("ready", ", ".join(part.name for part in parts))

    def _write(self, parts: list[PartStatus]) -> None:
        if parts != self._written or time.monotonic() >= self._status_at + _STATUS_SECONDS:
            about = {"group": self._settings.group, "at": datetime.now(UTC).isoformat(timespec="milliseconds")}
            try:
                write_status(self._status_path, about, parts)
            except OSError as error:  # a full disk must not end a pipeline that would go on when there is room
                _log.warning("the status file %s cannot be written: %s", self._status_path, error)
            self._posting.show({**about, "spark_ui": self._spark_ui}, parts)
            self._status_at, self._written = time.monotonic(), parts

    @property
    def _status_path(self) -> Path:
        return status_path(self._settings.data_dir, self._settings.label)


class PartFailed(PurveyorError):
    """A part cannot ever work as it is set up; the others were stopped too."""


def ensure_queues(settings: PipelineSettings) -> bool:
    """Every internal queue with the durables of its readers, before the first of them reads; whether all are ready.

    One that is not is being migrated: its readers drain it.
    """

    async def ensure() -> bool:
        where = settings.find_address()
        async with connect(where, name="purveyor-pipeline", patience_seconds=_CONNECT_SECONDS) as queues:
            ready = True
            for queue in internal_queues((settings.group,)):
                found = await queues.ensure(queue, replicas=settings.replicas, migrate=settings.migrate)
                ready &= found.require_usable().status is QueueStatus.READY
            await Registry.open(queues, replicas=settings.replicas)
            return ready

    return asyncio.run(ensure())


def _names(parts: Sequence[PartName]) -> str:
    return ", ".join(part.value for part in parts)

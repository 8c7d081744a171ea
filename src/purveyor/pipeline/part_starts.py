"""Start the parts of the pipeline: which settings each gets, and what it needs of the queues.

`make_parts` builds the parts for their supervisors. Every start, also the one after a failure, looks up the address of
the server. The service has ensured the queues when a part starts for the first time; every later start ensures them
again.
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession

from purveyor.jetstream.address import Address
from purveyor.pipeline.archive.reader import ArchiveSource
from purveyor.pipeline.archive.writer import ArchiveSettings, start_archive
from purveyor.pipeline.dispatch import DispatchSettings, start_dispatch
from purveyor.pipeline.part_supervisor import Part, QueryRun, RunningPart, ThreadRun
from purveyor.pipeline.pipeline_settings import PartName, PipelineSettings
from purveyor.pipeline.prefill.worker import PrefillWorker, WorkerOptions
from purveyor.pipeline.transform.mapping_file import load_mapping
from purveyor.pipeline.transform.transform_query import TransformSettings, start_transform
from purveyor.queues.catalogue import internal_queues
from purveyor.queues.client import connect
from purveyor.queues.migration.events import EventListener, MigrationOptions, log_event
from purveyor.queues.migration.record import QueueStatus
from purveyor.queues.registry import Registry

_CONNECT_TIMEOUT_SECONDS: Final = 2.0


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


Start = Callable[[SparkSession, PipelineSettings, Address], RunningPart]


def make_parts(settings: PipelineSettings, spark: SparkSession) -> Sequence[Part]:
    """Build the parts that the settings choose, after the queues were ensured."""
    return [Part(part.value, _PartStart(part, spark, settings)) for part in settings.parts]


def check_files(settings: PipelineSettings) -> None:
    """Check the files that the parts need, before Spark starts."""
    if PartName.TRANSFORM in settings.parts:
        load_mapping(settings.mapping)


def start_part(part: PartName, spark: SparkSession, settings: PipelineSettings) -> RunningPart:
    """Start a part on queues that exist."""
    # The jobs of this thread share the cores fairly.
    spark.sparkContext.setLocalProperty("spark.scheduler.pool", part.value)
    return _STARTS[part](spark, settings, settings.find_address())


class _PartStart:
    """Starts one part, as often as its supervisor asks."""

    def __init__(self, part: PartName, spark: SparkSession, settings: PipelineSettings) -> None:
        self._part = part
        self._spark = spark
        self._settings = settings
        self._are_ensured = True

    def __call__(self) -> RunningPart:
        if not self._are_ensured:
            ensure_queues(self._settings)
        self._are_ensured = False
        return start_part(self._part, self._spark, self._settings)


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
        is_traced=not settings.is_rehearsal,
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

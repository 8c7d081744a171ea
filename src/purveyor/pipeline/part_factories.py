"""Builds the parts of the pipeline: which settings each gets, and how it starts.

Every start, also the one after a failure, looks up the address of the server and ensures the queues again.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from pyspark.sql import SparkSession

from purveyor.jetstream.address import Address
from purveyor.pipeline.archive.reader import ArchiveSource
from purveyor.pipeline.archive.writer import ArchiveSettings, start_archive
from purveyor.pipeline.dispatch import DispatchSettings, start_dispatch
from purveyor.pipeline.part_supervisor import Part, QueryRun, RunningPart, ThreadRun
from purveyor.pipeline.prefill.worker import PrefillWorker, WorkerOptions
from purveyor.pipeline.service import PartName, PipelineSettings, ensure_queues
from purveyor.pipeline.transform.mapping import load_mapping
from purveyor.pipeline.transform.transform_query import TransformSettings, start_transform

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
    return ThreadRun("prefill", worker.run, lambda: worker.handled)


def archive_source(data_dir: Path, address: Address) -> ArchiveSource:
    """Return the archive in a data directory."""
    return ArchiveSource(address, data_dir / "archive")


_STARTS: dict[PartName, Start] = {
    PartName.TRANSFORM: _transform,
    PartName.DISPATCH: _dispatch,
    PartName.ARCHIVE: _archive,
    PartName.PREFILL: _prefill,
}

"""The archive's query: each micro-batch of `stream:incoming` becomes one range of the archive.

A batch is archived when its range is in place. If Spark runs it again after a crash, the archive already reaches to its
end and nothing is done, whatever compaction has made of the range since. The range is the batch's own, as Spark wrote
it down before running it: positions that have no message any more are covered too.
"""

from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody writes it
from pyspark.sql.streaming.query import StreamingQuery

from purveyor.model.errors import WrongRevision
from purveyor.pipeline.archive.checkpoint import batch_end
from purveyor.pipeline.archive.columns import ORDER, as_archived
from purveyor.pipeline.archive.layout import PositionRange, archived_until
from purveyor.pipeline.archive.read import ArchiveSource
from purveyor.pipeline.archive.store import Store
from purveyor.pipeline.archive.upkeep import Upkeep
from purveyor.pipeline.event_source import event_format
from purveyor.spark.options import connection_options


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveSettings:
    """How the archive's query runs."""

    source: ArchiveSource
    checkpoint: Path
    trigger_seconds: float = 2.0
    max_offsets: int = 200_000
    durable: str = "archive"
    hold_seconds: float = 120.0
    """How long the stream keeps what is archived, for queries that were planned before."""


def start_archive(spark: SparkSession, settings: ArchiveSettings) -> StreamingQuery:
    """Start the query and its upkeep; both end with `query.stop()`.

    Without a checkpoint it begins where the archive ends. The stream keeps everything for the archive's durable, so a
    message that is not there was removed on purpose, by a delete or a purge: that is logged, and its position covered.
    """
    source = settings.source
    assert source.address is not None, "an archive is written from a stream"
    store = Store(source.directory)
    store.tidy()
    reached = archived_until(source.directory)
    connection = connection_options(source.address) | {"stream": source.stream}
    upkeep = Upkeep(spark, store, settings.checkpoint, hold_seconds=settings.hold_seconds)
    upkeep.hold(connection, settings.durable)
    options = {
        "startingOffsets": str(reached + 1) if reached else "earliest",
        "maxOffsetsPerTrigger": str(settings.max_offsets),
        "failOnDataLoss": "false",
        "idleWaitMillis": "0",  # the trigger waits
    }

    def archive(batch: DataFrame, number: int) -> None:
        end = batch_end(settings.checkpoint, number)
        archive_batch(store, archived_until(source.directory), end.sequence, batch)

    query = (
        spark.readStream.format(event_format(spark))
        .options(**connection, **options)
        .load()
        .writeStream.queryName("archive")
        .foreachBatch(archive)
        .option("checkpointLocation", str(settings.checkpoint))
        .trigger(processingTime=f"{round(settings.trigger_seconds * 1000)} milliseconds")
        .start()
    )
    upkeep.start(query)
    return query


def archive_batch(store: Store, reached: int, last: int, batch: DataFrame) -> None:
    """Archive what of a batch that ends at `last` lies behind `reached`; nothing when all of it is there."""
    if last <= reached:
        return
    rows = as_archived(batch.where(F.col("sequence") > reached)).sortWithinPartitions(*ORDER)
    if not store.add(rows, PositionRange(reached + 1, last)):
        raise WrongRevision(
            f"another process has archived positions behind {reached} meanwhile", fix="run one archive per directory"
        )

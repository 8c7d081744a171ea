"""The archive's query: each micro-batch of `stream:incoming` becomes one range of the archive.

A batch is archived when its range is in place. If Spark runs it again after a crash, the archive already reaches to its
end and nothing is done, whatever compaction has made of the range since. The range is the batch's own, as Spark wrote
it down before running it: positions that have no message any more are covered too.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody writes it
from pyspark.sql.streaming.query import StreamingQuery

from purveyor.model.errors import WrongRevision
from purveyor.pipeline.archive.checkpoint_log import batch_end
from purveyor.pipeline.archive.isolation import Isolation
from purveyor.pipeline.archive.layout import PositionRange, archived_until
from purveyor.pipeline.archive.maintenance import Upkeep
from purveyor.pipeline.archive.range_store import Store
from purveyor.pipeline.archive.reader import ArchiveSource
from purveyor.pipeline.archive.schema import ORDER, as_archived
from purveyor.pipeline.checkpoint_recovery import archive_rule, recover
from purveyor.pipeline.event_source import event_format
from purveyor.spark.options import connection_options, read_settings


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

    Without a checkpoint it begins where the archive ends; so it does with one that does not belong to the stream (see
    `checkpoint_recovery`). The stream keeps everything for the archive's durable, so a
    message that is not there was removed on purpose, by a delete or a purge: that is logged, and its position covered.
    """
    source = settings.source
    assert source.address is not None, "an archive is written from a stream"
    store = Store(source.directory)
    store.tidy()
    reached = archived_until(source.directory)
    connection = connection_options(source.address) | {"stream": source.stream}
    reading = read_settings({**connection, "durable": settings.durable})
    recover(settings.checkpoint, reading, archive_rule(source.directory, reached))
    upkeep = Upkeep(spark, store, settings.checkpoint, hold_seconds=settings.hold_seconds)
    upkeep.hold(connection, settings.durable)
    options = {
        "startingOffsets": str(reached + 1) if reached else "earliest",
        "maxOffsetsPerTrigger": str(settings.max_offsets),
        "failOnDataLoss": "false",
        "idleWaitMillis": "0",  # the trigger waits
    }

    def archive(batch: DataFrame, number: int) -> None:
        reached, last = archived_until(source.directory), batch_end(settings.checkpoint, number).sequence
        if last > reached:  # else it was archived before a crash
            Isolation(batch.sparkSession, source, partial(archive_range, store)).write(
                batch, PositionRange(reached + 1, last)
            )

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


def archive_range(store: Store, batch: DataFrame, wanted: PositionRange) -> None:
    """Archive what of a batch lies in a range that begins where the archive ends."""
    inside = batch.where(F.col("sequence").between(wanted.first, wanted.last))
    if not store.add(as_archived(inside).sortWithinPartitions(*ORDER), wanted):
        raise WrongRevision(
            f"another process has archived positions from {wanted.first} on meanwhile",
            fix="run one archive per directory",
        )

"""The archive's query: each micro-batch of `stream:incoming` becomes one range of the archive.

A batch is archived when its range is in place. If Spark runs it again after a crash, the archive already reaches to its
end and nothing happens, even if compaction has merged the range since. The range is the one that Spark logged for the
batch before it ran: positions that have no message any more are covered too.

One message must not keep others from being archived. `RangeIsolation` divides a batch that fails on its data in two and
archives the parts in their order, each as its own range, divided again if it fails. A single message that fails twice
is archived unchanged, as `invalid`. If even that fails, the message is parked
as a dead letter of `incoming`, and then its position is covered without a row. Both are logged as errors. A crash in
between leaves ranges that join, and the batch continues behind them. A message that was parked and whose position is
not covered yet is found among the dead letters, and not parked again.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the usual alias
from pyspark.sql.streaming.query import StreamingQuery

from purveyor.jetstream.bulk import read_range
from purveyor.model.errors import WrongRevision
from purveyor.pipeline.archive.layout import ORDER, PositionRange, archived_until
from purveyor.pipeline.archive.maintenance import ArchiveMaintenance
from purveyor.pipeline.archive.range_store import RangeStore
from purveyor.pipeline.archive.reader import ArchiveSource, as_archived
from purveyor.pipeline.checkpoints import archive_rule, recover
from purveyor.pipeline.event_rows import COLUMN_TYPES
from purveyor.pipeline.event_sources import event_format
from purveyor.pipeline.job_failures import (
    MIN_TIME_LIMIT_SECONDS,
    data_fault,
    is_message_at_fault,
    park_once,
    time_limit,
)
from purveyor.spark.checkpoint_files import batch_end
from purveyor.spark.options import connection_options, read_settings

ROWS_PER_SECOND: Final = 1000
"""For each this many positions a batch may take a second longer."""
ArchiveRange = Callable[[DataFrame, PositionRange], None]
"""Archives the rows of a range."""
_log = logging.getLogger(__name__)
_ARROW: Final = {"string": pa.string(), "timestamp": pa.timestamp("us", "UTC")}


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveSettings:
    """The settings of the archive's query."""

    source: ArchiveSource
    checkpoint: Path
    trigger_seconds: float = 2.0
    max_offsets: int = 200_000
    durable: str = "archive"
    hold_seconds: float = 120.0
    """How long the stream keeps archived messages, for queries that were planned before."""


def start_archive(spark: SparkSession, settings: ArchiveSettings) -> StreamingQuery:
    """Start the query and its maintenance; both end with `query.stop()`.

    Without a checkpoint it begins where the archive ends, and so it does with one that does not fit the stream (see
    `checkpoints`). The stream keeps everything for the archive's durable. So a message that is not there was
    removed on purpose, by a delete or a purge: that is logged, and its position is covered.
    """
    source = settings.source
    assert source.address is not None, "an archive is written from a stream"
    store = RangeStore(source.directory)
    store.clean_up()
    reached = archived_until(source.directory)
    connection = connection_options(source.address) | {"stream": source.stream}
    reading = read_settings({**connection, "durable": settings.durable})
    recover(settings.checkpoint, reading, archive_rule(source.directory, reached))
    maintenance = ArchiveMaintenance(spark, store, settings.checkpoint, hold_seconds=settings.hold_seconds)
    maintenance.create_durable(connection, settings.durable)
    options = {
        "startingOffsets": str(reached + 1) if reached else "earliest",
        "maxOffsetsPerTrigger": str(settings.max_offsets),
        "failOnDataLoss": "false",
        "idleWaitMillis": "0",  # the trigger waits
    }

    def archive(batch: DataFrame, number: int) -> None:
        reached, last = archived_until(source.directory), batch_end(settings.checkpoint, number).sequence
        if last > reached:  # else it was archived before a crash
            RangeIsolation(batch.sparkSession, source, partial(archive_range, store)).write(
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
    maintenance.start(query)
    return query


def archive_range(store: RangeStore, batch: DataFrame, wanted: PositionRange) -> None:
    """Archive the rows of a batch that are in a range, which begins where the archive ends."""
    inside = batch.where(F.col("sequence").between(wanted.first, wanted.last))
    if not store.add(as_archived(inside).sortWithinPartitions(*ORDER), wanted):
        raise WrongRevision(
            f"another process has archived positions from {wanted.first} on",
            fix="run one archive per directory",
        )


class RangeIsolation:
    """Archives ranges of one stream, divided where one message makes the whole fail."""

    def __init__(self, spark: SparkSession, source: ArchiveSource, archive: ArchiveRange) -> None:
        assert source.address is not None, "an archive is written from a stream"
        self._spark = spark
        self._address = source.address
        self._source = source
        self._archive = archive

    def write(self, batch: DataFrame, wanted: PositionRange) -> None:
        """Archive a range. Raise errors that are not the fault of its data."""
        error = self._try(batch, wanted)
        if error is None:
            return
        if wanted.first == wanted.last:
            self._write_single(wanted, error)
            return
        reason = data_fault(error)
        _log.warning("positions %d to %d fail and are divided: %s", wanted.first, wanted.last, reason)
        middle = (wanted.first + wanted.last) // 2
        for part in (PositionRange(wanted.first, middle), PositionRange(middle + 1, wanted.last)):
            self.write(self._read(part), part)

    def _try(self, batch: DataFrame, wanted: PositionRange) -> Exception | None:
        """Archive a range; return the error if it is the fault of the data."""
        try:
            with time_limit(self._spark, MIN_TIME_LIMIT_SECONDS + (wanted.last - wanted.first) / ROWS_PER_SECOND):
                self._archive(batch, wanted)
        except Exception as error:
            if data_fault(error) is None:
                raise
            return error
        return None

    def _write_single(self, position: PositionRange, error: Exception) -> None:
        """Archive one message that failed. First try again: an outage can look like a fault of the message."""
        if not is_message_at_fault(self._spark, error):
            raise error
        again = self._try(self._read(position), position)
        if again is None:
            return
        messages = self._messages(position)
        rows = self._spark.createDataFrame(_as_invalid_events(messages))
        last = self._try(rows, position)
        if last is None:
            _log.error("position %d is archived unchanged, as invalid: %s", position.first, data_fault(again))
            return
        if not is_message_at_fault(self._spark, last):
            raise last
        reason = data_fault(last)
        _log.error("position %d cannot be archived at all: %s", position.first, reason)
        for message in messages:
            found = {**message, "position": position.first}
            park_once(self._address, found, f"the archive fails on this message, and goes on without it: {reason}")
        self._archive(rows.where(F.lit(False)), position)

    def _messages(self, wanted: PositionRange) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for batch in read_range(self._address, self._source.stream, wanted.first, wanted.last):
            found += batch.to_pylist()
        return found

    def _read(self, wanted: PositionRange) -> DataFrame:
        """Read the messages of a range again."""
        options = connection_options(self._address) | {"stream": self._source.stream, "failOnDataLoss": "false"}
        options |= {"startingOffsets": str(wanted.first), "endingOffsets": str(wanted.last)}
        return self._spark.read.format(event_format(self._spark)).options(**options).load()


def _as_invalid_events(rows: list[dict[str, Any]]) -> pa.Table:
    """Return messages in the columns of the format `jetstream-events`, without those of an event."""
    message = pa.schema(
        [
            ("sequence", pa.int64()),
            ("timestamp", pa.timestamp("us", "UTC")),
            ("subject", pa.string()),
            ("headers", pa.map_(pa.string(), pa.list_(pa.string()))),
            ("data", pa.binary()),
        ]
    )
    nothing = {name: pa.nulls(len(rows), _ARROW[kind]) for name, kind in COLUMN_TYPES.items()}
    table = pa.Table.from_pylist(rows, message)
    for name, column in nothing.items():
        table = table.append_column(name, column)
    return table

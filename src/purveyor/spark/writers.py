"""The writers of the `jetstream` format.

Each task publishes its rows in order and waits for the server's answer to each.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from purveyor.jetstream.bulk import PublishMode, PublishOptions, publish_many
from purveyor.jetstream.bulk.net.pool import request_api
from purveyor.model.errors import InvalidConfig
from purveyor.spark.options import WriteDelivery, WriteSettings
from purveyor.spark.task_tuning import freeze_imports, read_ahead

_log = logging.getLogger(__name__)
_HEADERS = pa.map_(pa.string(), pa.list_(pa.string()))
_TYPES = {
    "subject": ("string",),
    "data": ("binary", "string"),
    "headers": ("map<string,array<string>>", "map<string,string>"),
    "msg_id": ("string",),
}
_UNSORTABLE = ("array", "map", "struct", "variant", "interval", "void")


@dataclass
class WrittenRows(WriterCommitMessage):
    """How many rows a task stored."""

    stored: int
    duplicates: int


def check_columns(settings: WriteSettings, schema: StructType) -> None:
    """Raise InvalidConfig for columns that are missing, of another type, or unknown, before any row is written."""
    found = {field.name: field.dataType.simpleString() for field in schema.fields}
    allowed = {*_TYPES, *((settings.order_by,) if settings.order_by else ())}
    unknown = sorted(set(found) - allowed)
    if unknown:
        raise InvalidConfig(
            f"the jetstream format cannot write column {unknown[0]!r}",
            fix=f"select from {', '.join(_TYPES)}, and the column of option orderBy",
        )
    if "subject" not in found and settings.subject is None:
        raise InvalidConfig("no subject to write to", fix="give a column subject, or option subject")
    if "data" not in found:
        raise InvalidConfig("no column data to write", fix="select one, binary or string")
    if settings.order_by and settings.order_by not in found:
        raise InvalidConfig(f"option orderBy: there is no column {settings.order_by!r}", fix="select it as well")
    if settings.order_by and found[settings.order_by].startswith(_UNSORTABLE):
        raise InvalidConfig(
            f"option orderBy: column {settings.order_by!r} of type {found[settings.order_by]} cannot be sorted by",
            fix="choose a number, a time, a string or binary",
        )
    for name, kinds in _TYPES.items():
        if name in found and found[name] not in kinds:
            raise InvalidConfig(f"column {name!r} is {found[name]}", fix=f"cast it to {' or '.join(kinds)}")


def write_partition(settings: WriteSettings, batches: Iterator[pa.RecordBatch]) -> WrittenRows:
    """Publish the rows of one task. A retried task sends the same rows in the same order: ids make it harmless."""
    freeze_imports()
    rows: Iterator[pa.RecordBatch] = (row_batch for row_batch in batches if row_batch.num_rows)
    if settings.order_by is not None:
        rows = _sorted(rows, settings.order_by)
    messages = read_ahead(to_messages(batch, settings) for batch in rows)
    options = PublishOptions(
        mode=_publish_mode(settings), expected_stream=settings.stream, patience_seconds=settings.patience_seconds
    )
    report = publish_many(settings.address, messages, options)
    return WrittenRows(report.stored, report.duplicates)


def _publish_mode(settings: WriteSettings) -> PublishMode:
    if settings.delivery is WriteDelivery.ATOMIC:
        return PublishMode.ATOMIC
    if settings.delivery is WriteDelivery.PIPELINED or settings.stream is None:
        return PublishMode.PIPELINED
    info = request_api(settings.address, f"STREAM.INFO.{settings.stream}", patience_seconds=settings.patience_seconds)
    return PublishMode.ATOMIC if info["config"].get("allow_atomic") else PublishMode.PIPELINED


def _sorted(batches: Iterator[pa.RecordBatch], column: str) -> Iterator[pa.RecordBatch]:
    """Yield all rows of the task, sorted. They are held in memory: `maxOffsetsPerTrigger` bounds a micro-batch."""
    held = list(batches)
    if held:
        yield from pa.Table.from_batches(held).sort_by(column).combine_chunks().to_batches()


def to_messages(batch: pa.RecordBatch, settings: WriteSettings) -> pa.RecordBatch:
    """Build the columns that `publish_many` takes from those that the user selected."""
    names = batch.schema.names
    data = batch.column("data")
    columns = {"data": _without_nulls(data.cast(pa.binary()) if pa.types.is_string(data.type) else data)}
    if "subject" in names:
        columns["subject"] = batch.column("subject")
    if settings.subject is not None:
        default = pa.scalar(settings.subject, pa.string())
        given = columns.get("subject")
        columns["subject"] = pa.repeat(default, batch.num_rows) if given is None else pc.fill_null(given, default)
    if "headers" in names:
        columns["headers"] = _headers(batch.column("headers"))
    if "msg_id" in names:
        columns["msg_id"] = batch.column("msg_id")
    return pa.record_batch(columns)


def _without_nulls(data: pa.Array) -> pa.Array:
    return pc.fill_null(data, pa.scalar(b"", pa.binary())) if data.null_count else data


def _headers(column: pa.MapArray) -> pa.Array:
    """Convert headers; map<string,string> has one value per name."""
    if pa.types.is_list(column.type.item_type):
        return column.cast(_HEADERS)
    items = column.items
    offsets = pa.array(range(len(items) + 1), pa.int32())
    lists = pa.ListArray.from_arrays(offsets, items)
    return pa.MapArray.from_arrays(column.offsets, column.keys, lists)


def _totals(messages: list[WriterCommitMessage | None]) -> tuple[int, int]:
    written = [message for message in messages if isinstance(message, WrittenRows)]
    return sum(each.stored for each in written), sum(each.duplicates for each in written)


class JetStreamWriter(DataSourceArrowWriter):
    """A batch write."""

    def __init__(self, settings: WriteSettings) -> None:
        self._settings = settings

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write the rows of one task."""
        return write_partition(self._settings, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Log the totals. All tasks are done, and their messages are stored already."""
        _log.info("wrote %d messages (%d stored before)", *_totals(messages))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Log that a task failed for good. Stored messages stay: with ids, writing again adds only the rest."""
        _log.warning("a write failed after %d messages (%d stored before)", *_totals(messages))


class JetStreamStreamWriter(DataSourceStreamArrowWriter):
    """A streaming write, which does the same for each micro-batch."""

    def __init__(self, settings: WriteSettings) -> None:
        self._settings = settings

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write the rows of one task."""
        return write_partition(self._settings, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Log the totals of a batch. Its messages are stored already."""
        _log.debug("batch %d: wrote %d messages (%d stored before)", batchId, *_totals(messages))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Log that a batch failed. Spark repeats it: with ids, stored messages are not stored twice."""
        _log.warning("batch %d failed after %d messages (%d stored before)", batchId, *_totals(messages))

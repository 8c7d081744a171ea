"""Archives a batch that fails on its data in parts, so that one message keeps no other from being archived.

The batch is divided in two, and the parts are archived in their order, each as a range of its own, and divided in the
same way if it fails. A single message that fails, and fails once more when it is tried again, is archived as it came,
without what it says as an event: it is `invalid` then. If even that fails, the message is parked as a dead letter of
`incoming`, and then its position is covered without a row. Both are logged as errors.

A crash in between leaves ranges that join, and the batch goes on behind them. A message that was parked and whose
position is not covered yet is found among the dead letters, and not parked again.
"""

import logging
from collections.abc import Callable
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody writes it

from purveyor.jetstream.bulk import read_range
from purveyor.pipeline.archive.layout import PositionRange
from purveyor.pipeline.archive.reader import ArchiveSource
from purveyor.pipeline.event_columns import TYPES
from purveyor.pipeline.event_source import event_format
from purveyor.pipeline.faults import LEAST_SECONDS, blames_message, data_fault, time_limit
from purveyor.pipeline.parking import park_once
from purveyor.spark.options import connection_options

ROWS_PER_SECOND: Final = 1000
"""For this many positions a batch may take a second longer."""

Archive = Callable[[DataFrame, PositionRange], None]
"""Archives the rows of a range."""

_log = logging.getLogger(__name__)


class Isolation:
    """Archives ranges of one stream, in parts where one message makes the whole fail."""

    def __init__(self, spark: SparkSession, source: ArchiveSource, archive: Archive) -> None:
        assert source.address is not None, "an archive is written from a stream"
        self._spark = spark
        self._address = source.address
        self._source = source
        self._archive = archive

    def write(self, batch: DataFrame, wanted: PositionRange) -> None:
        """Archive a range. Raises what is not the fault of its data."""
        error = self._try(batch, wanted)
        if error is None:
            return
        if wanted.first == wanted.last:
            self._single(wanted, error)
            return
        reason = data_fault(error)
        _log.warning("positions %d to %d fail and are divided: %s", wanted.first, wanted.last, reason)
        middle = (wanted.first + wanted.last) // 2
        for part in (PositionRange(wanted.first, middle), PositionRange(middle + 1, wanted.last)):
            self.write(self._read(part), part)

    def _try(self, batch: DataFrame, wanted: PositionRange) -> Exception | None:
        """Archive a range; return the error if it is the fault of the data."""
        try:
            with time_limit(self._spark, LEAST_SECONDS + (wanted.last - wanted.first) / ROWS_PER_SECOND):
                self._archive(batch, wanted)
        except Exception as error:
            if data_fault(error) is None:
                raise
            return error
        return None

    def _single(self, position: PositionRange, error: Exception) -> None:
        """One message that fails: once more, so that an outage which looked like a fault blames no message."""
        if not blames_message(self._spark, error):
            raise error
        again = self._try(self._read(position), position)
        if again is None:
            return
        messages = self._messages(position)
        rows = self._spark.createDataFrame(_as_told(messages))
        last = self._try(rows, position)
        if last is None:
            _log.error("position %d is archived as it came, as invalid: %s", position.first, data_fault(again))
            return
        if not blames_message(self._spark, last):
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
        """The messages of a range, read again."""
        options = connection_options(self._address) | {"stream": self._source.stream, "failOnDataLoss": "false"}
        options |= {"startingOffsets": str(wanted.first), "endingOffsets": str(wanted.last)}
        return self._spark.read.format(event_format(self._spark)).options(**options).load()


def _as_told(rows: list[dict[str, Any]]) -> pa.Table:
    """Messages as the format `jetstream-events` has them, but told as no events."""
    message = pa.schema(
        [
            ("sequence", pa.int64()),
            ("timestamp", pa.timestamp("us", "UTC")),
            ("subject", pa.string()),
            ("headers", pa.map_(pa.string(), pa.list_(pa.string()))),
            ("data", pa.binary()),
        ]
    )
    nothing = {name: pa.nulls(len(rows), _ARROW[kind]) for name, kind in TYPES.items()}
    table = pa.Table.from_pylist(rows, message)
    for name, column in nothing.items():
        table = table.append_column(name, column)
    return table


_ARROW: Final = {"string": pa.string(), "timestamp": pa.timestamp("us", "UTC")}

"""The directory of one source in Spark's state, and the chunks in which messages pass through the state operator.

Spark versions the state with the batches. A batch that failed and runs again begins with the state of the batch before
it, so the old object of an event is the true one, whatever the failed attempt wrote.

The state operator is slow per row, so a row holds many messages: a chunk is an Arrow stream in a binary value. Outputs
travel the same way.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import MapState, StatefulProcessor, StatefulProcessorHandle, ValueState
from pyspark.sql.types import BinaryType, LongType, StructField, StructType

from purveyor.model.errors import DataLost, Unavailable
from purveyor.pipeline.transform.directory_pages import PagedDirectory
from purveyor.pipeline.transform.live_directory import LiveDirectory
from purveyor.pipeline.transform.record_transform import Message, Output, TransformRules, transform

STATE_OPTIONS = {
    # The only store that can hold the state of such a processor.
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    # A batch uploads only the changes, not a snapshot of everything.
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
}
OUTPUT_ROW = StructType([StructField("chunk", BinaryType())])
_NUMBER = StructType([StructField("number", LongType())])
_BYTES = StructType([StructField("data", BinaryType())])


T = TypeVar("T")
MAX_CHUNK_ROWS = 1000
MAX_CHUNK_BYTES = 4 << 20
"""Payloads in one chunk; a single message may be larger."""
CHUNK_ROW = "subject string, first bigint, chunk binary"
_CHUNK_SCHEMA = pa.schema([("subject", pa.string()), ("first", pa.int64()), ("chunk", pa.binary())])
OUTPUT_SCHEMA = pa.schema(
    [
        ("position", pa.int64()),
        ("parked", pa.bool_()),
        ("data", pa.binary()),
        ("headers", pa.map_(pa.string(), pa.list_(pa.string()))),
        ("msg_id", pa.string()),
    ]
)


def _call_spark(call: Callable[..., T], *values: object) -> T:
    """Call a function of Spark.

    Its errors become Unavailable, unlike those of the rules: no message is to blame for them.
    """
    try:
        return call(*values)
    except Exception as error:
        raise Unavailable(f"the state of the directory cannot be used: {error!r}") from error


class StatePages:
    """Pages in the state of one key."""

    def __init__(self, index: ValueState, pages: MapState) -> None:
        self._index = index
        self._pages = pages

    def read_index(self) -> bytes | None:
        """Return the index; None if there was never one."""
        found = _call_spark(self._index.get)
        return None if found is None else bytes(found[0])

    def write_index(self, data: bytes) -> None:
        """Store the index."""
        _call_spark(self._index.update, (data,))

    def find(self, number: int) -> bytes | None:
        """Return a page; None if there is none."""
        found = _call_spark(self._pages.getValue, (number,))
        return None if found is None else bytes(found[0])

    def read(self, number: int) -> bytes:
        """Return a page of the index."""
        found = self.find(number)
        if found is None:
            raise DataLost(f"page {number} of the directory is missing in the state", fix="restore its checkpoint")
        return found

    def write(self, number: int, data: bytes) -> None:
        """Store a page."""
        _call_spark(self._pages.updateValue, (number,), (data,))

    def remove(self, number: int) -> None:
        """Remove a page, if it was ever stored."""
        _call_spark(self._pages.removeKey, (number,))


class DirectoryProcessor(StatefulProcessor):
    """Applies the messages of a source to its directory, in order, and yields the outputs."""

    def __init__(self, rules: TransformRules) -> None:
        self._rules = rules
        self._index: ValueState
        self._pages: MapState

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Open the state of a source: the index of its pages, and the pages."""
        self._index = handle.getValueState("index", _BYTES)
        self._pages = handle.getMapState("pages", _NUMBER, _BYTES)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:  # noqa: N802, N803 - Spark's
        """Process one batch of one source. The shuffle does not keep the order of the chunks: it is restored here."""
        del key, timerValues
        pages = StatePages(self._index, self._pages)
        directory = LiveDirectory(PagedDirectory(pages), pages)
        for row in sorted(rows, key=lambda each: int(each.first)):
            outputs: list[Output] = []
            for message in read_messages(bytes(row.chunk)):
                outputs += transform(directory, self._rules, message)
            for chunk in chunk_outputs(outputs):
                yield Row(chunk=chunk)
        directory.flush()

    def close(self) -> None:
        """Do nothing: the state belongs to Spark."""


def chunk_messages(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield chunks of the messages of each subject, in their order; `first` is the sequence of the first."""
    for batch in batches:
        for start, stop in cut_points(pc.binary_length(batch.column("data")).to_pylist()):
            piece = batch.slice(start, stop - start)
            subjects = piece.column("subject")
            for subject in subjects.unique():
                rows = piece.filter(pc.equal(subjects, subject))
                first = rows.column("sequence")[0].as_py()
                chunk = write_chunk(pa.Table.from_batches([rows]))
                yield pa.record_batch([[subject.as_py()], [first], [chunk]], schema=_CHUNK_SCHEMA)


def cut_points(
    sizes: Sequence[int], max_rows: int = MAX_CHUNK_ROWS, max_bytes: int = MAX_CHUNK_BYTES
) -> Iterator[tuple[int, int]]:
    """Yield where to cut rows of these sizes into chunks.

    >>> list(cut_points([5, 5, 20, 1, 1, 1], max_rows=2, max_bytes=10))
    [(0, 2), (2, 3), (3, 5), (5, 6)]
    """
    start = held = 0
    for at, size in enumerate(sizes):
        if at > start and (at - start == max_rows or held + size > max_bytes):
            yield start, at
            start, held = at, 0
        held += size
    if start < len(sizes):
        yield start, len(sizes)


def read_messages(chunk: bytes) -> Iterator[Message]:
    """Yield the messages of one chunk."""
    table = read_chunk(chunk)
    columns = [table.column(name).to_pylist() for name in ("sequence", "timestamp", "subject", "headers", "data")]
    for sequence, stored, subject, headers, data in zip(*columns, strict=True):
        yield Message(sequence, stored, subject, _headers(headers), data)


def _headers(pairs: Sequence[tuple[str, list[str]]] | None) -> Mapping[str, tuple[str, ...]]:
    return {name: tuple(values) for name, values in pairs or ()}


def chunk_outputs(outputs: Sequence[Output]) -> Iterator[bytes]:
    """Yield outputs in chunks."""
    for start, stop in cut_points([len(each.data) for each in outputs]):
        piece = outputs[start:stop]
        columns = [
            [each.position for each in piece],
            [each.parked for each in piece],
            [each.data for each in piece],
            [[(name, list(values)) for name, values in each.headers.items()] for each in piece],
            [each.msg_id for each in piece],
        ]
        arrays = [pa.array(column, field.type) for column, field in zip(columns, OUTPUT_SCHEMA, strict=True)]
        yield write_chunk(pa.Table.from_arrays(arrays, schema=OUTPUT_SCHEMA))


def write_chunk(table: pa.Table) -> bytes:
    """Encode a table as one value."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return bytes(sink.getvalue())


def read_chunk(chunk: bytes) -> pa.Table:
    """Decode a table from a value."""
    with pa.ipc.open_stream(chunk) as stream:
        return stream.read_all()

"""Many messages in one row: how the transform passes them through Spark's state operator, which is slow per row.

A chunk is an Arrow stream in a binary value. `pack` makes chunks of what the source read, `unpack` reads one; outputs
travel the same way.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from purveyor.pipeline.transform.record_transform import Message, Output

MOST_ROWS = 1000
MOST_BYTES = 4 << 20
"""Of payloads in one chunk; a single message may be larger."""
PACKED = "subject string, first bigint, chunk binary"
_PACKED = pa.schema([("subject", pa.string()), ("first", pa.int64()), ("chunk", pa.binary())])
OUTPUT = pa.schema(
    [
        ("position", pa.int64()),
        ("parked", pa.bool_()),
        ("data", pa.binary()),
        ("headers", pa.map_(pa.string(), pa.list_(pa.string()))),
        ("msg_id", pa.string()),
    ]
)


def pack(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Chunks of the messages of each subject, in their order; `first` is the sequence of the first."""
    for batch in batches:
        for start, stop in cuts(pc.binary_length(batch.column("data")).to_pylist()):
            piece = batch.slice(start, stop - start)
            subjects = piece.column("subject")
            for subject in subjects.unique():
                rows = piece.filter(pc.equal(subjects, subject))
                first = rows.column("sequence")[0].as_py()
                chunk = write_chunk(pa.Table.from_batches([rows]))
                yield pa.record_batch([[subject.as_py()], [first], [chunk]], schema=_PACKED)


def cuts(sizes: Sequence[int], most_rows: int = MOST_ROWS, most_bytes: int = MOST_BYTES) -> Iterator[tuple[int, int]]:
    """Where to cut rows of these sizes into chunks.

    >>> list(cuts([5, 5, 20, 1, 1, 1], most_rows=2, most_bytes=10))
    [(0, 2), (2, 3), (3, 5), (5, 6)]
    """
    start = held = 0
    for at, size in enumerate(sizes):
        if at > start and (at - start == most_rows or held + size > most_bytes):
            yield start, at
            start, held = at, 0
        held += size
    if start < len(sizes):
        yield start, len(sizes)


def unpack(chunk: bytes) -> Iterator[Message]:
    """The messages of one chunk."""
    table = read_chunk(chunk)
    columns = [table.column(name).to_pylist() for name in ("sequence", "timestamp", "subject", "headers", "data")]
    for sequence, stored, subject, headers, data in zip(*columns, strict=True):
        yield Message(sequence, stored, subject, _headers(headers), data)


def _headers(pairs: Sequence[tuple[str, list[str]]] | None) -> Mapping[str, tuple[str, ...]]:
    return {name: tuple(values) for name, values in pairs or ()}


def pack_outputs(outputs: Sequence[Output]) -> Iterator[bytes]:
    """What is to be written, in chunks."""
    for start, stop in cuts([len(each.data) for each in outputs]):
        piece = outputs[start:stop]
        columns = [
            [each.position for each in piece],
            [each.parked for each in piece],
            [each.data for each in piece],
            [[(name, list(values)) for name, values in each.headers.items()] for each in piece],
            [each.msg_id for each in piece],
        ]
        arrays = [pa.array(column, field.type) for column, field in zip(columns, OUTPUT, strict=True)]
        yield write_chunk(pa.Table.from_arrays(arrays, schema=OUTPUT))


def write_chunk(table: pa.Table) -> bytes:
    """A table as one value."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return bytes(sink.getvalue())


def read_chunk(chunk: bytes) -> pa.Table:
    """The table in a value."""
    with pa.ipc.open_stream(chunk) as stream:
        return stream.read_all()

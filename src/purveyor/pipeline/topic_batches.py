"""Topic batches: messages of one topic in one row of Spark, and single messages again where they are written. Pure.

The topic of an event decides which subscriptions get it (for a few of them also a filter), so Spark need not handle
each event: a row costs the JVM several microseconds, whatever is in it, and a topic batch is one row for hundreds of
events. It holds the bodies of its messages, joined, and the end offset of each; so a filter in Spark SQL can still look
at one.

The messages of one Arrow batch of the source are a portion. The topic batches of a portion cover the same range of
positions and overlap, so they are written together; portions follow each other.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from purveyor.jetstream.bulk.arrow_bytes import bytes_and_offsets, regroup
from purveyor.jetstream.bulk.header_columns import read_blocks
from purveyor.model.control_events import CONTROL_SUBJECT
from purveyor.pipeline.event_columns import ROUTE_COLUMNS, parse_columns

SCHEMA: Final = pa.schema(
    [
        ("portion", pa.int64()),
        ("subject", pa.string()),
        ("realm", pa.string()),
        ("topic", pa.string()),
        ("positions", pa.list_(pa.int64())),
        ("ends", pa.list_(pa.int32())),
        ("data", pa.binary()),
        ("header_ends", pa.list_(pa.int32())),
        ("headers", pa.binary()),
    ]
)
"""`portion` is a position that identifies the portion and gives the order of portions. A topic batch of messages that
are not events has no realm and no topic. `headers` are header blocks of the NATS protocol."""
COLUMNS: Final = tuple(SCHEMA.names)
DDL: Final = (
    "portion bigint, subject string, realm string, topic string, positions array<bigint>, ends array<int>, "
    "data binary, header_ends array<int>, headers binary"
)
"""The same schema as DDL of Spark."""

_MAX_BATCH_BYTES: Final = 256 << 10
"""The approximate size of the bodies of a topic batch: Spark copies a row as one piece."""

Indices = npt.NDArray[np.int64]


def to_topic_batches(messages: pa.RecordBatch) -> pa.RecordBatch:
    """Group a portion: messages with `sequence`, `subject`, `headers` (blocks) and `data`.

    Control events are left out.
    """
    is_control = pc.equal(messages.column("subject"), CONTROL_SUBJECT)
    if is_control.true_count:
        messages = messages.filter(pc.invert(is_control))
    if not messages.num_rows:
        return pa.RecordBatch.from_pylist([], SCHEMA)
    realms, topics = parse_columns(messages, ROUTE_COLUMNS)
    groups = _group_numbers([messages.column("subject"), realms, topics])
    sequences, data, headers = (messages.column(name) for name in ("sequence", "data", "headers"))
    order = np.arange(len(groups))
    if groups.any():
        order = np.argsort(groups, kind="stable")
        groups, rows = groups[order], pa.array(order)
        sequences, data, headers = sequences.take(rows), data.take(rows), headers.take(rows)
    pieces = bytes_and_offsets(data)[1][:-1] // _MAX_BATCH_BYTES
    firsts = np.flatnonzero(np.diff(groups, prepend=-1) | np.diff(pieces, prepend=-1))
    bounds = np.append(firsts, len(groups))
    leaders = pa.array(order[firsts])
    portion = messages.column("sequence")[0].as_py()
    columns = [
        pa.array(np.full(len(firsts), portion, np.int64)),
        messages.column("subject").take(leaders),
        realms.take(leaders),
        topics.take(leaders),
        pa.ListArray.from_arrays(pa.array(bounds.astype(np.int32)), sequences),
        _end_offsets(data, bounds),
        regroup(data, bounds),
        _end_offsets(headers, bounds),
        regroup(headers, bounds),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _group_numbers(keys: list[Any]) -> Indices:
    """Return a number for each row: equal for rows with the same keys, and 0 if all rows have the same keys."""
    groups = np.zeros(len(keys[0]), np.int64)
    for key in keys:
        encoded = key.dictionary_encode(null_encoding="encode")
        if len(encoded.dictionary) > 1:
            groups = groups * len(encoded.dictionary) + encoded.indices.to_numpy()
    return groups


def _end_offsets(values: Any, bounds: Indices) -> Any:
    """Return where each value ends in the group that it is joined into."""
    _, offsets = bytes_and_offsets(values)
    ends = offsets[1:] - np.repeat(offsets[bounds[:-1]], np.diff(bounds))
    return pa.ListArray.from_arrays(pa.array(bounds.astype(np.int32)), pa.array(ends.astype(np.int32)))


def group_portions(batches: Iterable[pa.RecordBatch], max_rows: int, max_bytes: int) -> Iterator[list[pa.RecordBatch]]:
    """Yield the topic batches of whole portions, in order, about `max_rows` messages or `max_bytes` bytes at a time.

    Spark may divide a portion, so a portion is complete only when another one, or nothing, follows.
    """
    gathered: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        gathered.append(batch)
        rows += _messages_in(batch)
        size += batch.nbytes
        if rows >= max_rows or size >= max_bytes:
            whole, rest = _split_last_portion(gathered)
            if whole:
                yield whole
                gathered, rows, size = rest, sum(map(_messages_in, rest)), sum(each.nbytes for each in rest)
    if gathered:
        yield gathered


def _messages_in(batches: pa.RecordBatch) -> int:
    return len(batches.column("positions").flatten())


def _split_last_portion(batches: list[pa.RecordBatch]) -> tuple[list[pa.RecordBatch], list[pa.RecordBatch]]:
    """Separate the last portion from the ones before it."""
    last = batches[-1].column("portion")[-1].as_py()
    for index in range(len(batches) - 1, -1, -1):
        others = np.flatnonzero(batches[index].column("portion").to_numpy() != last)
        if len(others):
            until = int(others[-1]) + 1
            head, tail = batches[index].slice(0, until), batches[index].slice(until)
            return [*batches[:index], head], [*([tail] if tail.num_rows else []), *batches[index + 1 :]]
    return [], batches


class UnpackedMessages:
    """The messages of some topic batches, one row each, in the order of positions."""

    def __init__(self, batches: Sequence[pa.RecordBatch]) -> None:
        slim = [each.drop_columns(["data", "headers", "ends", "header_ends", "positions"]) for each in batches]
        self.topic_batches = pa.Table.from_batches(slim).combine_chunks().to_batches()[0]
        """The topic batches, without their messages."""
        counts = [np.asarray(each.column("positions").value_lengths()) for each in batches]
        batch_of_row = np.repeat(np.arange(self.topic_batches.num_rows), np.concatenate(counts))
        columns = {
            "position": [each.column("positions").flatten() for each in batches],
            "headers": [read_blocks(_split_values(each, "headers", "header_ends")) for each in batches],
            "data": [_split_values(each, "data", "ends") for each in batches],
        }
        rows = pa.table({name: pa.chunked_array(chunks) for name, chunks in columns.items()})
        positions = rows.column("position").to_numpy()
        if not (np.diff(positions) > 0).all():
            order = np.argsort(positions, kind="stable")
            rows, batch_of_row = rows.take(pa.array(order)), batch_of_row[order]
        self.rows = rows
        """`position`, `headers` and `data`."""
        self.batch_of_row: Indices = batch_of_row
        """The topic batch of each row."""

    def take_rows(self, rows: Indices) -> list[dict[str, Any]]:
        """Return some rows as dicts, with their `subject`."""
        subjects = self.topic_batches.column("subject").take(pa.array(self.batch_of_row[rows]))
        found: list[dict[str, Any]] = self.rows.take(pa.array(rows)).append_column("subject", subjects).to_pylist()
        return found


def _split_values(batches: pa.RecordBatch, name: str, ends_name: str) -> Any:
    """Return the values that were joined into those of a column."""
    data, offsets = bytes_and_offsets(batches.column(name).cast(pa.binary()))  # it may be large_binary
    ends = batches.column(ends_name)
    flat = np.asarray(ends.flatten()).astype(np.int64) + np.repeat(offsets[:-1], np.asarray(ends.value_lengths()))
    bounds = np.concatenate((np.zeros(1, np.int64), flat)).astype(np.int32)
    buffers = [None, pa.py_buffer(bounds), pa.py_buffer(np.ascontiguousarray(data))]
    return pa.BinaryArray.from_buffers(pa.binary(), len(flat), buffers)

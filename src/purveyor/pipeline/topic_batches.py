"""Packs: messages on one topic as one row of Spark, and as single messages again where they are written. Pure.

Who gets an event is decided by its topic (and, for a few subscriptions, by a filter), so Spark need not handle each by
itself: a row costs the JVM several microseconds, whatever is in it, and a pack is one row for hundreds. A pack holds
the bodies of its messages side by side, and where each of them ends; so a filter in Spark SQL can still look at one.

What was read together is a portion. Its packs are cut from the same stretch of positions and lie across each other, so
they are written together; portions follow one another.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from purveyor.jetstream.bulk.arrow_bytes import contents, regroup
from purveyor.jetstream.bulk.header_columns import read_blocks
from purveyor.model.control_events import CONTROL_SUBJECT
from purveyor.pipeline.event_columns import ROUTE, told

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
"""`portion` is a position that tells it from others and orders them. A pack of what is no event has no realm and no
topic. `headers` are blocks of the protocol."""
COLUMNS: Final = tuple(SCHEMA.names)
DDL: Final = (
    "portion bigint, subject string, realm string, topic string, positions array<bigint>, ends array<int>, "
    "data binary, header_ends array<int>, headers binary"
)
"""The same in Spark's words."""

_MOST_BYTES: Final = 256 << 10
"""About as large are the bodies of a pack: Spark copies a row in one piece."""

Indices = npt.NDArray[np.int64]


def pack(messages: pa.RecordBatch) -> pa.RecordBatch:
    """A portion: messages with `sequence`, `subject`, `headers` (blocks) and `data`. Control events are left out."""
    is_control = pc.equal(messages.column("subject"), CONTROL_SUBJECT)
    if is_control.true_count:
        messages = messages.filter(pc.invert(is_control))
    if not messages.num_rows:
        return pa.RecordBatch.from_pylist([], SCHEMA)
    realms, topics = told(messages, ROUTE)
    groups = _groups([messages.column("subject"), realms, topics])
    sequences, data, headers = (messages.column(name) for name in ("sequence", "data", "headers"))
    order = np.arange(len(groups))
    if groups.any():
        order = np.argsort(groups, kind="stable")
        groups, rows = groups[order], pa.array(order)
        sequences, data, headers = sequences.take(rows), data.take(rows), headers.take(rows)
    pieces = contents(data)[1][:-1] // _MOST_BYTES
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
        _ends(data, bounds),
        regroup(data, bounds),
        _ends(headers, bounds),
        regroup(headers, bounds),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _groups(keys: list[Any]) -> Indices:
    """A number for each row: rows with the same keys have the same, and it is 0 if all have the same keys."""
    groups = np.zeros(len(keys[0]), np.int64)
    for key in keys:
        encoded = key.dictionary_encode(null_encoding="encode")
        if len(encoded.dictionary) > 1:
            groups = groups * len(encoded.dictionary) + encoded.indices.to_numpy()
    return groups


def _ends(values: Any, bounds: Indices) -> Any:
    """Where each value ends in the group that it is joined into."""
    _, offsets = contents(values)
    ends = offsets[1:] - np.repeat(offsets[bounds[:-1]], np.diff(bounds))
    return pa.ListArray.from_arrays(pa.array(bounds.astype(np.int32)), pa.array(ends.astype(np.int32)))


def whole_portions(packs: Iterable[pa.RecordBatch], most_rows: int, most_bytes: int) -> Iterator[list[pa.RecordBatch]]:
    """Packs in the order of their portions, about so many messages or bytes at a time, and never a part of a portion.

    Spark may cut a portion in two, so it is whole only when another one, or nothing, follows.
    """
    gathered: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in packs:
        if not batch.num_rows:
            continue
        gathered.append(batch)
        rows += _messages_in(batch)
        size += batch.nbytes
        if rows >= most_rows or size >= most_bytes:
            whole, rest = _cut(gathered)
            if whole:
                yield whole
                gathered, rows, size = rest, sum(map(_messages_in, rest)), sum(each.nbytes for each in rest)
    if gathered:
        yield gathered


def _messages_in(packs: pa.RecordBatch) -> int:
    return len(packs.column("positions").flatten())


def _cut(packs: list[pa.RecordBatch]) -> tuple[list[pa.RecordBatch], list[pa.RecordBatch]]:
    """What comes before the last portion, and that portion."""
    last = packs[-1].column("portion")[-1].as_py()
    for place in range(len(packs) - 1, -1, -1):
        others = np.flatnonzero(packs[place].column("portion").to_numpy() != last)
        if len(others):
            until = int(others[-1]) + 1
            head, tail = packs[place].slice(0, until), packs[place].slice(until)
            return [*packs[:place], head], [*([tail] if tail.num_rows else []), *packs[place + 1 :]]
    return [], packs


class Load:
    """The messages of some packs, as single ones by position."""

    def __init__(self, packs: Sequence[pa.RecordBatch]) -> None:
        slim = [each.drop_columns(["data", "headers", "ends", "header_ends", "positions"]) for each in packs]
        self.packs = pa.Table.from_batches(slim).combine_chunks().to_batches()[0]
        """What is known of each pack."""
        counts = [np.asarray(each.column("positions").value_lengths()) for each in packs]
        of_pack = np.repeat(np.arange(self.packs.num_rows), np.concatenate(counts))
        columns = {
            "position": [each.column("positions").flatten() for each in packs],
            "headers": [read_blocks(_parted(each, "headers", "header_ends")) for each in packs],
            "data": [_parted(each, "data", "ends") for each in packs],
        }
        rows = pa.table({name: pa.chunked_array(chunks) for name, chunks in columns.items()})
        positions = rows.column("position").to_numpy()
        if not (np.diff(positions) > 0).all():
            order = np.argsort(positions, kind="stable")
            rows, of_pack = rows.take(pa.array(order)), of_pack[order]
        self.rows = rows
        """`position`, `headers` and `data`."""
        self.of_pack: Indices = of_pack
        """To which pack each row belongs."""

    def some(self, rows: Indices) -> list[dict[str, Any]]:
        """Some rows whole, with their `subject`: for a few that need a closer look."""
        subjects = self.packs.column("subject").take(pa.array(self.of_pack[rows]))
        found: list[dict[str, Any]] = self.rows.take(pa.array(rows)).append_column("subject", subjects).to_pylist()
        return found


def _parted(packs: pa.RecordBatch, name: str, ends_name: str) -> Any:
    """The values that were joined into those of a column."""
    data, offsets = contents(packs.column(name).cast(pa.binary()))  # Spark may be set to make larger ones
    ends = packs.column(ends_name)
    flat = np.asarray(ends.flatten()).astype(np.int64) + np.repeat(offsets[:-1], np.asarray(ends.value_lengths()))
    bounds = np.concatenate((np.zeros(1, np.int64), flat)).astype(np.int32)
    buffers = [None, pa.py_buffer(bounds), pa.py_buffer(np.ascontiguousarray(data))]
    return pa.BinaryArray.from_buffers(pa.binary(), len(flat), buffers)

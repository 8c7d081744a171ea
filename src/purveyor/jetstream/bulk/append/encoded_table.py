"""The rows of one table on their way into `append_once`, prepared once for all targets that are given the same table.

In a chain (see `append_chains`) the frames of a row for two targets differ in their first words only, subject and
reply: headers, sizes and payload are put together here, a block of rows at a time, and used for each target.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from purveyor.jetstream.bulk.arrow_bytes import Positions
from purveyor.jetstream.bulk.header_columns import join
from purveyor.jetstream.bulk.publish.frame_builder import Envelope, Rows, decimal, prepare
from purveyor.jetstream.headers import EXPECTED_LAST_MSG_ID
from purveyor.model.errors import InvalidInput, PublishRefused

_BLOCK_ROWS: Final = 2000
_BLOCK_BYTES: Final = 8 << 20
_MOST_BYTES: Final = 64 << 20
_BLOCKS_KEPT: Final = 4
_ROOM: Final = 512  # for the position, and for what is expected of a first row, with the name of its stream
_NO_SUBJECT: Final = "none"


@dataclass(frozen=True, slots=True)
class Block:
    """Neighbouring rows, ready to be sent."""

    rows: Rows
    """Without any expectation, and without a subject that means anything."""
    ends: Positions
    """How many bytes the rows take, up to each and with it."""
    parts: tuple[Any, ...]
    """All of each frame behind subject and reply; it expects the row before it to be the stream's last message."""

    @property
    def start(self) -> int:
        """The first row in the table."""
        return self.rows.first_index

    def frames(self, beginning: bytes, replies: Any, row: int, count: int) -> Any:
        """The frames of some rows, each with that beginning and a reply of its own, or none."""
        place = row - self.start
        parts = (part if isinstance(part, bytes) else part.slice(place, count) for part in self.parts)
        return join(beginning, replies, *parts)

    def size(self, row: int, count: int) -> int:
        """About how many bytes some rows take."""
        place = row - self.start
        return int(self.ends[place + count - 1]) - (int(self.ends[place - 1]) if place else 0)


class Sheet:
    """A table whose positions are checked."""

    def __init__(self, table: Any, positions: Positions, header: str) -> None:
        self.table = table
        self.positions = positions
        self.header = header
        self.users = 0
        """How many targets get these rows."""
        self._blocks: OrderedDict[int, Block] = OrderedDict()

    @cached_property
    def has_ids(self) -> bool:
        """Whether each row has a message id of its own column."""
        if "msg_id" not in self.table.schema.names:
            return False
        ids = self.table.column("msg_id")
        if not pa.types.is_string(ids.type) or ids.null_count or not len(ids):
            return False
        return bool(pc.min(pc.binary_length(ids)).as_py() > 0)

    def block(self, row: int, max_payload: int) -> Block:
        """The block that holds a row; one with a row that cannot be sent is an error of our tree."""
        start = row - row % self._rows_per_block
        block = self._blocks.get(start)
        if block is None:
            block = self._blocks[start] = self._build(start, max_payload)
            if len(self._blocks) > _BLOCKS_KEPT:
                self._blocks.popitem(last=False)
        else:
            self._blocks.move_to_end(start)
        return block

    @cached_property
    def _rows_per_block(self) -> int:
        each = max(1, self.table.nbytes // max(1, self.table.num_rows))
        return int(max(1, min(_BLOCK_ROWS, _BLOCK_BYTES // each)))

    def _build(self, start: int, max_payload: int) -> Block:
        part = self.table.slice(start, self._rows_per_block)
        if part.nbytes > _MOST_BYTES:
            raise PublishRefused(f"the rows from {start} on are too large to go together", fix="write them in batches")
        batch = record_batch(part, _NO_SUBJECT)
        envelope = Envelope(None, None, max_payload - _ROOM - len(self.header), left_out(self.header))
        rows = positioned(prepare(batch, start, envelope), self)
        first = self.table.column("msg_id")[start - 1].as_py() if start else ""
        ids = batch.column("msg_id")
        before = pa.concat_arrays([pa.array([first], pa.string()), ids.slice(0, len(ids) - 1)]).cast(pa.binary())
        expected = f"{EXPECTED_LAST_MSG_ID}: ".encode(), before, b"\r\n"
        constant = len(expected[0]) + len("\r\nNATS/1.0\r\n\r\n")
        header_sizes = pc.add(pc.add(pc.binary_length(rows.header_lines), pc.binary_length(before)), constant)
        totals = pc.add(header_sizes, pc.binary_length(rows.payloads))
        if pc.max(totals).as_py() > max_payload:
            raise PublishRefused("a row is too large with what is expected of it", fix="write it in a batch")
        sizes = b" ", decimal(header_sizes), b" ", decimal(totals), b"\r\nNATS/1.0\r\n"
        parts: tuple[Any, ...] = (*sizes, rows.header_lines, *expected, b"\r\n", rows.payloads, b"\r\n")
        if self.users > 1:
            parts = (join(*parts),)  # a copy of all payloads, which pays from the second time on
        return Block(rows, np.cumsum(totals.to_numpy(), dtype=np.int64), parts)


def sheet(subject: str, rows: pa.Table | pa.RecordBatch, header: str) -> Sheet:
    """Rows for a subject (and others); those that cannot be appended are `InvalidInput`."""
    table = rows if isinstance(rows, pa.Table) else pa.Table.from_batches([rows])
    missing = [name for name in ("position", "data") if name not in table.schema.names]
    if missing:
        raise InvalidInput(
            f"rows for {subject!r} have no column {missing[0]!r}, only {', '.join(table.schema.names)}",
            fix="columns are position, data, and optionally headers and msg_id",
        )
    column = table.column("position")
    if column.null_count:
        raise InvalidInput(f"a row for {subject!r} has no position (null)", fix="fill the column position")
    try:
        positions: Positions = column.cast(pa.int64()).to_numpy()
    except pa.ArrowException as error:
        raise InvalidInput(f"column 'position' is {column.type}, not int64", fix="cast it") from error
    wrong = np.flatnonzero(np.diff(positions) <= 0)
    if len(wrong):
        one, other = positions[wrong[0]], positions[wrong[0] + 1]
        raise InvalidInput(
            f"rows for {subject!r} are not in order: position {other} comes after {one}",
            fix="sort them by position, each position once",
        )
    if len(positions) and positions[0] < 1:
        raise InvalidInput(f"invalid position {positions[0]} for {subject!r}", fix="positions start at 1")
    return Sheet(table, positions, header)


def record_batch(part: Any, subject: str) -> Any:
    """Rows of a table as one record batch, with their subject."""
    names = [name for name in ("data", "headers", "msg_id") if name in part.schema.names]
    columns = [part.column(name) for name in names]
    arrays = [each.chunk(0) if each.num_chunks == 1 else each.combine_chunks() for each in columns]
    subjects = pa.repeat(pa.scalar(subject, pa.string()), part.num_rows)
    return pa.RecordBatch.from_arrays([subjects, *arrays], ["subject", *names])


def positioned(rows: Rows, sheet: Sheet) -> Rows:
    """The same rows with their positions in a header."""
    positions = decimal(pa.array(sheet.positions[rows.first_index : rows.first_index + len(rows)]))
    return replace(rows, header_lines=join(rows.header_lines, f"{sheet.header}: ".encode(), positions, b"\r\n"))


def left_out(position_header: str) -> Callable[[str], bool]:
    """Headers that are not sent along: what begins with Nats- is an order about the message as it was first sent."""
    return lambda name: name.startswith("Nats-") or name == position_header

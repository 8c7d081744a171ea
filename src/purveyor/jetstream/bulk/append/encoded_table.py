"""The encoded rows of one table for `append_once`, prepared once for all targets that get the same table.

In a chain (`chained_writes`) the frames of one row for two targets differ only in subject and reply. So headers, sizes
and payload are encoded here, a block of rows at a time, and used for every target.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from purveyor.jetstream.bulk.arrow_columns import Positions, join
from purveyor.jetstream.bulk.publish.frame_builder import FrameOptions, PreparedRows, prepare, to_digits
from purveyor.jetstream.headers import EXPECTED_LAST_MSG_ID
from purveyor.model.errors import InvalidInput, PublishRefused

_BLOCK_ROWS: Final = 2000
_BLOCK_BYTES: Final = 8 << 20
_MAX_BLOCK_BYTES: Final = 64 << 20
_MAX_CACHED_BLOCKS: Final = 4
_HEADER_RESERVE_BYTES: Final = (
    512  # for the position, and for the expectations of a first row with the name of its stream
)
_PLACEHOLDER_SUBJECT: Final = "none"


@dataclass(frozen=True, slots=True)
class EncodedBlock:
    """Consecutive encoded rows."""

    rows: PreparedRows
    """The rows without expectations, with a placeholder subject."""
    ends: Positions
    """The cumulative sizes of the rows in bytes."""
    parts: tuple[Any, ...]
    """The part of each frame after subject and reply. Each row expects the row before it as the last message."""

    @property
    def start(self) -> int:
        """The index of the first row in the table."""
        return self.rows.first_index

    def frames(self, beginning: bytes, replies: Any, row: int, count: int) -> Any:
        """Build the frames of `count` rows, each with the same beginning and its own reply subject, or none."""
        offset = row - self.start
        parts = (part if isinstance(part, bytes) else part.slice(offset, count) for part in self.parts)
        return join(beginning, replies, *parts)

    def size(self, row: int, count: int) -> int:
        """Return the approximate size of `count` rows in bytes."""
        offset = row - self.start
        return int(self.ends[offset + count - 1]) - (int(self.ends[offset - 1]) if offset else 0)


class EncodedTable:
    """A table with checked positions, encoded block by block."""

    def __init__(self, table: Any, positions: Positions, header: str) -> None:
        self.table = table
        self.positions = positions
        self.header = header
        self.target_count = 0
        """The number of targets that get these rows."""
        self._blocks: OrderedDict[int, EncodedBlock] = OrderedDict()

    @cached_property
    def has_ids(self) -> bool:
        """Whether the column `msg_id` has a value in each row."""
        if "msg_id" not in self.table.schema.names:
            return False
        ids = self.table.column("msg_id")
        if not pa.types.is_string(ids.type) or ids.null_count or not len(ids):
            return False
        return bool(pc.min(pc.binary_length(ids)).as_py() > 0)

    def block(self, row: int, max_payload: int) -> EncodedBlock:
        """Return the block with a row; raise an error of our tree if a row of the block cannot be sent."""
        start = row - row % self._rows_per_block
        block = self._blocks.get(start)
        if block is None:
            block = self._blocks[start] = self._build(start, max_payload)
            if len(self._blocks) > _MAX_CACHED_BLOCKS:
                self._blocks.popitem(last=False)
        else:
            self._blocks.move_to_end(start)
        return block

    @cached_property
    def _rows_per_block(self) -> int:
        each = max(1, self.table.nbytes // max(1, self.table.num_rows))
        return int(max(1, min(_BLOCK_ROWS, _BLOCK_BYTES // each)))

    def _build(self, start: int, max_payload: int) -> EncodedBlock:
        part = self.table.slice(start, self._rows_per_block)
        if part.nbytes > _MAX_BLOCK_BYTES:
            raise PublishRefused(f"the rows from {start} on are too large for a chain", fix="write them in batches")
        batch = to_record_batch(part, _PLACEHOLDER_SUBJECT)
        frame_options = FrameOptions(
            None, None, max_payload - _HEADER_RESERVE_BYTES - len(self.header), exclude_headers(self.header)
        )
        rows = add_positions(prepare(batch, start, frame_options), self)
        first = self.table.column("msg_id")[start - 1].as_py() if start else ""
        ids = batch.column("msg_id")
        before = pa.concat_arrays([pa.array([first], pa.string()), ids.slice(0, len(ids) - 1)]).cast(pa.binary())
        expected = f"{EXPECTED_LAST_MSG_ID}: ".encode(), before, b"\r\n"
        constant = len(expected[0]) + len("\r\nNATS/1.0\r\n\r\n")
        header_sizes = pc.add(pc.add(pc.binary_length(rows.header_lines), pc.binary_length(before)), constant)
        totals = pc.add(header_sizes, pc.binary_length(rows.payloads))
        if pc.max(totals).as_py() > max_payload:
            raise PublishRefused("a row is too large with its expectations", fix="write it in a batch")
        sizes = b" ", to_digits(header_sizes), b" ", to_digits(totals), b"\r\nNATS/1.0\r\n"
        parts: tuple[Any, ...] = (*sizes, rows.header_lines, *expected, b"\r\n", rows.payloads, b"\r\n")
        if self.target_count > 1:
            parts = (join(*parts),)  # copies all payloads, which pays from the second target on
        return EncodedBlock(rows, np.cumsum(totals.to_numpy(), dtype=np.int64), parts)


def encode_table(subject: str, rows: pa.Table | pa.RecordBatch, header: str) -> EncodedTable:
    """Check the positions of a table; raise `InvalidInput`, naming the subject, for rows that cannot be appended."""
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
    return EncodedTable(table, positions, header)


def to_record_batch(part: Any, subject: str) -> Any:
    """Return rows of a table as one record batch with a subject column."""
    names = [name for name in ("data", "headers", "msg_id") if name in part.schema.names]
    columns = [part.column(name) for name in names]
    arrays = [each.chunk(0) if each.num_chunks == 1 else each.combine_chunks() for each in columns]
    subjects = pa.repeat(pa.scalar(subject, pa.string()), part.num_rows)
    return pa.RecordBatch.from_arrays([subjects, *arrays], ["subject", *names])


def add_positions(rows: PreparedRows, table: EncodedTable) -> PreparedRows:
    """Return the rows with their positions in a header."""
    positions = to_digits(pa.array(table.positions[rows.first_index : rows.first_index + len(rows)]))
    return replace(rows, header_lines=join(rows.header_lines, f"{table.header}: ".encode(), positions, b"\r\n"))


def exclude_headers(position_header: str) -> Callable[[str], bool]:
    """Return a predicate for headers that are not copied: `Nats-` headers controlled the first publish."""
    return lambda name: name.startswith("Nats-") or name == position_header

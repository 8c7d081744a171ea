"""Turn received bytes into Arrow columns: slices of one large buffer, and header blocks of the NATS protocol.

The frame parser finds positions with numpy. The first functions turn pairs of positions into text, bytes and numbers:
many slices at once, each copied exactly once.

The others convert header blocks to and from Arrow maps, for all messages of a batch at once. A block is `NATS/1.0`,
then `Name: value` lines, then an empty line. Nearly every message has one (for its message id), so this is the hot path
in both directions. A name may occur several times in a message: its values become one list, in their order. Exactly one
space after the colon belongs to the protocol; any other is part of the value.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from purveyor.model.errors import InvalidHeader
from purveyor.model.name_rules import check_header

Bytes: TypeAlias = npt.NDArray[np.uint8]
Positions: TypeAlias = npt.NDArray[np.int64]
Mask: TypeAlias = npt.NDArray[np.bool_]


def take_slices(data: Bytes, starts: Positions, ends: Positions) -> Any:
    """Return the slices `data[starts:ends]` as a `BinaryArray`; they must ascend and not overlap."""
    count = len(starts)
    if not count:
        return pa.array([], pa.binary())
    # An Arrow array has no (start, end) pairs: its values lie between consecutive offsets. So describe the slices and
    # the gaps between them as 2n values over the whole buffer, and take every other one.
    offsets = np.empty(2 * count + 1, np.int32)
    offsets[0:-1:2] = starts
    offsets[1::2] = ends
    offsets[-1] = ends[-1]
    both = pa.BinaryArray.from_buffers(pa.binary(), 2 * count, [None, pa.py_buffer(offsets), pa.py_buffer(data)])
    return both.take(pa.array(np.arange(0, 2 * count, 2, dtype=np.int32)))


def bytes_and_offsets(array: Any) -> tuple[Bytes, Positions]:
    """Return the bytes of a binary or string array without nulls, and the offsets of its values in these bytes."""
    _, offsets_buffer, data_buffer = array.buffers()
    if not len(array) or offsets_buffer is None:
        return np.zeros(0, np.uint8), np.zeros(1, np.int64)
    offsets = np.frombuffer(offsets_buffer, np.int32)[array.offset : array.offset + len(array) + 1].astype(np.int64)
    data = np.frombuffer(data_buffer, np.uint8) if data_buffer is not None else np.zeros(0, np.uint8)
    first = int(offsets[0])
    return data[first : int(offsets[-1])], offsets - first


def regroup(array: Any, boundaries: Positions) -> Any:
    """Join consecutive values: value i of the result joins the values `boundaries[i]` to `boundaries[i + 1]`."""
    data, offsets = bytes_and_offsets(array)
    grouped = offsets[boundaries].astype(np.int32)
    return pa.BinaryArray.from_buffers(
        pa.binary(), len(boundaries) - 1, [None, pa.py_buffer(grouped), pa.py_buffer(np.ascontiguousarray(data))]
    )


def to_text(array: Any) -> Any:
    """Return bytes as strings. The server does not check encodings: invalid UTF-8 becomes replacement characters."""
    try:
        return array.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([value.decode("utf-8", "replace") for value in array.to_pylist()], pa.string())


def group_by_row(marks: Positions, offsets: Positions) -> tuple[Positions, Positions]:
    """Return, for consecutive rows between offsets, the first mark in each row and the number of its marks."""
    rows = len(offsets) - 1
    each = len(marks) // rows if rows else 0
    if each and each * rows == len(marks):
        # Nearly always all rows have the same number of marks. Checking that is much cheaper than searching.
        grid = marks.reshape(rows, each)
        if (grid[:, 0] >= offsets[:-1]).all() and (grid[:, -1] < offsets[1:]).all():
            return np.arange(0, len(marks), each), np.full(rows, each, np.int64)
    bounds = np.searchsorted(marks, offsets)
    return bounds[:-1], np.diff(bounds)


def parse_integers(data: Bytes, starts: Positions, ends: Positions) -> Positions:
    """Parse the decimal numbers in the slices; raise ValueError for anything else."""
    try:
        numbers = take_slices(data, starts, ends).cast(pa.string()).cast(pa.int64())
    except pa.ArrowInvalid as error:
        raise ValueError(str(error)) from error
    result: Positions = numbers.to_numpy(zero_copy_only=True)
    return result


def parse_fixed_width(digits: Bytes) -> Positions | None:
    """Parse the decimal numbers in the rows of a table of digits; None if it holds anything else.

    Eight digits are one number of 64 bits, in which adjacent digits become pairs, pairs fours, and fours eights.
    """
    rows, width = digits.shape
    whole = np.full((rows, -(-width // 8) * 8), 48, np.uint8)
    whole[:, whole.shape[1] - width :] = digits
    whole -= 48  # bytes below "0" wrap round
    if not width or whole.max(initial=0) > 9:
        return None
    eights = whole.view("<u8")
    eights = (eights * 10 + (eights >> 8)) & 0x00FF00FF00FF00FF
    eights = (eights * 100 + (eights >> 16)) & 0x0000FFFF0000FFFF
    columns = ((eights * 10_000 + (eights >> 32)) & 0xFFFFFFFF).astype(np.int64)
    numbers: Positions = columns[:, 0]
    for column in range(1, columns.shape[1]):
        numbers = numbers * 100_000_000 + columns[:, column]
    return numbers


def parse_number_before(data: Bytes, ends: Positions) -> tuple[Positions, Positions]:
    """Parse the decimal number that ends before each position; return it and its start.

    A byte that is not a digit must precede each number. A position without a digit before it gives 0.
    """
    values = np.zeros(len(ends), np.int64)
    starts = ends.copy()
    scale = 1
    open_ = np.ones(len(ends), np.bool_)
    for _ in range(18):
        digits = data[starts - 1] - np.uint8(48)  # wraps round below "0", so one comparison finds digits
        open_ &= digits <= 9
        if not open_.any():
            break
        values += np.where(open_, digits.astype(np.int64) * scale, 0)
        starts -= open_
        scale *= 10
    return values, starts


MSG_ID = "Nats-Msg-Id"
BATCH_HEADERS = ("Nats-Batch-Id", "Nats-Batch-Sequence", "Nats-Batch-Commit")
HEADERS_TYPE = pa.map_(pa.string(), pa.list_(pa.string()))

_FORBIDDEN_BYTES = np.zeros(256, np.bool_)
_FORBIDDEN_BYTES[[0, 10, 13]] = True  # NUL, line feed, carriage return: check_header refuses the same


@dataclass(frozen=True, slots=True)
class HeaderLines:
    """The `Name: value` lines of many blocks: positions in one buffer, and the lines of each message."""

    data: Bytes
    starts: Positions
    colons: Positions
    ends: Positions
    boundaries: Positions
    """Lines `boundaries[i]` to `boundaries[i + 1]` belong to message i."""

    @property
    def values(self) -> Positions:
        """The positions where values begin."""
        after = self.colons + 1
        spaced: Mask = (after < self.ends) & (self.data[np.minimum(after, len(self.data) - 1)] == 32)
        result: Positions = after + spaced
        return result

    def without(self, dropped: Mask) -> "HeaderLines":
        """Return the lines without the dropped ones."""
        kept = ~dropped
        counts: Positions = np.concatenate((np.zeros(1, np.int64), np.cumsum(kept, dtype=np.int64)))
        return HeaderLines(self.data, self.starts[kept], self.colons[kept], self.ends[kept], counts[self.boundaries])


def find_lines(data: Bytes, starts: Positions, ends: Positions) -> HeaderLines:
    """Find the header lines of the blocks `data[starts:ends]`; an empty slice is a message without headers."""
    blocks, offsets = bytes_and_offsets(take_slices(data, starts, ends))
    breaks = np.flatnonzero(blocks == 13)
    followed = blocks[np.minimum(breaks + 1, len(blocks) - 1)] == 10
    breaks = breaks if followed.all() else breaks[followed]
    if not len(breaks):
        none = np.zeros(0, np.int64)
        return HeaderLines(blocks, none, none, none, np.zeros(len(starts) + 1, np.int64))
    firsts, counts = group_by_row(breaks, offsets)
    # Each line ends at a line break and starts after the one before. The first line of a block is the version and the
    # last is empty: neither is a header.
    is_header = np.ones(len(breaks), np.bool_)
    is_header[firsts[counts > 0]] = False
    is_header[(firsts + counts - 1)[counts > 0]] = False
    which = np.flatnonzero(is_header)
    line_starts, line_ends = breaks[which - 1] + 2, breaks[which]
    boundaries = np.concatenate((np.zeros(1, np.int64), np.cumsum(np.maximum(counts - 2, 0))))
    colons = np.flatnonzero(blocks == 58)
    found, _ = group_by_row(colons, np.append(line_starts, len(blocks)))
    if len(colons) and len(which):
        colons = colons[np.minimum(found, len(colons) - 1)]
        bad = (colons >= line_ends) | (colons <= line_starts)
    else:
        colons, bad = line_starts, np.ones(len(which), np.bool_)
    lines = HeaderLines(blocks, line_starts, colons, line_ends, boundaries)
    return lines.without(bad) if bad.any() else lines  # a line without a name is not a header


def read_headers(data: Bytes, starts: Positions, ends: Positions) -> Any:
    """Return the blocks `data[starts:ends]` as a `map<string, list<string>>` array; an empty block is an empty map."""
    if (starts == ends).all():
        return no_headers(len(starts))
    alike = to_map_uniform(data, starts, ends)
    return to_map(find_lines(data, starts, ends)) if alike is None else alike


def read_blocks(blocks: Any) -> Any:
    """Return the blocks of a binary array without nulls as a `map<string, list<string>>` array."""
    data, offsets = bytes_and_offsets(blocks)
    return read_headers(data, offsets[:-1], offsets[1:])


def to_blocks(lines: HeaderLines) -> Any:
    """Return header lines as blocks, empty for a message without headers."""
    whole = regroup(join(take_slices(lines.data, lines.starts, lines.ends), b"\r\n"), lines.boundaries)
    return pc.if_else(pc.equal(pc.binary_length(whole), 0), whole, join(b"NATS/1.0\r\n", whole, b"\r\n"))


def to_map(lines: HeaderLines) -> Any:
    """Return header lines as a `map<string, list<string>>` array, one map (perhaps empty) per message."""
    names = take_slices(lines.data, lines.starts, lines.colons)
    values = to_text(take_slices(lines.data, lines.values, lines.ends))
    boundaries = lines.boundaries
    per_name = np.arange(len(names) + 1, dtype=np.int64)
    if len(names) and (boundaries[1:] - boundaries[:-1]).max() > 1:
        order, firsts = _group(names, boundaries)
        if len(firsts) < len(names):
            names, values = names.take(pa.array(order[firsts])), values.take(pa.array(order))
            per_name = np.append(firsts, len(order))
            boundaries = np.searchsorted(firsts, boundaries)
    lists = pa.ListArray.from_arrays(pa.array(per_name.astype(np.int32)), values, type=HEADERS_TYPE.item_type)
    return pa.MapArray.from_arrays(pa.array(boundaries.astype(np.int32)), to_text(names), lists, type=HEADERS_TYPE)


def to_map_uniform(data: Bytes, starts: Positions, ends: Positions) -> Any | None:
    """Convert blocks with the same names and line lengths to a map array; None for other blocks.

    Messages of one publisher nearly always have this layout. Their lines are then columns of a table, and no search is
    necessary.
    """
    rows, size = len(starts), int(ends[0] - starts[0]) if len(starts) else 0
    if size < len("NATS/1.0\r\n\r\n") or (ends - starts != size).any():
        return None
    table = bytes_and_offsets(take_slices(data, starts, ends))[0].reshape(rows, size)
    cells = _value_cells(table[0].tobytes())
    if cells is None or not cells:
        return None
    # The bytes between values are the same in each row, and values hold no line break: so all rows have these lines.
    edges = [0, *(edge for _, cell in cells for edge in (cell.start, cell.stop)), size]
    if any((table[:, a:b] != table[0, a:b]).any() for a, b in zip(edges[::2], edges[1::2], strict=True)):
        return None
    values = np.concatenate([table[:, cell] for _, cell in cells], axis=1).ravel()
    if (values == 13).any():
        return None
    names = [name for name, _ in cells]
    lists = pa.ListArray.from_arrays(
        pa.array(np.arange(rows * len(cells) + 1, dtype=np.int32)),
        to_text(_tiled([cell.stop - cell.start for _, cell in cells], rows, values)),
        type=HEADERS_TYPE.item_type,
    )
    tiled = _tiled([len(name) for name in names], rows, np.tile(np.frombuffer(b"".join(names), np.uint8), rows))
    group_by_row = pa.array(np.arange(0, rows * len(cells) + 1, len(cells), dtype=np.int32))
    return pa.MapArray.from_arrays(group_by_row, to_text(tiled), lists, type=HEADERS_TYPE)


def _value_cells(block: bytes) -> list[tuple[bytes, slice]] | None:
    """Return the header names of a block and the places of their values; None if one is empty, invalid or repeated."""
    *lines, last, rest = block.split(b"\r\n")
    found: dict[bytes, slice] = {}
    offset = len(lines[0]) + 2 if lines else 0
    for line in lines[1:]:
        name, colon, value = line.partition(b": ")
        if not name or not colon or b":" in name or not value or b"\r" in line or name in found:
            return None
        found[name] = slice(offset + len(name) + 2, offset + len(line))
        offset += len(line) + 2
    return None if last or rest else list(found.items())


def _tiled(lengths: list[int], rows: int, data: Bytes) -> Any:
    """Return values whose lengths repeat in each row as a `BinaryArray`."""
    offsets = np.zeros(len(lengths) * rows + 1, np.int32)
    np.cumsum(np.tile(np.array(lengths, np.int32), rows), out=offsets[1:])
    return pa.BinaryArray.from_buffers(pa.binary(), len(offsets) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def no_headers(rows: int) -> Any:
    """Return an array of empty maps."""
    return to_map(HeaderLines(np.zeros(0, np.uint8), *(np.zeros(0, np.int64),) * 3, np.zeros(rows + 1, np.int64)))


def _group(names: Any, boundaries: Positions) -> tuple[Positions, Positions]:
    """Return an order that groups the lines of one name in one message, and the start of each group in that order.

    Names keep the order of their first line, values keep their order.
    """
    codes = names.dictionary_encode().indices.to_numpy().astype(np.int64)
    rows = np.repeat(np.arange(len(boundaries) - 1), np.diff(boundaries))
    groups = rows * (int(codes.max()) + 1) + codes
    _, first_lines, inverse = np.unique(groups, return_index=True, return_inverse=True)
    leaders = first_lines[inverse]  # the first line with the name of this line
    order = np.argsort(leaders, kind="stable")
    sorted_leaders = leaders[order]
    firsts = np.flatnonzero(np.concatenate(([True], sorted_leaders[1:] != sorted_leaders[:-1])))
    return order, firsts


@dataclass(frozen=True, slots=True)
class EncodedHeaders:
    """The headers of a batch to publish: the lines of each message as one value, and which messages have an id."""

    lines: Any
    has_id: Mask


def is_batch_header(name: str) -> bool:
    """Return whether a header controls an atomic batch. Rows read from a stream carry those of their first publish."""
    return name in BATCH_HEADERS


def to_lines(
    headers: Any, *, first_index: int, has_other_id: Mask, is_excluded: Callable[[str], bool] = is_batch_header
) -> EncodedHeaders:
    """Return a map array as header lines, without excluded headers and without a message id that another replaces.

    Raise `InvalidHeader` for a header that cannot be sent; it names the message, counted from `first_index`.
    """
    group_by_row = _offsets(headers)
    names = headers.keys.slice(int(group_by_row[0]), int(group_by_row[-1] - group_by_row[0]))
    lists = headers.items.slice(int(group_by_row[0]), int(group_by_row[-1] - group_by_row[0]))
    per_name = _offsets(lists)
    values = lists.values.slice(int(per_name[0]), int(per_name[-1] - per_name[0]))
    boundaries = (per_name - per_name[0])[group_by_row - group_by_row[0]]
    rows = np.repeat(np.arange(len(headers)), np.diff(boundaries))
    spread = names.take(pa.array(np.repeat(np.arange(len(names)), np.diff(per_name))))
    _check(spread, values, rows + first_index)
    is_id = _equals(spread, MSG_ID)
    has_id = np.zeros(len(headers), np.bool_)
    has_id[rows[is_id]] = True
    dropped = is_id & has_other_id[rows]
    for name in pc.unique(spread).to_pylist():
        if name != MSG_ID and is_excluded(name):
            dropped |= _equals(spread, name)
    if dropped.any():
        kept = pa.array(~dropped)
        spread, values = spread.filter(kept), values.filter(kept)
        boundaries = np.concatenate((np.zeros(1, np.int64), np.cumsum(~dropped)))[boundaries]
    return EncodedHeaders(
        regroup(join(spread.cast(pa.binary()), b": ", values.cast(pa.binary()), b"\r\n"), boundaries), has_id
    )


def join(*parts: Any) -> Any:
    """Concatenate values row by row; a `bytes` part is the same in each row."""
    merged: list[Any] = []  # the cost is per part and row, so adjacent constants become one
    for part in parts:
        if isinstance(part, bytes) and merged and isinstance(merged[-1], bytes):
            merged[-1] += part
        elif not isinstance(part, bytes) or part:
            merged.append(part)
    scalars = (pa.scalar(part, pa.binary()) if isinstance(part, bytes) else part for part in merged)
    return pc.binary_join_element_wise(*scalars, pa.scalar(b"", pa.binary()))


def _offsets(array: Any) -> Positions:
    result: Positions = array.offsets.to_numpy().astype(np.int64)
    return result


def _equals(array: Any, value: str) -> Mask:
    result: Mask = pc.equal(array, value).to_numpy(zero_copy_only=False)
    return result


def _check(names: Any, values: Any, indices: Positions) -> None:
    if names.null_count or values.null_count:
        at = pc.index(pc.or_(pc.is_null(names), pc.is_null(values)), True).as_py()
        raise InvalidHeader(f"message {indices[at]}: a header name or value is null", fix="leave the header out")
    for name in pc.unique(names).to_pylist():
        try:
            check_header(name, "")
        except InvalidHeader as error:
            at = pc.index(names, name).as_py()
            raise InvalidHeader(f"message {indices[at]}: {error.message}", fix=error.fix) from error
    bad = find_forbidden_value(values)
    if bad is not None:
        raise InvalidHeader(
            f"message {indices[bad]}: the value of header {names[bad].as_py()!r} holds a line break or NUL",
            fix="encode it, for example in base64",
        )


def find_forbidden_value(values: Any) -> int | None:
    """Return the index of the first value that no header can carry, if any. The array must have no nulls."""
    data, offsets = bytes_and_offsets(values)
    bad = np.flatnonzero(_FORBIDDEN_BYTES[data])
    return int(np.searchsorted(offsets, bad[0], side="right")) - 1 if len(bad) else None

"""Extract columns from one large byte buffer: many slices at once, each copied exactly once, into Arrow arrays.

The frame parser finds positions with numpy; these functions turn pairs of positions into text, bytes and numbers.
"""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

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

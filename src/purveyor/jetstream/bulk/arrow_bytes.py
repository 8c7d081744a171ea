"""Cutting columns out of one big byte buffer: many slices at once, each copied exactly once, into Arrow arrays.

The frame cutter finds positions with numpy; these functions turn pairs of positions into text, bytes and numbers.
"""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Bytes: TypeAlias = npt.NDArray[np.uint8]
Positions: TypeAlias = npt.NDArray[np.int64]
Mask: TypeAlias = npt.NDArray[np.bool_]


def take(data: Bytes, starts: Positions, ends: Positions) -> Any:
    """The slices `data[starts:ends]` as a `BinaryArray`; they must ascend and not overlap."""
    count = len(starts)
    if not count:
        return pa.array([], pa.binary())
    # Arrow knows no array of (start, end) pairs, but one of what lies between neighbouring offsets: so describe slices
    # and the gaps between them as 2n values over the whole buffer, and take every other one.
    offsets = np.empty(2 * count + 1, np.int32)
    offsets[0:-1:2] = starts
    offsets[1::2] = ends
    offsets[-1] = ends[-1]
    both = pa.BinaryArray.from_buffers(pa.binary(), 2 * count, [None, pa.py_buffer(offsets), pa.py_buffer(data)])
    return both.take(pa.array(np.arange(0, 2 * count, 2, dtype=np.int32)))


def contents(array: Any) -> tuple[Bytes, Positions]:
    """The bytes of a binary or string array without nulls, as one run, and the offsets of its values in that run."""
    _, offsets_buffer, data_buffer = array.buffers()
    if not len(array) or offsets_buffer is None:
        return np.zeros(0, np.uint8), np.zeros(1, np.int64)
    offsets = np.frombuffer(offsets_buffer, np.int32)[array.offset : array.offset + len(array) + 1].astype(np.int64)
    data = np.frombuffer(data_buffer, np.uint8) if data_buffer is not None else np.zeros(0, np.uint8)
    first = int(offsets[0])
    return data[first : int(offsets[-1])], offsets - first


def regroup(array: Any, boundaries: Positions) -> Any:
    """Neighbouring values joined: value i of the result is the values `boundaries[i]` to `boundaries[i + 1]` in one."""
    data, offsets = contents(array)
    grouped = offsets[boundaries].astype(np.int32)
    return pa.BinaryArray.from_buffers(
        pa.binary(), len(boundaries) - 1, [None, pa.py_buffer(grouped), pa.py_buffer(np.ascontiguousarray(data))]
    )


def text(array: Any) -> Any:
    """Bytes as strings. The server checks no encoding: what is not UTF-8 is shown with replacement characters."""
    try:
        return array.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([value.decode("utf-8", "replace") for value in array.to_pylist()], pa.string())


def per_row(marks: Positions, offsets: Positions) -> tuple[Positions, Positions]:
    """For rows that lie side by side between offsets: which mark is the first in each row, and how many it has."""
    rows = len(offsets) - 1
    each = len(marks) // rows if rows else 0
    if each and each * rows == len(marks):
        # Nearly always rows are alike. Looking that up costs next to nothing; searching does.
        grid = marks.reshape(rows, each)
        if (grid[:, 0] >= offsets[:-1]).all() and (grid[:, -1] < offsets[1:]).all():
            return np.arange(0, len(marks), each), np.full(rows, each, np.int64)
    bounds = np.searchsorted(marks, offsets)
    return bounds[:-1], np.diff(bounds)


def integers(data: Bytes, starts: Positions, ends: Positions) -> Positions:
    """Decimal numbers in those slices; what is no number is a `ValueError`."""
    try:
        numbers = take(data, starts, ends).cast(pa.string()).cast(pa.int64())
    except pa.ArrowInvalid as error:
        raise ValueError(str(error)) from error
    result: Positions = numbers.to_numpy(zero_copy_only=True)
    return result


def fixed_numbers(digits: Bytes) -> Positions | None:
    """The decimal numbers in the rows of a table of digits; none if there is anything else in it.

    Eight digits are one number of 64 bits, in which neighbours become pairs, pairs fours, and fours eights.
    """
    rows, width = digits.shape
    whole = np.full((rows, -(-width // 8) * 8), 48, np.uint8)
    whole[:, whole.shape[1] - width :] = digits
    whole -= 48  # what is below "0" wraps round
    if not width or whole.max(initial=0) > 9:
        return None
    eights = whole.view("<u8")
    eights = (eights * 10 + (eights >> 8)) & 0x00FF00FF00FF00FF
    eights = (eights * 100 + (eights >> 16)) & 0x0000FFFF0000FFFF
    places = ((eights * 10_000 + (eights >> 32)) & 0xFFFFFFFF).astype(np.int64)
    numbers: Positions = places[:, 0]
    for place in range(1, places.shape[1]):
        numbers = numbers * 100_000_000 + places[:, place]
    return numbers


def number_left_of(data: Bytes, ends: Positions) -> tuple[Positions, Positions]:
    """The decimal number that ends just before each position, and where it starts.

    Something that is no digit must come before each number. Positions that follow no digit at all give 0.
    """
    values = np.zeros(len(ends), np.int64)
    starts = ends.copy()
    scale = 1
    open_ = np.ones(len(ends), np.bool_)
    for _ in range(18):
        digits = data[starts - 1] - np.uint8(48)  # wraps round below "0", so one comparison tells a digit
        open_ &= digits <= 9
        if not open_.any():
            break
        values += np.where(open_, digits.astype(np.int64) * scale, 0)
        starts -= open_
        scale *= 10
    return values, starts

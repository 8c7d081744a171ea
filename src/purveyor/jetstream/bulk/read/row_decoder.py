"""Frames of messages that a stream gave out, as rows of a record batch. Pure: no link, no waiting.

The two routes deliver differently. A consumer's message comes on its own subject, with sequence and time in the reply
subject; a direct get's comes on our inbox, with everything about it in headers that follow the message's own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa

from purveyor.jetstream.bulk import header_columns
from purveyor.jetstream.bulk.arrow_bytes import (
    Bytes,
    Mask,
    Positions,
    contents,
    fixed_numbers,
    integers,
    per_row,
    take,
    text,
)
from purveyor.jetstream.bulk.net.frame_parser import BrokenFrames, Frames, Lines

_SYSTEM_HEADERS: Final = (
    b"Nats-Stream",
    b"Nats-Subject",
    b"Nats-Sequence",
    b"Nats-Time-Stamp",
    b"Nats-Num-Pending",
    b"Nats-Last-Sequence",
)
_SUBJECT, _SEQUENCE, _TIME = -5, -4, -3  # places from the end
_REPLY_DOTS: Final = (8, 10, 11)


@dataclass(frozen=True, slots=True)
class Delivery:
    """Rows and, beside them, how far the reading has come."""

    batch: Any
    sequences: Positions
    first_count: int
    last_count: int
    """The consumer's own count of what it delivered: a jump means that something went missing on the way."""
    pending: int
    """How many messages followed the last one when it was sent."""


def from_consumer(frames: Frames, lines: Lines, schema: Any) -> Delivery:
    """Messages from a consumer; all frames must have a reply subject.

    It is `$JS.ACK.<stream>.<consumer>.<tries>.<sequence>.<count>.<time>.<pending>`; after `ACK` there may be domain and
    account, and then perhaps a random token at the end.
    """
    numbers = _alike(lines.replies) or _any(lines)
    columns: dict[str, Callable[[], Any]] = {
        "sequence": lambda: pa.array(numbers.sequences),
        "timestamp": lambda: pa.array(numbers.micros()).cast(pa.timestamp("us", tz="UTC")),
        "subject": lambda: _subjects(lines),
        "headers": lambda: _headers(frames, raw=pa.types.is_binary(schema.field("headers").type)),
        "data": lambda: take(frames.data, frames.payloads, frames.ends),
    }
    return Delivery(
        _build(columns, schema),
        numbers.sequences,
        first_count=numbers.first_count,
        last_count=numbers.last_count,
        pending=numbers.pending,
    )


@dataclass(frozen=True, slots=True)
class _Numbers:
    """What reply subjects say."""

    sequences: Positions
    micros: Callable[[], Positions]
    first_count: int
    last_count: int
    pending: int


def _alike(replies: Bytes | None) -> _Numbers | None:
    """Of replies that have their numbers at the same places, which nearly all that come together do."""
    if replies is None or not len(replies):
        return None
    dots = np.flatnonzero(replies[0] == 46)
    if len(dots) not in _REPLY_DOTS:
        return None
    at = 4 if len(dots) == 8 else 6
    ends = [*dots[at:].tolist(), replies.shape[1]]
    if not all((replies[:, dot] == 46).all() for dot in ends[:4]):
        return None
    sequences, counts, times, pending = (replies[:, ends[n] + 1 : ends[n + 1]] for n in range(4))
    numbers, count, left = fixed_numbers(sequences), fixed_numbers(counts[[0, -1]]), fixed_numbers(pending[-1:])
    if numbers is None or count is None or left is None:
        return None
    return _Numbers(numbers, lambda: _proven(fixed_numbers(times[:, :-3])), int(count[0]), int(count[1]), int(left[0]))


def _proven(times: Positions | None) -> Positions:
    if times is None:
        raise BrokenFrames("a consumer's reply subject without a time")
    return times


def _any(lines: Lines) -> _Numbers:
    replies, offsets = contents(take(lines.text, lines.reply_starts, lines.reply_ends))
    dots = np.flatnonzero(replies == 46)
    firsts, counts = per_row(dots, offsets)
    if (counts != counts[0]).any() or counts[0] not in _REPLY_DOTS:
        raise BrokenFrames("a consumer's reply subject of a kind not known")
    at = firsts + (5 if counts[0] == 8 else 7)  # the dot before the stream's sequence is one to the left
    pending_ends = offsets[1:] if counts[0] != 11 else dots[at + 3]
    first, last = at[:1], at[-1:]
    return _Numbers(
        integers(replies, dots[at - 1] + 1, dots[at]),
        lambda: integers(replies, dots[at + 1] + 1, dots[at + 2]) // 1000,
        first_count=int(integers(replies, dots[first] + 1, dots[first + 1])[0]),
        last_count=int(integers(replies, dots[last] + 1, dots[last + 1])[0]),
        pending=int(integers(replies, dots[last + 2] + 1, pending_ends[-1:])[0]),
    )


def _subjects(lines: Lines) -> Any:
    same = lines.subjects
    if same is not None and (same == same[0]).all():
        return pa.repeat(pa.scalar(same[0].tobytes().decode("utf-8", "replace"), pa.string()), len(same))
    return text(take(lines.text, lines.subject_starts, lines.subject_ends))


def _headers(frames: Frames, *, raw: bool) -> Any:
    blocks = frames.data, frames.bodies, frames.payloads
    return take(*blocks) if raw else header_columns.read(*blocks)


@dataclass(frozen=True, slots=True)
class DirectFrames:
    """Answers to a direct get: which are messages (the others are statuses), and their header lines."""

    frames: Frames
    lines: header_columns.HeaderLines
    is_message: Mask

    @classmethod
    def look(cls, frames: Frames) -> "DirectFrames":
        """A message is told by the headers that the server appends: it may have a status of its own."""
        lines = header_columns.find_lines(frames.data, frames.bodies, frames.payloads)
        counts = np.diff(lines.boundaries)
        is_message = counts >= len(_SYSTEM_HEADERS)
        for place, name in enumerate(_SYSTEM_HEADERS, start=-len(_SYSTEM_HEADERS)):
            at = np.maximum(lines.boundaries[1:] + place, 0)
            if len(lines.starts):
                is_message &= lines.colons[at] - lines.starts[at] == len(name)
        return cls(frames, lines, is_message)


def from_direct(found: DirectFrames, schema: Any) -> tuple[Any, Positions]:
    """Messages from a direct get, as a batch and their sequences."""
    if not found.is_message.all():
        found = DirectFrames.look(found.frames.only(found.is_message))
    lines, ends = found.lines, found.lines.boundaries[1:]
    values = lines.values

    def system(place: int) -> tuple[Positions, Positions]:
        return values[ends + place], lines.ends[ends + place]

    def own_headers() -> Any:
        dropped = np.zeros(len(lines.starts), np.bool_)
        for place in range(1, len(_SYSTEM_HEADERS) + 1):
            dropped[ends - place] = True
        own = lines.without(dropped)
        return (
            header_columns.to_blocks(own)
            if pa.types.is_binary(schema.field("headers").type)
            else header_columns.to_map(own)
        )

    sequences = integers(lines.data, *system(_SEQUENCE))
    columns: dict[str, Callable[[], Any]] = {
        "sequence": lambda: pa.array(sequences),
        "timestamp": lambda: _rfc3339(text(take(lines.data, *system(_TIME)))),
        "subject": lambda: text(take(lines.data, *system(_SUBJECT))),
        "headers": own_headers,
        "data": lambda: take(found.frames.data, found.frames.payloads, found.frames.ends),
    }
    return _build(columns, schema), sequences


def _build(columns: dict[str, Callable[[], Any]], schema: Any) -> Any:
    return pa.record_batch([columns[name]() for name in schema.names], schema=schema)


def _rfc3339(times: Any) -> Any:
    # The server drops trailing zeros of the fraction; Arrow reads any number of digits up to nanoseconds.
    return times.cast(pa.timestamp("ns", tz="UTC")).cast(pa.timestamp("us", tz="UTC"), safe=False)

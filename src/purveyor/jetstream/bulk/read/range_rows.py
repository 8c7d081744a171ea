"""The rows of a range that is read: the rest of the range, its subject filters, and frames decoded into record batches.

`RangeCursor` is the rest of the range. The server applies the subject filters that it supports; the others are applied
here.

The two routes of `read_range` deliver messages differently. A consumer delivers a message on its own subject, with
sequence and time in the reply subject. A direct get delivers it on our inbox, with its metadata in headers after the
message's own. Pure: no connection, no waiting.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from purveyor.jetstream.api import DIRECT_GET_HEADERS
from purveyor.jetstream.bulk import arrow_columns
from purveyor.jetstream.bulk.arrow_columns import (
    Bytes,
    Mask,
    Positions,
    bytes_and_offsets,
    group_by_row,
    parse_fixed_width,
    parse_integers,
    take_slices,
    to_text,
)
from purveyor.jetstream.bulk.net.frame_parser import Frames, MalformedFrames, MessageLines
from purveyor.jetstream.bulk.options import ReadOptions
from purveyor.model.name_rules import subject_matches

_GATHER_ABOVE_SEQUENCES = 5000


@dataclass(frozen=True, slots=True)
class RangeCursor:
    """The sequences `first` to `last` of a stream with the options of the read."""

    stream: str
    first: int
    last: int
    options: ReadOptions

    def clamp(self, first: int, last: int) -> "RangeCursor":
        """Return the part of the range between the first and last sequence of the stream."""
        return replace(self, first=max(self.first, first), last=min(self.last, last))

    def advance_to(self, first: int) -> "RangeCursor":
        """Return the rest of the range from a sequence on."""
        return replace(self, first=first)

    @property
    def length(self) -> int:
        """The maximum number of messages in the range."""
        return max(0, self.last - self.first + 1)

    @property
    def gather_bytes(self) -> int:
        """The bytes to collect before parsing: many in a long range; near the end, all that have arrived."""
        return self.options.batch_bytes if self.length > _GATHER_ABOVE_SEQUENCES else 1

    def schema(self, *, filtered_here: bool) -> Any:
        """Return the columns to build, including subjects if rows are filtered by subject here."""
        schema = self.options.schema
        if not filtered_here or "subject" in schema.names:
            return schema
        return replace(self.options, columns=("subject", *schema.names)).schema

    def batches(self, batch: Any, sequences: Positions, subjects: tuple[str, ...] = ()) -> list[tuple[Any, int]]:
        """Split a delivery into batches of the requested size, each with the sequence that follows it.

        Rows outside the range, and rows that match none of the subjects, are dropped.
        """
        inside = (sequences >= self.first) & (sequences <= self.last)
        if not inside.all():
            batch, sequences = batch.filter(pa.array(inside)), sequences[inside]
        result = []
        rows = self.options.batch_rows
        for start in range(0, batch.num_rows, rows):
            part = batch.slice(start, rows)
            if subjects:
                part = filter_batch(part, subjects)
            if part.schema != self.options.schema:
                part = part.select(self.options.schema.names)
            result.append((part, int(sequences[min(start + rows, len(sequences)) - 1]) + 1))
        return result


def remove_covered(subjects: tuple[str, ...]) -> tuple[str, ...]:
    """Return the patterns without those that another one covers (the server refuses such a pair).

    >>> remove_covered(("orders.>", "orders.new", "bills"))
    ('orders.>', 'bills')
    """
    distinct = tuple(dict.fromkeys(subjects))
    kept = tuple(one for one in distinct if not any(one != other and covers(other, one) for other in distinct))
    return () if ">" in kept else kept


def covers(wide: str, narrow: str) -> bool:
    """Return whether `wide` matches each subject that `narrow` matches.

    A wildcard counts as an ordinary token, except that `*` does not cover a `>`.
    """
    if narrow.endswith(">") and not wide.endswith(">"):
        return False
    return subject_matches(wide, narrow)


def to_regex(subjects: tuple[str, ...]) -> str:
    """Return a regular expression for the subjects that any of the patterns matches."""
    return "^(?:" + "|".join(map(_pattern_regex, subjects)) + ")$"


def filter_batch(batch: Any, subjects: tuple[str, ...]) -> Any:
    """Return the rows of a batch whose subject matches any of the patterns."""
    column = batch.column(batch.schema.get_field_index("subject"))
    return batch.filter(pc.match_substring_regex(column, to_regex(subjects)))


def _pattern_regex(subject: str) -> str:
    tokens = [r"[^.]+" if token == "*" else re.escape(token) for token in subject.split(".")]
    if tokens[-1] == re.escape(">"):
        tokens[-1] = ".+"
    return r"\.".join(tokens)


_SYSTEM_HEADERS: Final = tuple(name.encode() for name in DIRECT_GET_HEADERS)
_SUBJECT, _SEQUENCE, _TIME = -5, -4, -3  # indices from the end
_REPLY_DOTS: Final = (8, 10, 11)


@dataclass(frozen=True, slots=True)
class ConsumerRows:
    """Rows of a consumer, and the progress of the read."""

    batch: Any
    sequences: Positions
    first_count: int
    last_count: int
    """The consumer's count of its deliveries: a gap means that messages were lost on the way."""
    pending: int
    """The number of messages after the last one when it was sent."""


def from_consumer(frames: Frames, lines: MessageLines, schema: Any) -> ConsumerRows:
    """Decode messages from a consumer; all frames must have a reply subject.

    It is `$JS.ACK.<stream>.<consumer>.<tries>.<sequence>.<count>.<time>.<pending>`; after `ACK` there may be domain and
    account, and then perhaps a random token at the end.
    """
    numbers = _parse_uniform_replies(lines.replies) or _parse_any_replies(lines)
    columns: dict[str, Callable[[], Any]] = {
        "sequence": lambda: pa.array(numbers.sequences),
        "timestamp": lambda: pa.array(numbers.micros()).cast(pa.timestamp("us", tz="UTC")),
        "subject": lambda: _subjects(lines),
        "headers": lambda: _headers(frames, raw=pa.types.is_binary(schema.field("headers").type)),
        "data": lambda: take_slices(frames.data, frames.payloads, frames.ends),
    }
    return ConsumerRows(
        _build(columns, schema),
        numbers.sequences,
        first_count=numbers.first_count,
        last_count=numbers.last_count,
        pending=numbers.pending,
    )


@dataclass(frozen=True, slots=True)
class _ReplyNumbers:
    """The numbers in reply subjects."""

    sequences: Positions
    micros: Callable[[], Positions]
    first_count: int
    last_count: int
    pending: int


def _parse_uniform_replies(replies: Bytes | None) -> _ReplyNumbers | None:
    """Parse replies with their numbers at the same places, the common case; None for others."""
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
    numbers, count, left = (
        parse_fixed_width(sequences),
        parse_fixed_width(counts[[0, -1]]),
        parse_fixed_width(pending[-1:]),
    )
    if numbers is None or count is None or left is None:
        return None
    return _ReplyNumbers(
        numbers, lambda: _require_times(parse_fixed_width(times[:, :-3])), int(count[0]), int(count[1]), int(left[0])
    )


def _require_times(times: Positions | None) -> Positions:
    if times is None:
        raise MalformedFrames("a consumer's reply subject without a time")
    return times


def _parse_any_replies(lines: MessageLines) -> _ReplyNumbers:
    replies, offsets = bytes_and_offsets(take_slices(lines.text, lines.reply_starts, lines.reply_ends))
    dots = np.flatnonzero(replies == 46)
    firsts, counts = group_by_row(dots, offsets)
    if (counts != counts[0]).any() or counts[0] not in _REPLY_DOTS:
        raise MalformedFrames("a consumer's reply subject of an unknown kind")
    at = firsts + (5 if counts[0] == 8 else 7)  # the dot before the stream's sequence is one to the left
    pending_ends = offsets[1:] if counts[0] != 11 else dots[at + 3]
    first, last = at[:1], at[-1:]
    return _ReplyNumbers(
        parse_integers(replies, dots[at - 1] + 1, dots[at]),
        lambda: parse_integers(replies, dots[at + 1] + 1, dots[at + 2]) // 1000,
        first_count=int(parse_integers(replies, dots[first] + 1, dots[first + 1])[0]),
        last_count=int(parse_integers(replies, dots[last] + 1, dots[last + 1])[0]),
        pending=int(parse_integers(replies, dots[last + 2] + 1, pending_ends[-1:])[0]),
    )


def _subjects(lines: MessageLines) -> Any:
    same = lines.subjects
    if same is not None and (same == same[0]).all():
        return pa.repeat(pa.scalar(same[0].tobytes().decode("utf-8", "replace"), pa.string()), len(same))
    return to_text(take_slices(lines.text, lines.subject_starts, lines.subject_ends))


def _headers(frames: Frames, *, raw: bool) -> Any:
    blocks = frames.data, frames.bodies, frames.payloads
    return take_slices(*blocks) if raw else arrow_columns.read_headers(*blocks)


@dataclass(frozen=True, slots=True)
class DirectFrames:
    """Replies to a direct get: which are messages (the others are statuses), and their header lines."""

    frames: Frames
    lines: arrow_columns.HeaderLines
    is_message: Mask

    @classmethod
    def parse(cls, frames: Frames) -> "DirectFrames":
        """Find the messages by the headers that the server appends: a message may have its own status."""
        lines = arrow_columns.find_lines(frames.data, frames.bodies, frames.payloads)
        counts = np.diff(lines.boundaries)
        is_message = counts >= len(_SYSTEM_HEADERS)
        for offset, name in enumerate(_SYSTEM_HEADERS, start=-len(_SYSTEM_HEADERS)):
            at = np.maximum(lines.boundaries[1:] + offset, 0)
            if len(lines.starts):
                is_message &= lines.colons[at] - lines.starts[at] == len(name)
        return cls(frames, lines, is_message)


def from_direct(found: DirectFrames, schema: Any) -> tuple[Any, Positions]:
    """Decode messages from a direct get; return a batch and their sequences."""
    if not found.is_message.all():
        found = DirectFrames.parse(found.frames.select(found.is_message))
    lines, ends = found.lines, found.lines.boundaries[1:]
    values = lines.values

    def system(offset: int) -> tuple[Positions, Positions]:
        return values[ends + offset], lines.ends[ends + offset]

    def own_headers() -> Any:
        dropped = np.zeros(len(lines.starts), np.bool_)
        for offset in range(1, len(_SYSTEM_HEADERS) + 1):
            dropped[ends - offset] = True
        own = lines.without(dropped)
        return (
            arrow_columns.to_blocks(own)
            if pa.types.is_binary(schema.field("headers").type)
            else arrow_columns.to_map(own)
        )

    sequences = parse_integers(lines.data, *system(_SEQUENCE))
    columns: dict[str, Callable[[], Any]] = {
        "sequence": lambda: pa.array(sequences),
        "timestamp": lambda: _rfc3339(to_text(take_slices(lines.data, *system(_TIME)))),
        "subject": lambda: to_text(take_slices(lines.data, *system(_SUBJECT))),
        "headers": own_headers,
        "data": lambda: take_slices(found.frames.data, found.frames.payloads, found.frames.ends),
    }
    return _build(columns, schema), sequences


def _build(columns: dict[str, Callable[[], Any]], schema: Any) -> Any:
    return pa.record_batch([columns[name]() for name in schema.names], schema=schema)


def _rfc3339(times: Any) -> Any:
    # The server drops trailing zeros of the fraction; Arrow reads any number of digits up to nanoseconds.
    return times.cast(pa.timestamp("ns", tz="UTC")).cast(pa.timestamp("us", tz="UTC"), safe=False)

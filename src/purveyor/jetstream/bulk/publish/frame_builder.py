"""Build publish frames from the rows of a record batch, and check all rows before any of them is sent.

A frame is `HPUB <subject> <reply> <header size> <total size>`, the headers and the payload; Arrow joins build frames
column by column. Every message has headers: an id, by which the server recognises a duplicate, or an expectation.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from purveyor.jetstream.api import MESSAGE_TOO_LARGE
from purveyor.jetstream.bulk.arrow_columns import (
    HEADERS_TYPE,
    MSG_ID,
    Positions,
    find_forbidden_value,
    is_batch_header,
    join,
    to_lines,
)
from purveyor.model.errors import InvalidHeader, InvalidInput, InvalidSubject, PublishRefused
from purveyor.model.name_rules import check_subject

MAX_SUBJECT_BYTES: Final = 3000
"""A server with default settings takes 4096 bytes in the first line of a frame; reply and sizes need some of them."""

# Printable ASCII without wildcards, tokens separated by dots: such subjects need no further check.
_PLAIN_SUBJECT: Final = r"^[!-)+\-/-=?-~]+(\.[!-)+\-/-=?-~]+)*$"

_HEADER_LINES: Final = r"^(?:[!-9;-~]+: [^\r\n\x00]*\r\n)*$"
_SERVER_HEADER: Final = r"(?:^|\n)(?i:nats-)"


@dataclass(frozen=True, slots=True)
class PreparedRows:
    """Checked messages of one batch with their header lines, ready for framing."""

    first_index: int
    subjects: Any
    header_lines: Any
    """The header lines of each message, without the version line and the empty last line."""
    payloads: Any
    subject: bytes | None = None
    """The subject, if all messages have the same."""

    def __len__(self) -> int:
        return len(self.subjects)

    def slice(self, start: int, count: int) -> "PreparedRows":
        """Return consecutive messages without copying."""
        return PreparedRows(
            self.first_index + start,
            self.subjects.slice(start, count),
            self.header_lines.slice(start, count),
            self.payloads.slice(start, count),
            self.subject,
        )

    def sizes(self) -> Positions:
        """Return the approximate size of each message on the wire, in bytes."""
        sizes = np.full(len(self), 100, np.int64)
        for column in (self.subjects, self.header_lines, self.payloads):
            sizes += pc.binary_length(column).to_numpy()
        return sizes


@dataclass(frozen=True, slots=True)
class FrameOptions:
    """Settings that all messages of one call share."""

    id_prefix: bytes | None
    """A missing message id becomes this prefix and the index of the message; None: it stays missing."""
    expected_stream: str | None
    max_payload: int
    is_excluded: Callable[[str], bool] = is_batch_header
    """A predicate for headers that are not sent."""


def prepare(batch: Any, first_index: int, frame_options: FrameOptions) -> PreparedRows:
    """Check the rows of a record batch; the error for an invalid row names the index of its message."""
    subjects = _column(batch, "subject", pa.string(), first_index)
    payloads = _column(batch, "data", pa.binary(), first_index)
    subject = _check_subjects(subjects, first_index)
    lines = _header_lines(batch, first_index, frame_options)
    rows = PreparedRows(first_index, subjects.cast(pa.binary()), lines, payloads, subject)
    _check_sizes(rows, frame_options.max_payload)
    return rows


def build_frames(rows: PreparedRows, *, replies: Any = None, extra_lines: Any = b"") -> Any:
    """Return a `BinaryArray` of publish frames. Each value of `replies` begins with a space, or is empty."""
    header_sizes = pc.add(pc.binary_length(rows.header_lines), len("NATS/1.0\r\n\r\n"))
    if not isinstance(extra_lines, bytes):
        header_sizes = pc.add(header_sizes, pc.binary_length(extra_lines))
    totals = pc.add(header_sizes, pc.binary_length(rows.payloads))
    return join(
        b"HPUB ",
        rows.subjects if rows.subject is None else rows.subject,
        b"" if replies is None else replies,
        b" ",
        _sizes(header_sizes),
        b" ",
        _sizes(totals),
        b"\r\nNATS/1.0\r\n",
        rows.header_lines,
        extra_lines,
        b"\r\n",
        rows.payloads,
        b"\r\n",
    )


def build_frame(rows: PreparedRows, row: int, *, reply: bytes, extra_lines: bytes) -> bytes:
    """Return the publish frame of one message, for a few messages that differ."""
    headers = b"NATS/1.0\r\n%b%b\r\n" % (rows.header_lines[row].as_py(), extra_lines)
    payload = rows.payloads[row].as_py()
    sizes = len(headers), len(headers) + len(payload)
    return b"HPUB %b%b %d %d\r\n%b%b\r\n" % (rows.subjects[row].as_py(), reply, *sizes, headers, payload)


def _sizes(numbers: Any) -> Any:
    """Return numbers as digits; a single value if all are the same, which saves a column in the join."""
    extent = pc.min_max(numbers)
    least, most = extent["min"].as_py(), extent["max"].as_py()
    return b"%d" % least if least == most and least is not None else to_digits(numbers)


def to_digits(numbers: Any) -> Any:
    """Return numbers as decimal digits."""
    return pc.cast(pc.cast(numbers, pa.string()), pa.binary())


def index_digits(rows: PreparedRows) -> Any:
    """Return the index of each message as decimal digits."""
    return to_digits(pa.array(np.arange(rows.first_index, rows.first_index + len(rows), dtype=np.int64)))


def _column(batch: Any, name: str, kind: Any, first_index: int) -> Any:
    column_index = batch.schema.get_field_index(name)
    if column_index < 0:
        raise InvalidInput(
            f"messages to publish have no column {name!r}, only {', '.join(batch.schema.names)}",
            fix="columns are subject, data, and optionally headers and msg_id",
        )
    column = batch.column(column_index)
    if column.null_count:
        at = pc.index(pc.is_null(column), True).as_py() + first_index
        raise InvalidInput(f"message {at} has no {name} (null)", fix=f"fill the column {name}")
    return _cast(column, kind, name)


def _cast(column: Any, kind: Any, name: str) -> Any:
    if column.type == kind:
        return column
    try:
        return column.cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise InvalidInput(f"column {name!r} is {column.type}, not {kind}", fix="cast it") from error


def _check_subjects(subjects: Any, first_index: int) -> bytes | None:
    """Raise InvalidSubject for an invalid subject; return the subject of all messages, if there is only one."""
    distinct = pc.unique(subjects)
    unusual = distinct.filter(pc.invert(pc.match_substring_regex(distinct, _PLAIN_SUBJECT)))
    for subject in unusual.to_pylist():
        try:
            check_subject(subject)
        except InvalidSubject as error:
            at = pc.index(subjects, subject).as_py() + first_index
            raise InvalidSubject(f"message {at}: {error.message}", fix=error.fix) from error
    lengths = pc.binary_length(distinct)
    if len(lengths) and pc.max(lengths).as_py() > MAX_SUBJECT_BYTES:
        subject = distinct[pc.index(pc.greater(lengths, MAX_SUBJECT_BYTES), True).as_py()]
        at = pc.index(subjects, subject).as_py() + first_index
        raise InvalidSubject(
            f"message {at}: its subject has {len(subject.as_py().encode())} bytes, the limit is {MAX_SUBJECT_BYTES}",
            fix="shorten it",
        )
    return distinct[0].as_py().encode() if len(distinct) == 1 else None


def _header_lines(batch: Any, first_index: int, frame_options: FrameOptions) -> Any:
    count = batch.num_rows
    ids = _given_ids(batch, first_index)
    given = pc.is_valid(ids).to_numpy(zero_copy_only=False)
    lines: Any = b""
    needs_id = ~given
    column_index = batch.schema.get_field_index("headers")
    lines_index = batch.schema.get_field_index("header_lines")
    if lines_index >= 0:
        lines = _check_lines(_cast(batch.column(lines_index), pa.binary(), "header_lines"), first_index)
    elif column_index >= 0:
        written = to_lines(
            _cast(batch.column(column_index), HEADERS_TYPE, "headers"),
            first_index=first_index,
            has_other_id=given,
            is_excluded=frame_options.is_excluded,
        )
        lines = written.lines
        needs_id &= ~written.has_id
    if frame_options.id_prefix is not None and needs_id.any():
        numbers = to_digits(pa.array(np.arange(first_index, first_index + count, dtype=np.int64)))
        ids = pc.if_else(pa.array(needs_id), join(frame_options.id_prefix, numbers), ids)
    expected = (
        b""
        if frame_options.expected_stream is None
        else f"Nats-Expected-Stream: {frame_options.expected_stream}\r\n".encode()
    )
    if not ids.null_count:
        return join(f"{MSG_ID}: ".encode(), ids, b"\r\n", lines, expected)
    id_lines = pc.fill_null(join(f"{MSG_ID}: ".encode(), ids, b"\r\n"), b"")
    return join(id_lines, lines, expected)


def _check_lines(lines: Any, first_index: int) -> Any:
    """Return encoded header lines; raise InvalidHeader for those that no header may have, or the id of a message."""
    fine = pc.and_not(pc.match_substring_regex(lines, _HEADER_LINES), pc.match_substring_regex(lines, _SERVER_HEADER))
    if lines.null_count or not pc.all(fine).as_py():
        at = first_index + pc.index(pc.fill_null(fine, False), False).as_py()
        raise InvalidHeader(
            f"message {at}: its header_lines are not lines of the form 'Name: value'",
            fix="end each line with a carriage return and a line feed; headers of the server have columns of their own",
        )
    return lines


def _given_ids(batch: Any, first_index: int) -> Any:
    """Return message ids as bytes, null if missing. An empty id counts as missing, as for the server."""
    column_index = batch.schema.get_field_index("msg_id")
    if column_index < 0:
        return pa.nulls(batch.num_rows, pa.binary())
    ids = _cast(batch.column(column_index), pa.string(), "msg_id")
    bad = find_forbidden_value(pc.fill_null(ids, pa.scalar("", pa.string())))
    if bad is not None:
        raise InvalidHeader(f"message {first_index + bad}: its msg_id holds a line break or NUL", fix="take them out")
    if pc.min(pc.binary_length(ids)).as_py() == 0:
        ids = pc.if_else(pc.equal(pc.binary_length(ids), 0), pa.scalar(None, pa.string()), ids)
    return ids.cast(pa.binary())


def _check_sizes(rows: PreparedRows, limit: int) -> None:
    if not len(rows):
        return
    sizes = pc.add(pc.binary_length(rows.payloads), pc.binary_length(rows.header_lines))
    room = limit - len("NATS/1.0\r\n\r\n")
    if pc.max(sizes).as_py() <= room:
        return
    at = pc.index(pc.greater(sizes, room), True).as_py()
    refusal_error = PublishRefused(
        f"message {rows.first_index + at} has {sizes[at].as_py() + limit - room} bytes with its headers, the server"
        f" takes {limit} (max_payload)",
        fix="make it smaller, or raise max_payload of the server",
        code=400,
        err_code=MESSAGE_TOO_LARGE,
    )
    refusal_error.index = rows.first_index + at
    raise refusal_error

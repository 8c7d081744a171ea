"""The last step of everything sent: rows of a batch become publish frames, checked before any of them is sent.

`HPUB <subject> <reply> <header size> <total size>`, the headers, the payload: built column by column with Arrow joins.
Every message of ours has headers: an id, by which the server recognises one sent again, or what is expected of it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from purveyor.jetstream.api_errors import MESSAGE_TOO_LARGE
from purveyor.jetstream.bulk.arrow_bytes import Positions
from purveyor.jetstream.bulk.header_columns import (
    MSG_ID,
    TYPE,
    first_unspeakable,
    is_batch_header,
    join,
    to_lines,
)
from purveyor.model.errors import InvalidHeader, InvalidInput, InvalidSubject, PublishRefused
from purveyor.model.name_rules import check_subject

LONGEST_SUBJECT: Final = 3000
"""The first line of a frame may have 4096 bytes on a server with default settings; reply and sizes need some."""

# Printable ASCII without the dot and without wildcards: subjects that need no closer look.
_PLAIN_SUBJECT: Final = r"^[!-)+\-/-=?-~]+(\.[!-)+\-/-=?-~]+)*$"


@dataclass(frozen=True, slots=True)
class Rows:
    """Messages of one batch with everything that is sent along except the reply, checked and ready for framing."""

    first_index: int
    subjects: Any
    header_lines: Any
    """The header lines of each message without the version line before and the empty line after them."""
    payloads: Any
    subject: bytes | None = None
    """The subject, if all have the same."""

    def __len__(self) -> int:
        return len(self.subjects)

    def slice(self, start: int, count: int) -> "Rows":
        """Some neighbouring messages, without copying."""
        return Rows(
            self.first_index + start,
            self.subjects.slice(start, count),
            self.header_lines.slice(start, count),
            self.payloads.slice(start, count),
            self.subject,
        )

    def sizes(self) -> Positions:
        """About how many bytes each message takes on the wire."""
        sizes = np.full(len(self), 100, np.int64)
        for column in (self.subjects, self.header_lines, self.payloads):
            sizes += pc.binary_length(column).to_numpy()
        return sizes


@dataclass(frozen=True, slots=True)
class Envelope:
    """What is the same for all messages of one call."""

    id_prefix: bytes | None
    """Message ids that are not given are this and the index of the message; None: there are none then."""
    expected_stream: str | None
    max_payload: int
    left_out: Callable[[str], bool] = is_batch_header
    """Headers that are not sent along."""


def prepare(batch: Any, first_index: int, envelope: Envelope) -> Rows:
    """The rows of a record batch, checked; what cannot be sent is refused with the index of its message."""
    subjects = _column(batch, "subject", pa.string(), first_index)
    payloads = _column(batch, "data", pa.binary(), first_index)
    subject = _check_subjects(subjects, first_index)
    lines = _header_lines(batch, first_index, envelope)
    rows = Rows(first_index, subjects.cast(pa.binary()), lines, payloads, subject)
    _check_sizes(rows, envelope.max_payload)
    return rows


def frames(rows: Rows, *, replies: Any = None, extra_lines: Any = b"") -> Any:
    """A `BinaryArray` of whole publish frames. `replies` are with a space before them, or empty."""
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


def frame(rows: Rows, row: int, *, reply: bytes, extra_lines: bytes) -> bytes:
    """The publish frame of one message: for a few that differ, where columns do not pay."""
    headers = b"NATS/1.0\r\n%b%b\r\n" % (rows.header_lines[row].as_py(), extra_lines)
    payload = rows.payloads[row].as_py()
    sizes = len(headers), len(headers) + len(payload)
    return b"HPUB %b%b %d %d\r\n%b%b\r\n" % (rows.subjects[row].as_py(), reply, *sizes, headers, payload)


def _sizes(numbers: Any) -> Any:
    """As digits; one value where all are the same, which spares the joining a column."""
    extent = pc.min_max(numbers)
    least, most = extent["min"].as_py(), extent["max"].as_py()
    return b"%d" % least if least == most and least is not None else decimal(numbers)


def decimal(numbers: Any) -> Any:
    """Numbers as their digits."""
    return pc.cast(pc.cast(numbers, pa.string()), pa.binary())


def indices(rows: Rows) -> Any:
    """The index of each message, as digits."""
    return decimal(pa.array(np.arange(rows.first_index, rows.first_index + len(rows), dtype=np.int64)))


def _column(batch: Any, name: str, kind: Any, first_index: int) -> Any:
    place = batch.schema.get_field_index(name)
    if place < 0:
        raise InvalidInput(
            f"messages to publish have no column {name!r}, only {', '.join(batch.schema.names)}",
            fix="columns are subject, data, and optionally headers and msg_id",
        )
    column = batch.column(place)
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
    """Refuse what cannot be a subject; the one subject of all messages, if there is only one."""
    distinct = pc.unique(subjects)
    unusual = distinct.filter(pc.invert(pc.match_substring_regex(distinct, _PLAIN_SUBJECT)))
    for subject in unusual.to_pylist():
        try:
            check_subject(subject)
        except InvalidSubject as error:
            at = pc.index(subjects, subject).as_py() + first_index
            raise InvalidSubject(f"message {at}: {error.message}", fix=error.fix) from error
    lengths = pc.binary_length(distinct)
    if len(lengths) and pc.max(lengths).as_py() > LONGEST_SUBJECT:
        subject = distinct[pc.index(pc.greater(lengths, LONGEST_SUBJECT), True).as_py()]
        at = pc.index(subjects, subject).as_py() + first_index
        raise InvalidSubject(
            f"message {at}: its subject has {len(subject.as_py().encode())} bytes, the limit is {LONGEST_SUBJECT}",
            fix="shorten it",
        )
    return distinct[0].as_py().encode() if len(distinct) == 1 else None


def _header_lines(batch: Any, first_index: int, envelope: Envelope) -> Any:
    count = batch.num_rows
    ids = _given_ids(batch, first_index)
    given = pc.is_valid(ids).to_numpy(zero_copy_only=False)
    lines: Any = b""
    needs_id = ~given
    place = batch.schema.get_field_index("headers")
    if place >= 0:
        written = to_lines(
            _cast(batch.column(place), TYPE, "headers"),
            first_index=first_index,
            has_other_id=given,
            left_out=envelope.left_out,
        )
        lines = written.lines
        needs_id &= ~written.has_id
    if envelope.id_prefix is not None and needs_id.any():
        numbers = decimal(pa.array(np.arange(first_index, first_index + count, dtype=np.int64)))
        ids = pc.if_else(pa.array(needs_id), join(envelope.id_prefix, numbers), ids)
    expected = (
        b"" if envelope.expected_stream is None else f"Nats-Expected-Stream: {envelope.expected_stream}\r\n".encode()
    )
    if not ids.null_count:
        return join(f"{MSG_ID}: ".encode(), ids, b"\r\n", lines, expected)
    id_lines = pc.fill_null(join(f"{MSG_ID}: ".encode(), ids, b"\r\n"), b"")
    return join(id_lines, lines, expected)


def _given_ids(batch: Any, first_index: int) -> Any:
    """Message ids as bytes, null where there is none; an empty one is none (the server does not count it either)."""
    place = batch.schema.get_field_index("msg_id")
    if place < 0:
        return pa.nulls(batch.num_rows, pa.binary())
    ids = _cast(batch.column(place), pa.string(), "msg_id")
    bad = first_unspeakable(pc.fill_null(ids, pa.scalar("", pa.string())))
    if bad is not None:
        raise InvalidHeader(f"message {first_index + bad}: its msg_id holds a line break or NUL", fix="take them out")
    if pc.min(pc.binary_length(ids)).as_py() == 0:
        ids = pc.if_else(pc.equal(pc.binary_length(ids), 0), pa.scalar(None, pa.string()), ids)
    return ids.cast(pa.binary())


def _check_sizes(rows: Rows, limit: int) -> None:
    if not len(rows):
        return
    sizes = pc.add(pc.binary_length(rows.payloads), pc.binary_length(rows.header_lines))
    room = limit - len("NATS/1.0\r\n\r\n")
    if pc.max(sizes).as_py() <= room:
        return
    at = pc.index(pc.greater(sizes, room), True).as_py()
    refused = PublishRefused(
        f"message {rows.first_index + at} has {sizes[at].as_py() + limit - room} bytes with its headers, the server"
        f" takes {limit} (max_payload)",
        fix="make it smaller, or raise max_payload of the server",
        code=400,
        err_code=MESSAGE_TOO_LARGE,
    )
    refused.index = rows.first_index + at
    raise refused

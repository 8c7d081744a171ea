"""Parse the server's replies to publishes, match them to their messages, and interpret them for `append_once`.

A reply is matched to its message by the reply subject. numpy parses the common reply, `{"stream":"ORDERS","seq":7}`,
thousands at a time. Any other reply (an error, a duplicate, a domain, a reply that is not from a stream) is parsed one
by one as JSON.

For `append_once`, this module finds the last position of a target and decides what to do about a refusal; the writer
acts. The server checks the expectations of a batch before it checks for known message ids, so a conflict is always
reported as a conflict. A row that is too large for the stream is reported as an incomplete batch, unless it is the last
row. So the writer repeats an unexplained refusal with fewer rows: the server refuses a single row with the real reason.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from purveyor.jetstream import headers
from purveyor.jetstream.address import Address
from purveyor.jetstream.api import (
    API_PREFIX,
    FIXES,
    MESSAGE_NOT_FOUND,
    MESSAGE_TOO_LARGE,
    NO_RESPONDERS,
    STREAM_NOT_FOUND,
    STREAM_SEALED,
    WRONG_LAST_SEQUENCE,
    WRONG_LAST_SEQUENCE_UNKNOWN,
    ErrorReply,
    Receipt,
    decode_stored_data,
    decode_stored_headers,
    encode_request,
    parse_publish_reply,
)
from purveyor.jetstream.bulk.arrow_columns import (
    Bytes,
    Mask,
    Positions,
    bytes_and_offsets,
    group_by_row,
    parse_integers,
    parse_number_before,
    take_slices,
)
from purveyor.jetstream.bulk.net.frame_parser import Frames, header_block, parse_message_lines, parse_status
from purveyor.jetstream.bulk.options import ReadOptions, RefusalKind, Target
from purveyor.jetstream.bulk.read.read_range import read_range
from purveyor.jetstream.config import INCARNATION
from purveyor.model.delivery_state import acked_position
from purveyor.model.errors import NoAnswer

DUPLICATE_IN_BATCH = 10201
_OPENING = np.frombuffer(b'{"stream":"', np.uint8)
_MIDDLE = np.frombuffer(b'","seq":', np.uint8)


@dataclass(frozen=True, slots=True)
class StreamAcks:
    """Messages that one stream acknowledged: stored now, or duplicates of stored messages."""

    stream: str
    indices: Positions
    last_sequence: int
    duplicates: int


@dataclass(frozen=True, slots=True)
class ParsedReplies:
    """All replies found in one receive buffer."""

    acks: tuple[StreamAcks, ...]
    refusals: dict[int, ErrorReply]


def parse_replies(
    frames: Frames, *, sid: int, prefix_size: int, to_indices: Callable[[Positions], Positions]
) -> ParsedReplies:
    """Parse the replies to the subscription `sid`. Their subjects are a prefix of `prefix_size` bytes and a number.

    `to_indices` maps these numbers, in the order of the replies, to the indices of the messages.
    """
    lines = parse_message_lines(frames)
    ours = lines.sids == sid
    if not ours.any():
        return ParsedReplies((), {})
    frames = frames.select(ours)
    indices = to_indices(
        parse_integers(lines.text, (lines.subject_starts + prefix_size)[ours], lines.subject_ends[ours])
    )
    plain = frames.header_sizes == 0
    payloads = take_slices(frames.data, frames.payloads, frames.ends)
    acks, is_common = _parse_common_acks(payloads, indices, plain)
    refusals: dict[int, ErrorReply] = {}
    for row in np.flatnonzero(~is_common).tolist():
        index = int(indices[row])
        reply = parse_reply(header_block(frames, row), payloads[row].as_py())
        if isinstance(reply, Receipt):
            one = np.array([index], np.int64)
            acks.append(StreamAcks(reply.stream, one, reply.sequence, int(reply.duplicate)))
        else:
            refusals[index] = reply
    return ParsedReplies(tuple(acks), refusals)


def iterate_replies(frames: Frames, *, sid: int, prefix_size: int) -> Iterator[tuple[int, bytes, bytes]]:
    """Yield number, headers and payload of each reply to the subscription `sid`, for a small number of replies."""
    lines = parse_message_lines(frames)
    ours = np.flatnonzero(lines.sids == sid)
    numbers = parse_integers(lines.text, lines.subject_starts[ours] + prefix_size, lines.subject_ends[ours])
    for row, number in zip(ours.tolist(), numbers.tolist(), strict=True):
        yield number, header_block(frames, row), frames.data[frames.payloads[row] : frames.ends[row]].tobytes()


def parse_reply(headers: bytes, payload: bytes) -> Receipt | ErrorReply:
    """Parse one reply of any shape."""
    return parse_error_status(headers) or parse_publish_reply(payload)


def parse_error_status(headers: bytes) -> ErrorReply | None:
    """Return the error that the status of a header block reports; None for a block without a status."""
    status, text = parse_status(headers)
    if not status:
        return None
    return ErrorReply(status, 0, text or ("no responders" if status == NO_RESPONDERS else "no reason given"))


def _parse_common_acks(payloads: Any, indices: Positions, plain: Mask) -> tuple[list[StreamAcks], Mask]:
    """Parse the replies of the common shape and return a mask of the rows that have it.

    The common shape has six quotes at the expected places and a number before the closing brace.
    """
    data, offsets = bytes_and_offsets(payloads)
    starts, ends = offsets[:-1], offsets[1:]
    quotes = np.flatnonzero(data == 34)
    firsts, counts = group_by_row(quotes, offsets)
    is_common = plain & (counts == 6)
    rows = np.flatnonzero(is_common)
    name_starts = starts[rows] + len(_OPENING)
    name_ends = quotes[firsts[rows] + 3]
    fits = (
        _matches_literal(data, starts[rows], _OPENING)
        & _matches_literal(data, name_ends, _MIDDLE)
        & (data[ends[rows] - 1] == 125)
    )
    sequences, number_starts = parse_number_before(data, ends[rows] - 1)
    fits &= (number_starts == name_ends + len(_MIDDLE)) & (number_starts < ends[rows] - 1)
    if not fits.all():
        is_common[rows[~fits]] = False
        rows, name_starts, name_ends, sequences = rows[fits], name_starts[fits], name_ends[fits], sequences[fits]
    if not len(rows):
        return [], is_common
    names = take_slices(data, name_starts, name_ends).dictionary_encode()
    acked = indices[rows]
    if len(names.dictionary) == 1:
        groups = [(0, acked, sequences)]
    else:
        codes = names.indices.to_numpy()
        order = np.argsort(codes, kind="stable")
        cuts = np.flatnonzero(np.diff(codes[order])) + 1
        groups = [(int(codes[part[0]]), acked[part], sequences[part]) for part in np.split(order, cuts)]
    return [
        StreamAcks(json.loads(b'"' + names.dictionary[code].as_py() + b'"'), which, int(numbers.max()), 0)
        for code, which, numbers in groups
    ], is_common


def _matches_literal(data: Bytes, starts: Positions, literal: Bytes) -> Mask:
    """Return a mask of the positions at which the literal begins."""
    places = np.minimum(starts[:, None] + np.arange(len(literal)), len(data) - 1)
    result: Mask = (data[places] == literal).all(axis=1)
    return result


GET_MESSAGE_SUBJECT: Final = f"{API_PREFIX}STREAM.MSG.GET."
"""The beginning of the request for the newest message of a subject; the name of the stream follows."""

STREAM_INFO_SUBJECT: Final = f"{API_PREFIX}STREAM.INFO."
"""The beginning of the request for the owner of a stream; the name of the stream follows."""

_FIRST_SCAN_MESSAGES: Final = 1000
_SCAN_GROWTH: Final = 10
_DENIED: Final = re.compile(r'Permissions Violation for Publish to "([^"]+)"', re.IGNORECASE)
_WRONG_LAST_ID: Final = 10070
_NOT_ATOMIC: Final = 10174
_STORE_FAILED: Final = 10077
_WRONG_STREAM: Final = 10060
# Limits of the account, of the server, of memory and of storage; and an error of the store, mostly one of its limits.
_STORAGE_FULL_ERRORS: Final = frozenset({10002, 10023, 10028, 10047, _STORE_FAILED})
_UNEXPECTED_REPLY: Final = ErrorReply(0, 0, "the reply is not from JetStream")


class RefusalAction(Enum):
    """The action after a refusal."""

    READ_AGAIN = auto()
    """Another writer was active, or the newest message was deleted: read the last position of the target again."""
    WAIT = auto()
    """A later attempt may succeed."""
    SEND_FEWER = auto()
    """Send fewer rows, to find the row that the server refuses."""
    GIVE_UP = auto()


@dataclass(frozen=True, slots=True)
class NewestMessage:
    """The newest message of a subject; sequence 0 if there is none."""

    sequence: int = 0
    position: int | None = None
    """None if the message carries no position: another program wrote it."""


KNOWN_ROW: Final = ErrorReply(400, _WRONG_LAST_ID, "the stream has stored this row before")
"""Not a reply of the server: a row of a chain was not stored because the stream knows its message id."""


def is_conflict(error: ErrorReply) -> bool:
    """Return whether the stream is not in the expected state."""
    return error.err_code in (WRONG_LAST_SEQUENCE, WRONG_LAST_SEQUENCE_UNKNOWN, _WRONG_LAST_ID)


def decide_action(error: ErrorReply, rows: int) -> tuple[RefusalAction, RefusalKind]:
    """Return the action after a refusal of `rows` rows (0: of a read), and the kind of refusal for the caller."""
    code = error.err_code
    if is_conflict(error):
        return RefusalAction.READ_AGAIN, RefusalKind.OTHER
    closing = code == _STORE_FAILED and "closed" in error.reason  # the server is shutting down
    if error.has_no_responders and rows:
        return RefusalAction.READ_AGAIN, RefusalKind.OTHER  # the read finds out whether the stream has a leader
    if error.is_temporary or error.has_no_responders or closing:
        return RefusalAction.WAIT, RefusalKind.OTHER
    if code == STREAM_NOT_FOUND:
        return RefusalAction.GIVE_UP, RefusalKind.MISSING_STREAM
    if code in _STORAGE_FULL_ERRORS:
        return RefusalAction.GIVE_UP, RefusalKind.FULL
    if code in (_NOT_ATOMIC, STREAM_SEALED, _WRONG_STREAM):
        return RefusalAction.GIVE_UP, RefusalKind.OTHER
    if rows > 1:
        return RefusalAction.SEND_FEWER, RefusalKind.OTHER
    return RefusalAction.GIVE_UP, RefusalKind.TOO_LARGE if code == MESSAGE_TOO_LARGE else RefusalKind.OTHER


def describe(error: ErrorReply) -> str:
    """Return the reason of a refusal, with its fix if one is known."""
    fix = FIXES.get(error.err_code)
    return f"{error.reason} ({fix})" if fix else error.reason


def parse_denied_subject(text: str) -> str | None:
    """Return the subject that a permission error of the server names; None for another error."""
    found = _DENIED.search(text)
    return found[1] if found else None


def encode_newest_request(subject: str) -> bytes:
    """Return the payload of the request for the newest message of a subject."""
    return encode_request({"last_by_subj": subject})


def parse_message_reply(header_block: bytes, payload: bytes) -> dict[str, Any] | ErrorReply | None:
    """Parse the reply to `STREAM.MSG.GET`: the message as JSON, None if there is no message, or an error."""
    body = _parse_body(header_block, payload)
    if isinstance(body, ErrorReply):
        return None if body.err_code == MESSAGE_NOT_FOUND else body
    message = body.get("message")
    return message if isinstance(message, dict) else _UNEXPECTED_REPLY


def _parse_body(header_block: bytes, payload: bytes) -> dict[str, Any] | ErrorReply:
    """Return the JSON of a reply, or the error that it reports."""
    if (failed := parse_error_status(header_block)) is not None:
        return failed
    try:
        body: dict[str, Any] = json.loads(payload)
        error = body.get("error")
        return body if error is None else ErrorReply.from_json(error)
    except (ValueError, TypeError, AttributeError):
        return _UNEXPECTED_REPLY


def parse_stream_reply(header_block: bytes, payload: bytes) -> tuple[str | None, int] | ErrorReply:
    """Parse the reply to `STREAM.INFO`: the owner of the stream, if it has one, and its last sequence; or an error."""
    body = _parse_body(header_block, payload)
    if isinstance(body, ErrorReply):
        return body
    try:
        return (body["config"].get("metadata") or {}).get(INCARNATION), int(body["state"]["last_seq"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return _UNEXPECTED_REPLY


def parse_newest(message: dict[str, Any] | None, header: str) -> NewestMessage:
    """Return sequence and position of a message."""
    if message is None:
        return NewestMessage()
    return NewestMessage(int(message["seq"]), parse_position(headers.first(decode_stored_headers(message), header)))


def parse_position(value: str | None) -> int | None:
    """Parse the value of a position header; None if it is missing or not a number."""
    return int(value) if value is not None and value.isascii() and value.isdigit() else None


def parse_floor(message: dict[str, Any] | None, target: Target) -> int:
    """Return the position that the message of a floor names; raise `ValueError` for an invalid message.

    Raise UnreadableRecord for a delivery state of a newer version: otherwise acknowledged rows would be written again.
    """
    if message is None or not message.get("data"):
        return 0  # no floor yet, or its key was deleted
    try:
        return acked_position(json.loads(decode_stored_data(message)), target.floor_tag)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the message on {target.floor_subject} names no position") from error


def find_last_position(address: Address, target: Target, sequence: int, patience_seconds: float) -> int | None:
    """Return the newest position on the target's subject, up to an existing sequence; None if no message has one.

    It is needed when messages without a position follow: a person published into the queue by hand, or another system
    filled the queue before. The stream is read backwards in growing spans.
    """
    options = ReadOptions(
        subjects=(target.subject,), columns=("sequence", "headers"), patience_seconds=patience_seconds
    )
    header = pa.scalar(target.position_header)
    span = _FIRST_SCAN_MESSAGES
    while True:
        first = max(1, sequence - span)
        seen, position = 0, None
        for batch in read_range(address, target.stream, first, sequence, options):
            seen = batch.column("sequence")[-1].as_py()
            for values in reversed(pc.map_lookup(batch.column("headers"), header, "first").drop_null().to_pylist()):
                found = parse_position(values[0] if values else None)
                if found is not None:
                    position = found
                    break
        if seen != sequence:
            # Deleted in between, or read from a replica that lags behind: messages before it may be missing too.
            raise NoAnswer(f"message {sequence} of stream {target.stream!r} cannot be read", fix="try again")
        if position is not None or first == 1:
            return position
        span *= _SCAN_GROWTH

"""The server's replies to publishes: each one is parsed and matched to its message by the reply subject.

numpy parses the common reply, `{"stream":"ORDERS","seq":7}`, thousands at a time. Any other reply (an error, a
duplicate, a domain, a reply that is not from a stream) is parsed one by one as JSON.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from purveyor.jetstream.api_protocol import NO_RESPONDERS, ErrorReply, Receipt, parse_publish_reply
from purveyor.jetstream.bulk.arrow_bytes import (
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
    """Return at which positions the literal stands."""
    places = np.minimum(starts[:, None] + np.arange(len(literal)), len(data) - 1)
    result: Mask = (data[places] == literal).all(axis=1)
    return result

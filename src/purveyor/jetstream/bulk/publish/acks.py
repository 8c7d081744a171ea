"""What the server answers to publishes: each answer is parsed and matched to its message by the reply subject.

The usual answer, `{"stream":"ORDERS","seq":7}`, is taken apart with numpy, thousands at a time; anything else (an
error, a duplicate, a domain, something that is no answer of a stream at all) is parsed one by one as the JSON it is.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from purveyor.jetstream.api_errors import ID_IN_PROCESS, STREAM_SEALED, TOO_MANY_REQUESTS
from purveyor.jetstream.bulk.arrow_bytes import (
    Bytes,
    Mask,
    Positions,
    contents,
    integers,
    number_left_of,
    per_row,
    take,
)
from purveyor.jetstream.bulk.net.frame_parser import Frames, split_lines

NO_RESPONDERS = 503
DUPLICATE_IN_BATCH = 10201
_TEMPORARY = frozenset({10008, 10009, 10118, ID_IN_PROCESS})  # system unavailable, no leader, stream offline


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer that says no."""

    code: int
    err_code: int
    reason: str

    @property
    def nobody_there(self) -> bool:
        """Nobody listens on that subject: no stream takes it, or its stream has no leader at the moment."""
        return self.code == NO_RESPONDERS and not self.err_code

    @property
    def temporary(self) -> bool:
        """The server itself says that it may work later."""
        return self.err_code in _TEMPORARY or self.code == TOO_MANY_REQUESTS

    @property
    def sealed(self) -> bool:
        """The stream takes nothing more: for good, or until its migration is over."""
        return self.err_code == STREAM_SEALED

    @property
    def in_process(self) -> bool:
        """A message with this id is on its way into the stream: sending again will find it there, or store it."""
        return self.err_code == ID_IN_PROCESS


@dataclass(frozen=True, slots=True)
class StreamAcks:
    """Messages that one stream has: stored now, or duplicates of what it had."""

    stream: str
    indices: Positions
    last_sequence: int
    duplicates: int


@dataclass(frozen=True, slots=True)
class Answers:
    """All answers found in one receive buffer."""

    acks: tuple[StreamAcks, ...]
    refusals: dict[int, Refusal]


@dataclass(frozen=True, slots=True)
class Ack:
    """One answer, parsed as JSON."""

    stream: str
    sequence: int
    duplicate: bool


def parse_answers(
    frames: Frames, *, sid: int, prefix_size: int, to_indices: Callable[[Positions], Positions]
) -> Answers:
    """Answers on the subscription `sid`, whose subjects are a prefix of that size and a number.

    `to_indices` tells which messages the numbers stand for; the numbers come in the order of the answers.
    """
    lines = split_lines(frames)
    ours = lines.sids == sid
    if not ours.any():
        return Answers((), {})
    frames = frames.only(ours)
    indices = to_indices(integers(lines.text, (lines.subject_starts + prefix_size)[ours], lines.subject_ends[ours]))
    plain = frames.header_sizes == 0
    payloads = take(frames.data, frames.payloads, frames.ends)
    acks, usual = _usual(payloads, indices, plain)
    refusals: dict[int, Refusal] = {}
    for row in np.flatnonzero(~usual).tolist():
        index = int(indices[row])
        answer = parse_answer(header_block(frames, row), payloads[row].as_py())
        if isinstance(answer, Ack):
            one = np.array([index], np.int64)
            acks.append(StreamAcks(answer.stream, one, answer.sequence, int(answer.duplicate)))
        else:
            refusals[index] = answer
    return Answers(tuple(acks), refusals)


def one_by_one(frames: Frames, *, sid: int, prefix_size: int) -> Iterator[tuple[int, bytes, bytes]]:
    """Number, headers and payload of each answer on the subscription `sid`: for answers that are few."""
    lines = split_lines(frames)
    ours = np.flatnonzero(lines.sids == sid)
    numbers = integers(lines.text, lines.subject_starts[ours] + prefix_size, lines.subject_ends[ours])
    for row, number in zip(ours.tolist(), numbers.tolist(), strict=True):
        yield number, header_block(frames, row), frames.data[frames.payloads[row] : frames.ends[row]].tobytes()


def header_block(frames: Frames, row: int) -> bytes:
    """The headers of one frame."""
    start = int(frames.bodies[row])
    return frames.data[start : start + int(frames.header_sizes[row])].tobytes()


def status_of(headers: bytes) -> tuple[int, str]:
    """Status and its text from the first line of a header block, `NATS/1.0 503 text`; 0 when it has none."""
    words = headers.partition(b"\r\n")[0].split(b" ", 2)
    status = int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
    return status, words[2].decode("utf-8", "replace") if len(words) > 2 else ""


def parse_answer(headers: bytes, payload: bytes) -> Ack | Refusal:
    """One answer of any shape."""
    status, words = status_of(headers)
    if status:
        return Refusal(status, 0, words or ("no responders" if status == NO_RESPONDERS else "no reason given"))
    try:
        body: Any = json.loads(payload)
        error = body.get("error")
        if error:
            return Refusal(int(error.get("code", 0)), int(error.get("err_code", 0)), str(error.get("description", "")))
        return Ack(str(body["stream"]), int(body["seq"]), bool(body.get("duplicate", False)))
    except (ValueError, KeyError, TypeError, AttributeError):
        return Refusal(0, 0, "the answer is none that a stream gives: something else listens on this subject")


_OPENING = np.frombuffer(b'{"stream":"', np.uint8)
_MIDDLE = np.frombuffer(b'","seq":', np.uint8)


def _usual(payloads: Any, indices: Positions, plain: Mask) -> tuple[list[StreamAcks], Mask]:
    """Acks of the usual shape, and which rows have it: six quotes in their places, and a number up to the brace."""
    data, offsets = contents(payloads)
    starts, ends = offsets[:-1], offsets[1:]
    quotes = np.flatnonzero(data == 34)
    firsts, counts = per_row(quotes, offsets)
    usual = plain & (counts == 6)
    rows = np.flatnonzero(usual)
    name_starts = starts[rows] + len(_OPENING)
    name_ends = quotes[firsts[rows] + 3]
    fits = _holds(data, starts[rows], _OPENING) & _holds(data, name_ends, _MIDDLE) & (data[ends[rows] - 1] == 125)
    sequences, number_starts = number_left_of(data, ends[rows] - 1)
    fits &= (number_starts == name_ends + len(_MIDDLE)) & (number_starts < ends[rows] - 1)
    if not fits.all():
        usual[rows[~fits]] = False
        rows, name_starts, name_ends, sequences = rows[fits], name_starts[fits], name_ends[fits], sequences[fits]
    if not len(rows):
        return [], usual
    names = take(data, name_starts, name_ends).dictionary_encode()
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
    ], usual


def _holds(data: Bytes, starts: Positions, literal: Bytes) -> Mask:
    """Whether the bytes at each position are that literal."""
    places = np.minimum(starts[:, None] + np.arange(len(literal)), len(data) - 1)
    result: Mask = (data[places] == literal).all(axis=1)
    return result

"""Split a receive buffer into the frames of the NATS protocol.

The length of a frame decides where it ends, never its content: a payload may hold line breaks, the word MSG, or a whole
frame. So numpy finds all places that look like a frame at once, and then verifies them: each frame must begin where the
one before it ends. If all of them form that chain (nearly always), no work is done per frame. If a payload imitates a
frame, the parser walks the chain and drops the false candidates.
"""

from dataclasses import dataclass

import numpy as np

from purveyor.jetstream.bulk.arrow_columns import (
    Bytes,
    Mask,
    Positions,
    bytes_and_offsets,
    group_by_row,
    parse_fixed_width,
    parse_number_before,
    take_slices,
)


def _as_uint32(verb: bytes) -> int:
    return int.from_bytes(verb, "little")


_MSG, _HMSG = _as_uint32(b"MSG "), _as_uint32(b"HMSG")
_CONTROL = tuple(map(_as_uint32, (b"PING", b"PONG", b"+OK\r", b"-ERR", b"INFO")))
_FIRST_BYTES = np.zeros(256, np.bool_)
_FIRST_BYTES[list(b"MHP+-I")] = True

BUFFER_BYTES = 4 << 20
_MIN_FREE_BYTES = 64 << 10


class MalformedFrames(ValueError):
    """The bytes are not valid NATS frames; the connection cannot be used any more."""


@dataclass(frozen=True, slots=True)
class Frames:
    """Message frames as positions in the receive buffer; valid until more is received into the buffer."""

    data: Bytes
    starts: Positions
    line_ends: Positions
    header_sizes: Positions
    ends: Positions
    """One past the last byte of the payload, before its line break."""

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def bodies(self) -> Positions:
        """Where headers begin, or the payload if there are none."""
        return self.line_ends + 2

    @property
    def payloads(self) -> Positions:
        """Where payloads begin."""
        return self.line_ends + 2 + self.header_sizes

    def select(self, which: Mask | Positions) -> "Frames":
        """Return a selection of the frames."""
        return Frames(self.data, self.starts[which], self.line_ends[which], self.header_sizes[which], self.ends[which])


@dataclass(frozen=True, slots=True)
class MessageLines:
    """The first lines of frames, copied into one buffer, with the positions of their words."""

    text: Bytes
    subject_starts: Positions
    subject_ends: Positions
    sids: Positions
    reply_starts: Positions
    reply_ends: Positions
    replies: Bytes | None = None
    """If all lines have the same layout: the reply subjects as rows of equal length."""
    subjects: Bytes | None = None
    """If all lines have the same layout: the subjects as rows of equal length."""

    @property
    def has_reply(self) -> Mask:
        """Which lines have a reply subject."""
        return self.reply_ends > self.reply_starts


@dataclass(frozen=True, slots=True)
class ParseResult:
    """The content of a buffer: complete message frames, control lines in order, and the number of parsed bytes."""

    frames: Frames
    controls: tuple[bytes, ...]
    consumed: int
    needed_bytes: int
    """The number of bytes from `consumed` on that the next frame needs."""


def parse_frames(data: Bytes) -> ParseResult:
    """Parse a buffer that begins at the start of a frame and may end anywhere."""
    size = len(data)
    starts, line_ends = _candidates(data)
    if not len(starts):
        return _empty_result(data)
    words = data[starts].astype(np.uint32)
    for index in (1, 2, 3):
        words |= data[starts + index].astype(np.uint32) << np.uint32(8 * index)
    has_headers = words == _HMSG
    is_message = has_headers | (words == _MSG)
    if not is_message.all():
        is_frame = is_message.copy()
        for word in _CONTROL:
            is_frame |= words == word
        starts, line_ends = starts[is_frame], line_ends[is_frame]
        has_headers, is_message = has_headers[is_frame], is_message[is_frame]
    if not len(starts) or starts[0]:
        raise MalformedFrames(f"no frame of the NATS protocol starts with {bytes(data[:16])!r}")
    totals, number_starts = parse_number_before(data, line_ends)
    ends = np.where(is_message, line_ends + 2 + totals, line_ends)
    chain, needed_bytes = _verify_chain(starts, ends + 2, size)
    if chain is not None:
        starts, line_ends, ends = starts[chain], line_ends[chain], ends[chain]
        has_headers, is_message = has_headers[chain], is_message[chain]
        number_starts = number_starts[chain]
    if not len(starts):
        return _empty_result(data, needed_bytes)
    consumed = int(ends[-1]) + 2
    if data[consumed - 2] != 13 or data[consumed - 1] != 10:
        raise MalformedFrames("a payload does not have the length that its frame announces")
    header_sizes = np.zeros(len(starts), np.int64)
    if has_headers.any():
        header_sizes[has_headers] = parse_number_before(data, number_starts[has_headers] - 1)[0]
    frames = Frames(data, starts, line_ends, header_sizes, ends)
    if is_message.all():
        return ParseResult(frames, (), consumed, needed_bytes)
    lines = zip(starts[~is_message].tolist(), line_ends[~is_message].tolist(), strict=True)
    controls = tuple(data[start:end].tobytes() for start, end in lines)
    return ParseResult(frames.select(is_message), controls, consumed, needed_bytes)


def _candidates(data: Bytes) -> tuple[Positions, Positions]:
    """Find where a frame may begin (after a line break, with the first letter of a verb) and its first line ends."""
    returns = np.flatnonzero(data == 13)
    # A frame that begins after return k ends its first line at return k + 1, so starts and ends correspond. Most
    # returns are not before a frame, so the first letter is checked before anything else.
    starts = np.concatenate((np.zeros(1, np.int64), returns[:-1] + 2))[: len(returns)]
    likely = np.flatnonzero(_FIRST_BYTES[data[np.minimum(starts, len(data) - 1)]]) if len(returns) else returns
    if len(returns) and (not len(likely) or likely[0]):
        raise MalformedFrames(f"no frame of the NATS protocol starts with {bytes(data[:16])!r}")
    starts, line_ends = starts[likely], returns[likely]
    whole = (line_ends + 1 < len(data)) & (starts + 4 <= len(data))
    whole &= data[np.minimum(line_ends + 1, len(data) - 1)] == 10
    whole &= (data[starts - 1] == 10) | (starts == 0)
    return starts[whole], line_ends[whole]


def _empty_result(data: Bytes, needed_bytes: int = 0) -> ParseResult:
    none = np.zeros(0, np.int64)
    return ParseResult(Frames(data, none, none, none, none), (), 0, needed_bytes)


def _verify_chain(starts: Positions, follows: Positions, size: int) -> tuple[Positions | None, int]:
    """Return which candidates are complete frames (None: all), and the bytes that the first incomplete one needs."""
    if follows[-1] <= size and (follows[:-1] == starts[1:]).all():
        return None, 0
    broken = np.flatnonzero(follows[:-1] != starts[1:])
    first = int(broken[0]) if len(broken) else len(starts) - 1
    chain = list(range(first))
    successors = np.searchsorted(starts, follows[first:]).tolist()
    follow_list, start_list = follows[first:].tolist(), starts[first:].tolist()
    index, count, needed_bytes = 0, len(start_list), 0
    while index < count:
        follow = follow_list[index]
        if follow > size:
            needed_bytes = follow - start_list[index]
            break
        chain.append(first + index)
        following = successors[index] - first
        if following >= count or start_list[following] != follow:
            break  # the rest is an incomplete first line, or the buffer ends here
        index = following
    return np.array(chain, np.int64), needed_bytes


def parse_message_lines(frames: Frames) -> MessageLines:
    """Parse subject, subscription id and reply of each frame: `MSG <subject> <sid> [reply] <size>`."""
    text, offsets = bytes_and_offsets(take_slices(frames.data, frames.starts, frames.line_ends))
    return _parse_uniform_lines(text, offsets) or _parse_any_lines(text, offsets)


def _parse_uniform_lines(text: Bytes, offsets: Positions) -> MessageLines | None:
    """Parse lines of equal length with their words at the same places, the common case; None for others."""
    rows = len(offsets) - 1
    length = len(text) // rows if rows else 0
    if not length or (offsets[1:] - offsets[:-1] != length).any():
        return None
    grid = text.reshape(rows, length)
    spaces = np.flatnonzero(grid[0] == 32).tolist()
    reply = len(spaces) - 3 - (grid[0, 0] == 72)
    if reply not in (0, 1) or np.count_nonzero(text == 32) != rows * len(spaces) or (grid[:, 0] != grid[0, 0]).any():
        return None
    if not all((grid[:, space] == 32).all() for space in spaces):
        return None
    sids = parse_fixed_width(grid[:, spaces[1] + 1 : spaces[2]])
    if sids is None:
        return None
    begin, end = spaces[2] + 1, spaces[3] if reply else spaces[2] + 1
    firsts = offsets[:-1]
    return MessageLines(
        text,
        subject_starts=firsts + (spaces[0] + 1),
        subject_ends=firsts + spaces[1],
        sids=sids,
        reply_starts=firsts + begin,
        reply_ends=firsts + end,
        replies=grid[:, begin:end],
        subjects=grid[:, spaces[0] + 1 : spaces[1]],
    )


def _parse_any_lines(text: Bytes, offsets: Positions) -> MessageLines:
    spaces = np.flatnonzero(text == 32)
    firsts, counts = group_by_row(spaces, offsets)
    has_headers = text[offsets[:-1]] == 72
    has_reply = counts == np.where(has_headers, 5, 4)
    if (counts - has_headers - has_reply != 3).any():
        raise MalformedFrames("the first line of a frame has too few or too many words")
    subject_ends, sid_ends = spaces[firsts + 1], spaces[firsts + 2]
    sids, _ = parse_number_before(text, sid_ends)
    return MessageLines(
        text,
        subject_starts=spaces[firsts] + 1,
        subject_ends=subject_ends,
        sids=sids,
        reply_starts=sid_ends + 1,
        reply_ends=np.where(has_reply, spaces[np.minimum(firsts + 3, len(spaces) - 1)], sid_ends + 1),
    )


def header_block(frames: Frames, row: int) -> bytes:
    """Return the header block of one frame."""
    start = int(frames.bodies[row])
    return frames.data[start : start + int(frames.header_sizes[row])].tobytes()


def parse_status(headers: bytes) -> tuple[int, str]:
    """Return status and text of the first line of a header block, `NATS/1.0 503 text`; status 0 if it has none."""
    words = headers.partition(b"\r\n")[0].split(b" ", 2)
    status = int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
    return status, words[2].decode("utf-8", "replace") if len(words) > 2 else ""


class ReceiveBuffer:
    """A reused block of memory: the socket fills it at its end, the frame parser consumes it from its start.

    It grows for a frame that is larger than the block.
    """

    def __init__(self, size: int = BUFFER_BYTES) -> None:
        self._size = size
        self._block = np.empty(size, np.uint8)
        self._start = 0
        self._end = 0

    def __len__(self) -> int:
        return self._end - self._start

    def filled(self) -> Bytes:
        """Return the received bytes that are not dropped; valid until the next call of `writable`."""
        return self._block[self._start : self._end]

    def writable(self, needed_bytes: int = 0) -> memoryview:
        """Return memory to receive into, large enough for `needed_bytes` bytes in total."""
        if self._start == self._end:
            self._start = self._end = 0
            if len(self._block) > self._size and needed_bytes <= self._size:
                self._block = np.empty(self._size, np.uint8)
        needed = max(needed_bytes - len(self), _MIN_FREE_BYTES)
        if len(self._block) - self._end < needed:
            block = self._block
            if len(self) + needed > len(block):
                block = np.empty(len(self) + needed, np.uint8)
            rest = self.filled()
            block[: len(rest)] = rest if block is not self._block else rest.copy()
            self._block, self._start, self._end = block, 0, len(rest)
        return self._block.data[self._end :]

    def mark_received(self, count: int) -> None:
        """Record that `count` bytes were written into the memory of `writable`."""
        self._end += count

    def drop(self, count: int) -> None:
        """Drop `count` bytes from the start."""
        self._start += count

    def clear(self) -> None:
        """Drop all bytes."""
        self._start = self._end = 0

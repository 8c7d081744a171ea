"""The first step of everything received: one big buffer is cut into the frames of the NATS protocol.

A frame is told by its length, never by what it looks like: a payload may hold line breaks, the word MSG, or a whole
frame. So places that look like a frame are found with numpy all at once, and then proved: each frame must begin where
the one before it says it ends. When all of them form that chain (nearly always) nothing is done frame by frame; when a
payload imitates a frame, the chain is walked and the impostors fall out.
"""

from dataclasses import dataclass

import numpy as np

from purveyor.jetstream.bulk.arrow_bytes import (
    Bytes,
    Mask,
    Positions,
    contents,
    fixed_numbers,
    number_left_of,
    per_row,
    take,
)


def _word(verb: bytes) -> int:
    return int.from_bytes(verb, "little")


_MSG, _HMSG = _word(b"MSG "), _word(b"HMSG")
_CONTROL = tuple(map(_word, (b"PING", b"PONG", b"+OK\r", b"-ERR", b"INFO")))
_FIRST_BYTES = np.zeros(256, np.bool_)
_FIRST_BYTES[list(b"MHP+-I")] = True


class BrokenFrames(ValueError):
    """The bytes are no NATS protocol; the connection they came from is of no more use."""


@dataclass(frozen=True, slots=True)
class Frames:
    """Message frames as positions in the receive buffer; valid until that buffer is filled again."""

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

    def only(self, which: Mask | Positions) -> "Frames":
        """Some of them."""
        return Frames(self.data, self.starts[which], self.line_ends[which], self.header_sizes[which], self.ends[which])


@dataclass(frozen=True, slots=True)
class Lines:
    """The first lines of frames, side by side in a buffer of their own, and where their words are."""

    text: Bytes
    subject_starts: Positions
    subject_ends: Positions
    sids: Positions
    reply_starts: Positions
    reply_ends: Positions
    replies: Bytes | None = None
    """Where all lines are alike: the reply subjects as rows of equal length ..."""
    subjects: Bytes | None = None
    """... and the subjects."""

    @property
    def has_reply(self) -> Mask:
        """Which of them carry a reply subject."""
        return self.reply_ends > self.reply_starts


@dataclass(frozen=True, slots=True)
class Cut:
    """What a buffer held: whole message frames, control lines in their order, and how far it was used."""

    frames: Frames
    controls: tuple[bytes, ...]
    consumed: int
    wanted: int
    """How long the buffer from `consumed` on must be before it is worth looking again."""


def cut(data: Bytes) -> Cut:
    """Cut a buffer that begins at the beginning of a frame and may end anywhere."""
    size = len(data)
    starts, line_ends = _candidates(data)
    if not len(starts):
        return _nothing(data)
    words = data[starts].astype(np.uint32)
    for place in (1, 2, 3):
        words |= data[starts + place].astype(np.uint32) << np.uint32(8 * place)
    has_headers = words == _HMSG
    is_message = has_headers | (words == _MSG)
    if not is_message.all():
        is_frame = is_message.copy()
        for word in _CONTROL:
            is_frame |= words == word
        starts, line_ends = starts[is_frame], line_ends[is_frame]
        has_headers, is_message = has_headers[is_frame], is_message[is_frame]
    if not len(starts) or starts[0]:
        raise BrokenFrames(f"no frame of the NATS protocol starts with {bytes(data[:16])!r}")
    totals, number_starts = number_left_of(data, line_ends)
    ends = np.where(is_message, line_ends + 2 + totals, line_ends)
    chain, wanted = _chain(starts, ends + 2, size)
    if chain is not None:
        starts, line_ends, ends = starts[chain], line_ends[chain], ends[chain]
        has_headers, is_message = has_headers[chain], is_message[chain]
        number_starts = number_starts[chain]
    if not len(starts):
        return _nothing(data, wanted)
    consumed = int(ends[-1]) + 2
    if data[consumed - 2] != 13 or data[consumed - 1] != 10:
        raise BrokenFrames("a payload does not end where its frame said")
    header_sizes = np.zeros(len(starts), np.int64)
    if has_headers.any():
        header_sizes[has_headers] = number_left_of(data, number_starts[has_headers] - 1)[0]
    frames = Frames(data, starts, line_ends, header_sizes, ends)
    if is_message.all():
        return Cut(frames, (), consumed, wanted)
    lines = zip(starts[~is_message].tolist(), line_ends[~is_message].tolist(), strict=True)
    controls = tuple(data[start:end].tobytes() for start, end in lines)
    return Cut(frames.only(is_message), controls, consumed, wanted)


def _candidates(data: Bytes) -> tuple[Positions, Positions]:
    """Where a frame may begin, and where its first line ends: after a line break, with the first letter of a verb."""
    returns = np.flatnonzero(data == 13)
    # What begins after return k ends its first line at return k + 1, so starts and ends stay in step. Most returns have
    # nothing to do with the beginning of a frame, so the first letter is looked at before anything else.
    starts = np.concatenate((np.zeros(1, np.int64), returns[:-1] + 2))[: len(returns)]
    likely = np.flatnonzero(_FIRST_BYTES[data[np.minimum(starts, len(data) - 1)]]) if len(returns) else returns
    if len(returns) and (not len(likely) or likely[0]):
        raise BrokenFrames(f"no frame of the NATS protocol starts with {bytes(data[:16])!r}")
    starts, line_ends = starts[likely], returns[likely]
    whole = (line_ends + 1 < len(data)) & (starts + 4 <= len(data))
    whole &= data[np.minimum(line_ends + 1, len(data) - 1)] == 10
    whole &= (data[starts - 1] == 10) | (starts == 0)
    return starts[whole], line_ends[whole]


def _nothing(data: Bytes, wanted: int = 0) -> Cut:
    none = np.zeros(0, np.int64)
    return Cut(Frames(data, none, none, none, none), (), 0, wanted)


def _chain(starts: Positions, follows: Positions, size: int) -> tuple[Positions | None, int]:
    """Which candidates are whole frames (None: all of them), and how many bytes the first one that is cut off needs."""
    if follows[-1] <= size and (follows[:-1] == starts[1:]).all():
        return None, 0
    broken = np.flatnonzero(follows[:-1] != starts[1:])
    first = int(broken[0]) if len(broken) else len(starts) - 1
    chain = list(range(first))
    successors = np.searchsorted(starts, follows[first:]).tolist()
    follow_list, start_list = follows[first:].tolist(), starts[first:].tolist()
    place, count, wanted = 0, len(start_list), 0
    while place < count:
        follow = follow_list[place]
        if follow > size:
            wanted = follow - start_list[place]
            break
        chain.append(first + place)
        following = successors[place] - first
        if following >= count or start_list[following] != follow:
            break  # the rest is a first line not yet whole, or the buffer ends here
        place = following
    return np.array(chain, np.int64), wanted


def split_lines(frames: Frames) -> Lines:
    """Subject, subscription and reply of each frame: `MSG <subject> <sid> [reply] <size>`."""
    text, offsets = contents(take(frames.data, frames.starts, frames.line_ends))
    return _split_alike(text, offsets) or _split_any(text, offsets)


def _split_alike(text: Bytes, offsets: Positions) -> Lines | None:
    """Nearly always all lines are as long as each other, and have their words at the same places."""
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
    sids = fixed_numbers(grid[:, spaces[1] + 1 : spaces[2]])
    if sids is None:
        return None
    begin, end = spaces[2] + 1, spaces[3] if reply else spaces[2] + 1
    firsts = offsets[:-1]
    return Lines(
        text,
        subject_starts=firsts + (spaces[0] + 1),
        subject_ends=firsts + spaces[1],
        sids=sids,
        reply_starts=firsts + begin,
        reply_ends=firsts + end,
        replies=grid[:, begin:end],
        subjects=grid[:, spaces[0] + 1 : spaces[1]],
    )


def _split_any(text: Bytes, offsets: Positions) -> Lines:
    spaces = np.flatnonzero(text == 32)
    firsts, counts = per_row(spaces, offsets)
    has_headers = text[offsets[:-1]] == 72
    has_reply = counts == np.where(has_headers, 5, 4)
    if (counts - has_headers - has_reply != 3).any():
        raise BrokenFrames("the first line of a frame has too few or too many words")
    subject_ends, sid_ends = spaces[firsts + 1], spaces[firsts + 2]
    sids, _ = number_left_of(text, sid_ends)
    return Lines(
        text,
        subject_starts=spaces[firsts] + 1,
        subject_ends=subject_ends,
        sids=sids,
        reply_starts=sid_ends + 1,
        reply_ends=np.where(has_reply, spaces[np.minimum(firsts + 3, len(spaces) - 1)], sid_ends + 1),
    )

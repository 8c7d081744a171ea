"""One target of `append_once` on its way: which of its rows come next, and their frames. Nothing is sent from here.

A batch is built in two pieces: all rows but the first can be built ahead, while the batch before is under way; the
first carries what is expected of the subject, which is known only when that one is stored.
"""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final
from uuid import uuid4

import numpy as np
import pyarrow as pa

from purveyor.jetstream.bulk.append import replies as answers
from purveyor.jetstream.bulk.append.chain import Chain
from purveyor.jetstream.bulk.append.encoded_table import Sheet, left_out, positioned, record_batch
from purveyor.jetstream.bulk.append.types import (
    AppendOptions,
    Outcome,
    Refusal,
    RefusalKind,
    Target,
)
from purveyor.jetstream.bulk.arrow_bytes import Positions
from purveyor.jetstream.bulk.header_columns import join
from purveyor.jetstream.bulk.publish.atomic import HEADER_ROOM
from purveyor.jetstream.bulk.publish.frame_builder import (
    Envelope,
    Rows,
    decimal,
    frame,
    frames,
    prepare,
)
from purveyor.jetstream.bulk.publish.pipelined import as_bytes, portions
from purveyor.jetstream.headers import EXPECTED_LAST_SEQUENCE, EXPECTED_LAST_SUBJECT_SEQUENCE
from purveyor.model.errors import InvalidInput, PublishRefused

_BLOCK_ROWS: Final = 4000
_BLOCK_BYTES: Final = 64 << 20
_BATCH_BYTES: Final = 4 << 20
SINGLES_PAY: Final = 4
"""Rows: a batch, however small, costs the server as much as ten single messages."""
_COLUMNS_PAY: Final = 64  # rows, from which on frames are built faster column by column
_EXPECTED_ROOM: Final = 120
_MOST_LOOKS: Final = 6


class Step(Enum):
    """What a target needs next."""

    NEWEST = auto()
    FLOOR = auto()
    """After the newest, never before or beside it: a message acknowledged in between is then in one of the two."""
    OWNER = auto()
    """Last, directly before anything is written."""
    WRITE = auto()
    DONE = auto()


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows that are stored together, or one alone. Answers come on the numbers 2 * number, the last row's plus 1."""

    number: int
    start: int
    rows: Rows
    id: str
    inbox: str
    body: memoryview | None
    """All frames but the first."""

    @property
    def end(self) -> int:
        """The first row behind it."""
        return self.start + len(self.rows)

    @property
    def size(self) -> int:
        """About how many bytes are on the wire: the first frame left out if there are others."""
        return len(self.body) if self.body is not None else len(self.rows.payloads[0].as_buffer())

    def head(self, expected: bytes) -> bytes:
        """The first frame, now that it is known what comes before it."""
        lines = expected
        number = 2 * self.number + 1
        if self.body is not None:
            lines += f"Nats-Batch-Id: {self.id}\r\nNats-Batch-Sequence: 1\r\n".encode()
            number = 2 * self.number
        return frame(self.rows, 0, reply=f" {self.inbox}.{number}".encode(), extra_lines=lines)


@dataclass(slots=True, eq=False)
class Course:
    """A target, its rows, and how far they have come."""

    target: Target
    sheet: Sheet
    limit: int
    chains: bool
    """Whether it may be written in a chain, as far as is known of its rows, its stream and how it went."""
    step: Step = Step.NEWEST
    next: int = 0
    """The first row that is neither stored nor skipped."""
    stored: int = 0
    in_doubt: int = 0
    """Up to this row all was sent in a chain that broke: what is there of it counts as stored."""
    watermark: int = 0
    newest: int = 0
    """The position of the newest message of the subject."""
    expected: int = 0
    """The sequence of that message ..."""
    seen_at: float = 0.0
    """... and when that was the server's word."""
    stream_last: int | None = None
    """The last sequence of the stream, where that has to tell it from another of its name."""
    looks: int = 0
    """How often it was asked whose the stream is, while the subject was empty."""
    sent: Batch | None = None
    built: Batch | None = None
    asked_at: float = 0.0
    number: int = 0
    """Of the answer that is waited for."""
    rests_until: float = 0.0
    failures: int = 0
    """Since there was progress."""
    failing_since: float | None = None
    refused: Refusal | None = None
    chain: Chain = field(default_factory=Chain)
    _block: Rows | None = field(default=None, repr=False)

    @property
    def positions(self) -> Positions:
        """Of all its rows."""
        return self.sheet.positions

    @property
    def outcome(self) -> Outcome:
        """What the caller gets."""
        written = int(self.positions[self.next - 1]) if self.next else 0
        last = max(self.watermark, written)
        return Outcome(self.target, self.stored, self.next - self.stored, last, self.refused)

    @property
    def question(self) -> tuple[str, bytes]:
        """What is asked next: where, and how."""
        stream, subject = self.source
        if self.step is Step.OWNER:
            return f"{answers.ABOUT}{stream}", b""
        return f"{answers.QUESTION}{stream}", answers.question(subject)

    @property
    def expectation(self) -> bytes:
        """What the first of the next rows expects, as header lines.

        The sequence of a message is never that of another in a stream of the same name. Where the subject holds none,
        the last sequence of the whole stream is expected as well, so that the first row too is bound to this stream.
        """
        lines = f"{EXPECTED_LAST_SUBJECT_SEQUENCE}: {self.expected}\r\n"
        if not self.expected and self.stream_last is not None:
            lines += f"{EXPECTED_LAST_SEQUENCE}: {self.stream_last}\r\n"
        return lines.encode()

    def belongs(self, owner: str | None, last: int) -> bool:
        """Whether the stream, which has come to that sequence, is the one that is meant; if not, it is refused.

        Where others write so fast to other subjects of it (a prefill does) that it never stands still between question
        and row, the first row goes without that expectation in the end, a fraction of a millisecond after the answer.
        """
        if owner not in (None, self.target.owner):
            self.refuse(f"{self.target.stream} belongs to another ({owner}) by now", 0, RefusalKind.REPLACED)
            return False
        self.looks += not self.expected
        self.stream_last = last if self.looks <= _MOST_LOOKS else None
        return True

    @property
    def source(self) -> tuple[str, str]:
        """Stream and subject that are asked next, or written to."""
        if self.step is Step.FLOOR and self.target.floor_stream is not None and self.target.floor_subject is not None:
            return self.target.floor_stream, self.target.floor_subject
        return self.target.stream, self.target.subject

    def progress(self) -> None:
        """Something worked: failures are counted anew."""
        self.failures, self.failing_since = 0, None

    def written_up_to(self, watermark: int) -> bool:
        """The rows up to a position are there: go on behind them. Whether that is further than was known."""
        before = self.next
        following = int(np.searchsorted(self.positions, watermark, side="right"))
        if following < self.next and self.target.floor_subject is not None:
            # Newest message and floor are all there is to know: a server that lost power forgot what it had stored.
            self.stored = max(0, self.stored - (self.next - following))
            self.next = following
        elif following > self.next:
            self.stored += max(0, min(following, self.in_doubt) - self.next)
            self.next = following
            self.progress()
        self.watermark, self.in_doubt = watermark, 0
        return self.next > before

    def refuse(self, reason: str, code: int, kind: RefusalKind) -> None:
        """No more can be written to this target."""
        position = int(self.positions[min(self.next, len(self.positions) - 1)]) if len(self.positions) else 0
        self.refused = Refusal(position, reason, code, kind)
        self.finish()

    def finish(self) -> None:
        """Nothing more is to be done."""
        self.step, self.built, self._block = Step.DONE, None, None

    def batch(self, number: int, inbox: str, start: int, options: AppendOptions, max_payload: int) -> Batch:
        """The rows from `start` on that go together. A first row that cannot be sent is an error of our tree."""
        block = self._block
        if block is None or not block.first_index <= start < block.first_index + len(block):
            block = self._block = self._prepare(start, max_payload)
        ahead = block.slice(start - block.first_index, len(block) - (start - block.first_index))
        limit = self.limit if len(self.positions) - start > SINGLES_PAY else 1
        rows = next(portions(ahead, limit, min(options.window_bytes, _BATCH_BYTES)))
        batch_id = uuid4().hex
        body = _body(rows, batch_id, f" {inbox}.{2 * number + 1}") if len(rows) > 1 else None
        return Batch(number, start, rows, batch_id, inbox, body)

    def _prepare(self, start: int, max_payload: int) -> Rows:
        """A block of rows from `start` on, none of which is too large or otherwise impossible to send."""
        header = self.target.position_header
        room = HEADER_ROOM + _EXPECTED_ROOM + len(header) + len(": 9223372036854775807\r\n")
        envelope = Envelope(None, self.target.stream, max_payload - room, left_out(header))
        batch = record_batch(_some(self.sheet.table, start), self.target.subject)
        while True:
            try:
                return positioned(prepare(batch, start, envelope), self.sheet)
            except (InvalidInput, PublishRefused):
                if batch.num_rows == 1:
                    raise
                batch = batch.slice(0, batch.num_rows // 2)  # what comes before that row is written first


def course(target: Target, sheet: Sheet, options: AppendOptions, *, chains: bool) -> Course:
    """A target at its beginning."""
    return Course(target, sheet, options.batch_rows, chains)


def _some(table: Any, start: int) -> Any:
    """Some rows of a table: bounded, because the columns of a record batch cannot hold more than 2 GB."""
    part = table.slice(start, _BLOCK_ROWS)
    while part.num_rows > 1 and part.nbytes > _BLOCK_BYTES:
        part = part.slice(0, part.num_rows // 2)
    return part


def _body(rows: Rows, batch_id: str, commit_reply: str) -> memoryview:
    """The frames of a batch without the first."""
    count = len(rows) - 1
    beginning, commit = f"Nats-Batch-Id: {batch_id}\r\nNats-Batch-Sequence: ".encode(), b"Nats-Batch-Commit: 1\r\n"
    reply = commit_reply.encode()
    if count < _COLUMNS_PAY:
        lines = [beginning + b"%d\r\n" % (row + 1) for row in range(1, count + 1)]
        plain = [frame(rows, row, reply=b"", extra_lines=lines[row - 1]) for row in range(1, count)]
        return memoryview(b"".join([*plain, frame(rows, count, reply=reply, extra_lines=lines[-1] + commit)]))
    between = [b""] * (count - 1)
    replies = pa.array([*between, reply], pa.binary())
    commits = pa.array([*between, commit], pa.binary())
    joined = join(beginning, decimal(pa.array(np.arange(2, count + 2))), b"\r\n", commits)
    return as_bytes(frames(rows.slice(1, count), replies=replies, extra_lines=joined))

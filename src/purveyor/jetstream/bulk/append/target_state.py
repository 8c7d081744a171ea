"""The state of one target of `append_once`: which of its rows come next, and their frames. Pure: it sends nothing.

A batch is built in two pieces. All rows but the first are built ahead, while the batch before is in flight. The first
row carries what the writer expects of the subject, which is known only when the batch before is stored.

In a chain, each row expects that the last message of the stream is the row before it, identified by its message id. If
the stream does not store a row, for any reason, it stores no row after it: no gap can arise, and a message of
another writer ends the chain. (A predicted sequence would not do: the message of another writer takes the sequence of a
row, and the row after that one finds exactly the sequence it expects.)

If the stream stores a row, it has all rows before it. So one reply per some hundred rows is enough. If the stream
refuses such a row, the replies do not say how many rows before it are stored: the writer reads that from the target.
"""

from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final
from uuid import uuid4

import numpy as np
import pyarrow as pa

from purveyor.jetstream.api import ErrorReply, Receipt
from purveyor.jetstream.bulk import replies as append_replies
from purveyor.jetstream.bulk.append.encoded_table import EncodedTable, add_positions, exclude_headers, to_record_batch
from purveyor.jetstream.bulk.arrow_columns import Positions, join
from purveyor.jetstream.bulk.options import (
    AppendOptions,
    Outcome,
    Refusal,
    RefusalKind,
    Target,
)
from purveyor.jetstream.bulk.publish.atomic import BATCH_HEADER_BYTES
from purveyor.jetstream.bulk.publish.frame_builder import (
    FrameOptions,
    PreparedRows,
    build_frame,
    build_frames,
    prepare,
    to_digits,
)
from purveyor.jetstream.bulk.publish.pipelined import as_bytes, split_rows
from purveyor.jetstream.bulk.replies import KNOWN_ROW
from purveyor.jetstream.headers import EXPECTED_LAST_SEQUENCE, EXPECTED_LAST_SUBJECT_SEQUENCE
from purveyor.model.errors import InvalidInput, PublishRefused

_BLOCK_ROWS: Final = 4000
_BLOCK_BYTES: Final = 64 << 20
_BATCH_BYTES: Final = 4 << 20
MAX_SINGLE_ROWS: Final = 4
"""Up to this many rows are sent one by one: a batch, however small, costs the server as much as ten messages."""
_MIN_COLUMN_ROWS: Final = 64  # from this many rows on, building frames column by column is faster
_EXPECTED_HEADER_BYTES: Final = 120
_MAX_OWNER_CHECKS: Final = 6
MAX_FRUITLESS_CHAINS: Final = 2
"""After this many chains in a row that lost more rows than they stored, other writers are active: use batches."""


class Step(Enum):
    """The next step of a target."""

    READ_NEWEST = auto()
    READ_FLOOR = auto()
    """After READ_NEWEST, never before or at the same time: one of the two then shows a message acknowledged between."""
    CHECK_OWNER = auto()
    """The last read, directly before the first write."""
    WRITE = auto()
    DONE = auto()


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows that the stream stores together, or a single row.

    Replies come on the reply subject 2 * `reply_number`, the reply to the last row on that number plus 1.
    """

    reply_number: int
    start: int
    rows: PreparedRows
    id: str
    inbox: str
    body: memoryview | None
    """All frames but the first."""

    @property
    def end(self) -> int:
        """The first row after the batch."""
        return self.start + len(self.rows)

    @property
    def size(self) -> int:
        """The approximate size in bytes, without the first frame if there are others."""
        return len(self.body) if self.body is not None else len(self.rows.payloads[0].as_buffer())

    def head(self, expected: bytes) -> bytes:
        """Build the first frame with the headers of its expectation."""
        lines = expected
        number = 2 * self.reply_number + 1
        if self.body is not None:
            lines += f"Nats-Batch-Id: {self.id}\r\nNats-Batch-Sequence: 1\r\n".encode()
            number = 2 * self.reply_number
        return build_frame(self.rows, 0, reply=f" {self.inbox}.{number}".encode(), extra_lines=lines)


@dataclass(slots=True, eq=False)
class SentRows:
    """Consecutive rows sent together; the reply to the last of them is the reply to all."""

    reply_number: int
    """The last token of the reply subject."""
    start: int
    rows: int
    size: int
    sent_at: float
    reply: Receipt | ErrorReply | None = None

    def record_reply(self, reply: Receipt | ErrorReply) -> None:
        """Store the reply to the last row. A duplicate proves nothing about the rows before it: it is an error."""
        self.reply = KNOWN_ROW if isinstance(reply, Receipt) and reply.duplicate and self.rows > 1 else reply


@dataclass(frozen=True, slots=True)
class ChainProgress:
    """The progress of a chain: the row to continue with, the rows stored, and the error that broke it, if any."""

    next_row: int
    stored: int
    seen_at: float
    cause: ErrorReply | None = None


@dataclass(slots=True, eq=False)
class RowChain:
    """The rows of a target that are in flight in a chain."""

    sent_rows: deque[SentRows] = field(default_factory=deque)
    sent: int = 0
    """The first row that was not sent."""
    sequence: int = 0
    """The sequence of the newest message that the chain stored."""
    fruitless: int = 0
    begun: bool = False
    """Whether its first row is stored. Only that proves that this is the right stream: other rows wait for it."""
    broken: bool = False
    _stored_rows: int = 0

    def begin(self, row: int) -> None:
        """Start a new chain with a row."""
        self.sent_rows.clear()
        self.sent, self.sequence, self._stored_rows = row, 0, 0
        self.begun = self.broken = False

    def advance(self) -> ChainProgress | None:
        """Return the progress since the last call, if any. Report a broken chain once every sent row has its reply."""
        stored, passed = 0, None
        while self.sent_rows and isinstance(reply := self.sent_rows[0].reply, Receipt):
            passed = self.sent_rows.popleft()
            self.begun = True
            if not reply.duplicate:
                stored += passed.rows
                self.sequence = max(self.sequence, reply.sequence)
        self._stored_rows += stored
        self.broken = self.broken or any(isinstance(sent.reply, ErrorReply) for sent in self.sent_rows)
        cause = self._cause() if self.broken else None
        if passed is None and cause is None:
            return None
        next_row = self.sent_rows[0].start if passed is None else passed.start + passed.rows
        if cause is not None:
            self.sent_rows.clear()
        return ChainProgress(next_row, stored, 0.0 if passed is None else passed.sent_at, cause)

    def _cause(self) -> ErrorReply | None:
        """Return the error that broke the chain; None while a reply is missing."""
        replies = [sent.reply for sent in self.sent_rows]
        if None in replies:
            return None
        lost_rows = sum(sent.rows for sent in self.sent_rows if isinstance(sent.reply, ErrorReply))
        self.fruitless = self.fruitless + 1 if self._stored_rows < lost_rows else 0
        return next(reply for reply in replies if isinstance(reply, ErrorReply))


@dataclass(slots=True, eq=False)
class TargetState:
    """A target, its rows, and which of them are stored."""

    target: Target
    encoded: EncodedTable
    batch_limit: int
    may_chain: bool
    """Whether a chain may write it, judged by its rows, its stream and the chains before."""
    step: Step = Step.READ_NEWEST
    next_row: int = 0
    """The first row that is neither stored nor skipped."""
    stored: int = 0
    in_doubt: int = 0
    """A broken chain sent all rows below this one: those found in the stream count as stored."""
    watermark: int = 0
    newest: int = 0
    """The position of the newest message of the subject."""
    expected: int = 0
    """The sequence of that message."""
    seen_at: float = 0.0
    """When the server reported that sequence."""
    stream_last: int | None = None
    """The last sequence of the stream; set where it must distinguish the stream from another of the same name."""
    owner_checks: int = 0
    """The number of owner checks while the subject was empty."""
    sent: Batch | None = None
    built_batch: Batch | None = None
    requested_at: float = 0.0
    reply_number: int = 0
    """The number of the awaited reply."""
    retry_at: float = 0.0
    failures: int = 0
    """Failures since the last progress."""
    failing_since: float | None = None
    refused: Refusal | None = None
    chain: RowChain = field(default_factory=RowChain)
    _block: PreparedRows | None = field(default=None, repr=False)

    @property
    def positions(self) -> Positions:
        """The positions of all rows."""
        return self.encoded.positions

    @property
    def outcome(self) -> Outcome:
        """The result for the caller."""
        written = int(self.positions[self.next_row - 1]) if self.next_row else 0
        last = max(self.watermark, written)
        return Outcome(self.target, self.stored, self.next_row - self.stored, last, self.refused)

    @property
    def request(self) -> tuple[str, bytes]:
        """The subject and payload of the next API request."""
        stream, subject = self.source
        if self.step is Step.CHECK_OWNER:
            return f"{append_replies.STREAM_INFO_SUBJECT}{stream}", b""
        return f"{append_replies.GET_MESSAGE_SUBJECT}{stream}", append_replies.encode_newest_request(subject)

    @property
    def expected_headers(self) -> bytes:
        """The expectation of the next row, as header lines.

        Sequences do not repeat among streams of the same name. If the subject holds no message, the row also expects
        the last sequence of the whole stream, so that the first row, too, is bound to this stream.
        """
        lines = f"{EXPECTED_LAST_SUBJECT_SEQUENCE}: {self.expected}\r\n"
        if not self.expected and self.stream_last is not None:
            lines += f"{EXPECTED_LAST_SEQUENCE}: {self.stream_last}\r\n"
        return lines.encode()

    def check_owner(self, owner: str | None, last: int) -> bool:
        """Return whether the stream belongs to the target's owner; refuse the target if not. `last`: its last sequence.

        Other writers (a prefill) may write to other subjects so fast that the stream's last sequence always changes
        between the check and the row. After some checks the first row is sent without that expectation, a fraction of a
        millisecond after the reply.
        """
        if owner not in (None, self.target.owner):
            self.refuse(f"{self.target.stream} now belongs to another owner ({owner})", 0, RefusalKind.REPLACED)
            return False
        self.owner_checks += not self.expected
        self.stream_last = last if self.owner_checks <= _MAX_OWNER_CHECKS else None
        return True

    @property
    def source(self) -> tuple[str, str]:
        """The stream and subject that are read next, or written."""
        if (
            self.step is Step.READ_FLOOR
            and self.target.floor_stream is not None
            and self.target.floor_subject is not None
        ):
            return self.target.floor_stream, self.target.floor_subject
        return self.target.stream, self.target.subject

    def progress(self) -> None:
        """Reset the count of failures."""
        self.failures, self.failing_since = 0, None

    def advance_to(self, watermark: int) -> bool:
        """Skip the rows up to a position, which the target has; return whether that is progress."""
        before = self.next_row
        following = int(np.searchsorted(self.positions, watermark, side="right"))
        if following < self.next_row and self.target.floor_subject is not None:
            # The newest message and the floor are authoritative: a server that lost power has lost stored messages.
            self.stored = max(0, self.stored - (self.next_row - following))
            self.next_row = following
        elif following > self.next_row:
            self.stored += max(0, min(following, self.in_doubt) - self.next_row)
            self.next_row = following
            self.progress()
        self.watermark, self.in_doubt = watermark, 0
        return self.next_row > before

    def refuse(self, reason: str, code: int, kind: RefusalKind) -> None:
        """End the target with a refusal at its next row."""
        position = int(self.positions[min(self.next_row, len(self.positions) - 1)]) if len(self.positions) else 0
        self.refused = Refusal(position, reason, code, kind)
        self.finish()

    def finish(self) -> None:
        """End the target."""
        self.step, self.built_batch, self._block = Step.DONE, None, None

    def batch(self, number: int, inbox: str, start: int, options: AppendOptions, max_payload: int) -> Batch:
        """Build the next batch, beginning with row `start`; raise an error of our tree if that row cannot be sent."""
        block = self._block
        if block is None or not block.first_index <= start < block.first_index + len(block):
            block = self._block = self._prepare(start, max_payload)
        ahead = block.slice(start - block.first_index, len(block) - (start - block.first_index))
        limit = self.batch_limit if len(self.positions) - start > MAX_SINGLE_ROWS else 1
        rows = next(split_rows(ahead, limit, min(options.window_bytes, _BATCH_BYTES)))
        batch_id = uuid4().hex
        body = _build_body(rows, batch_id, f" {inbox}.{2 * number + 1}") if len(rows) > 1 else None
        return Batch(number, start, rows, batch_id, inbox, body)

    def _prepare(self, start: int, max_payload: int) -> PreparedRows:
        """Prepare a block of rows from `start` on; it ends before a row that is too large or invalid."""
        header = self.target.position_header
        room = BATCH_HEADER_BYTES + _EXPECTED_HEADER_BYTES + len(header) + len(": 9223372036854775807\r\n")
        frame_options = FrameOptions(None, self.target.stream, max_payload - room, exclude_headers(header))
        batch = to_record_batch(_slice_table(self.encoded.table, start), self.target.subject)
        while True:
            try:
                return add_positions(prepare(batch, start, frame_options), self.encoded)
            except (InvalidInput, PublishRefused):
                if batch.num_rows == 1:
                    raise
                batch = batch.slice(0, batch.num_rows // 2)  # write the rows before that row first


def _slice_table(table: Any, start: int) -> Any:
    """Return the next rows of a table, bounded because the columns of a record batch hold at most 2 GB."""
    part = table.slice(start, _BLOCK_ROWS)
    while part.num_rows > 1 and part.nbytes > _BLOCK_BYTES:
        part = part.slice(0, part.num_rows // 2)
    return part


def _build_body(rows: PreparedRows, batch_id: str, commit_reply: str) -> memoryview:
    """Build the frames of a batch without the first."""
    count = len(rows) - 1
    beginning, commit = f"Nats-Batch-Id: {batch_id}\r\nNats-Batch-Sequence: ".encode(), b"Nats-Batch-Commit: 1\r\n"
    reply = commit_reply.encode()
    if count < _MIN_COLUMN_ROWS:
        lines = [beginning + b"%d\r\n" % (row + 1) for row in range(1, count + 1)]
        plain = [build_frame(rows, row, reply=b"", extra_lines=lines[row - 1]) for row in range(1, count)]
        return memoryview(b"".join([*plain, build_frame(rows, count, reply=reply, extra_lines=lines[-1] + commit)]))
    between = [b""] * (count - 1)
    replies = pa.array([*between, reply], pa.binary())
    commits = pa.array([*between, commit], pa.binary())
    joined = join(beginning, to_digits(pa.array(np.arange(2, count + 2))), b"\r\n", commits)
    return as_bytes(build_frames(rows.slice(1, count), replies=replies, extra_lines=joined))
